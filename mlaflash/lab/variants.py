"""Every compiled form of the kernels: what fills a cache, and what a compiler is asked about."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from mlaflash import combine, cost, mask_pack, tuned
from mlaflash.device import Device
from mlaflash.distributed import merging, transposing
from mlaflash.errors import CompileError, UnsupportedError
from mlaflash.jit import CompiledKernel, compile_cached, compiler_threads
from mlaflash.kv import compact, move
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.space import SPACES
from mlaflash.lab.target import Built, built_key, no_progress, read_problem
from mlaflash.mma_tiles import feature_defines
from mlaflash.params import DTYPE_CODES, FP8_CODES
from mlaflash.problem import Problem
from mlaflash.schedule import CHUNK_TOKENS, FP8_KERNELS, KERNELS, MMA_KERNELS, Launch, deterministic_config, plan
from mlaflash.tiles import KernelConfig, list_defines

COMPILED: Final = (*KERNELS, "combine", "mask", "merge", "transpose", "compact", "move")
ARCHS: Final = ("sm_80", "sm_89", "sm_90", "sm_120")
"""Architectures that are compiled for where all are asked for."""
_FEATURES: Final = frozenset(name.lower() for name in {**feature_defines(0, False, False), **list_defines(True)})


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form.

    Attributes
    ----------
    kernel : str
    arch : str
    config : dict
        From `form`.
    defines : dict of str to int
    shared_bytes : int
        Dynamic shared memory of a block.
    shared_limit : int
        Of the architecture's usual card.
    is_shipped : bool
        Whether a call chooses it by itself; else it is a candidate of a sweep.
    """

    kernel: str
    arch: str
    config: dict[str, Any]
    defines: dict[str, int]
    shared_bytes: int
    shared_limit: int
    is_shipped: bool = True


@dataclass(frozen=True, slots=True)
class Compilation:
    """What became of a variant.

    Attributes
    ----------
    variant : Variant
    compiled : CompiledKernel or None
        None where the compiler refused it.
    error : str
        Why it did.
    """

    variant: Variant
    compiled: CompiledKernel | None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it compiled and fits, and keeps its registers where it is shipped."""
        return self.compiled is not None and self.fits and not (self.spills and self.variant.is_shipped)

    @property
    def spills(self) -> bool:
        """Whether it compiled, and has more values at once than registers."""
        return self.compiled is not None and self.compiled.spill_bytes > 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.variant.shared_bytes + (self.compiled.static_shared_bytes if self.compiled else 0)

    @property
    def fits(self) -> bool:
        """Whether a block may have that much shared memory."""
        return self.shared_bytes <= self.variant.shared_limit

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        variant, compiled = self.variant, self.compiled
        return {
            "kernel": variant.kernel,
            "arch": variant.arch,
            "config": variant.config,
            "registers": compiled.registers if compiled else None,
            "spill_bytes": compiled.spill_bytes if compiled else None,
            "shared_bytes": self.shared_bytes,
            "shared_limit": variant.shared_limit,
            "seconds": round(compiled.seconds, 3) if compiled else None,
            "cached": compiled is not None and compiled.cached,
        }


def form(kernel: str, defines: Mapping[str, int]) -> dict[str, Any]:
    """Name the constants of a compiled form as records do.

    Parameters
    ----------
    kernel : str
    defines : mapping of str to int

    Returns
    -------
    dict
        Constants under their lower-case names; ``dtype`` of q; where they differ from it ``kv_dtype``, ``out_dtype``
        and, of `combine` and `merge`, ``partial_dtype``. In the other kernels the latter follows from the rest. Of
        `mask`, the name of its format.
    """
    if kernel == "mask":
        code = defines.get("FORMAT")
        name = next((name for name, known in mask_pack.FORMAT_CODES.items() if known == code), "unknown")
        return {"format": name} | ({"sharded": 1} if defines.get("SHARDED") else {})
    names = {code: name for name, code in (DTYPE_CODES | FP8_CODES).items()}
    config: dict[str, Any] = {name.lower(): code for name, code in defines.items() if not name.endswith("_DTYPE")}
    roles = ("OUT", "PARTIAL") if kernel in ("combine", "merge") else ("KV", "OUT")
    if "Q_DTYPE" in defines:
        config["dtype"] = names.get(defines["Q_DTYPE"], "unknown")
        for role in roles:
            name = names.get(defines.get(f"{role}_DTYPE", -1), "unknown")
            config |= {f"{role.lower()}_dtype": name} if name != config["dtype"] else {}
    return config


def spell(config: Mapping[str, Any]) -> str:
    """Spell what `form` returns, without the features that a form leaves out.

    Parameters
    ----------
    config : mapping of str to Any
    """
    words = []
    for name, value in config.items():
        if name in _FEATURES:
            words += [name] if value else []
        else:
            words.append(str(value) if name == "dtype" else f"{name}={value}")
    return " ".join(words)


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether a form has no feature that most calls do without, and is not that of deterministic calls.

    Parameters
    ----------
    config : mapping of str to Any
        From `form`.
    """
    return not any(config.get(name) for name in (*_FEATURES, "deterministic"))


def variants(
    arch: str,
    dtypes: Sequence[str],
    kernels: Sequence[str],
    *,
    out_dtypes: Sequence[str] = (),
    kv_dtypes: Sequence[str] = (),
    every_tile: bool = False,
) -> tuple[list[Variant], list[str]]:
    """List what the calls on an architecture need compiled.

    Parameters
    ----------
    arch : str
    dtypes : sequence of str
    kernels : sequence of str
        Of `COMPILED`.
    out_dtypes : sequence of str
        Element types of `out`; none is that of q, and float32.
    kv_dtypes : sequence of str
        What caches hold, of q's element type and `mlaflash.params.FP8_CODES`; none is all of them.
    every_tile : bool
        All candidates of a sweep as well, where otherwise the tiles are those that the library chooses.

    Returns
    -------
    variants : list of Variant
    refused : list of str
        Why the others are none: they do not fit, or the kernel does not do it.

    Raises
    ------
    UnsupportedError
        The architecture is unknown.
    """
    device = Device.for_arch(arch)
    found: dict[Built, Variant] = {}
    refused: dict[str, None] = {}
    # Plans come from the same code as a call's: what is compiled here is what a call looks for.
    for call in _calls(device, dtypes, out_dtypes, kv_dtypes, every_tile):
        try:
            launches = plan(
                call.problem, device, kernel=call.kernel, tiles=call.config, deterministic=call.deterministic
            ).launches
        except UnsupportedError as error:
            refused.setdefault(str(error))
            continue
        for launch in launches:
            # A kernel of another name than the plan's, `combine` apart, is a form of the planned one.
            if (launch.kernel if launch.kernel in COMPILED else call.kernel) not in kernels:
                continue
            found.setdefault(built_key(launch), variant(launch, device, is_shipped=call.is_shipped))
    masks = *mask_pack.every_launch(), *mask_pack.every_launch(is_sharded=True)
    exchanged = *merging.every_launch(), transposing.transpose_launch()
    for launch in (*masks, *exchanged, *compact.every_launch(), *move.every_launch()):
        if launch.kernel in kernels:
            found[built_key(launch)] = variant(launch, device)
    order = {kernel: place for place, kernel in enumerate(COMPILED)}
    return sorted(found.values(), key=lambda variant: order.get(variant.kernel, -1)), list(refused)


def variant(launch: Launch, device: Device, *, is_shipped: bool = True) -> Variant:
    """Return what has to be compiled for a launch.

    Parameters
    ----------
    launch : Launch
    device : Device
    is_shipped : bool
        As in `Variant`.
    """
    return Variant(
        launch.kernel,
        device.arch,
        form(launch.kernel, launch.defines),
        dict(launch.defines),
        launch.shared_bytes,
        device.shared_per_block,
        is_shipped,
    )


def compile_all(
    wanted: Sequence[Variant], progress: Callable[[str, int, int], None] = no_progress
) -> Iterator[Compilation]:
    """Compile variants side by side, through the cache.

    Parameters
    ----------
    wanted : sequence of Variant
    progress : callable
        Told what is done, how much of it, and of how much.

    Yields
    ------
    Compilation
        In the order of `wanted`.

    Raises
    ------
    MissingDependencyError
        CuPy or NVRTC is not installed.
    """
    with ThreadPoolExecutor(compiler_threads()) as pool:
        try:
            for done, result in enumerate(pool.map(_compile, wanted), 1):
                yield result
                progress("compiling", done, len(wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile(variant: Variant) -> Compilation:
    try:
        compiled = compile_cached(variant.kernel, variant.defines, variant.arch, ahead_of_time=True)
        return Compilation(variant, compiled)
    except CompileError as error:
        return Compilation(variant, None, str(error))


@dataclass(frozen=True, slots=True)
class _Call:
    kernel: str
    problem: Problem
    config: KernelConfig | None
    is_shipped: bool = True
    deterministic: bool = False


_MANY_TOKENS = 9  # of 8 heads: so many rows that their splits are merged in another way than those of one token


def _calls(
    device: Device, dtypes: Sequence[str], out_dtypes: Sequence[str], kv_dtypes: Sequence[str], every_tile: bool
) -> Iterator[_Call]:
    """List calls that together need every form."""
    candidates: list[_Call] = []
    for dtype, kv_dtype in itertools.product(dtypes, (*DTYPE_CODES, *FP8_CODES)):
        is_fp8 = kv_dtype in FP8_CODES
        if (kv_dtypes and kv_dtype not in kv_dtypes) or not (kv_dtype == dtype or (is_fp8 and dtype != "float32")):
            continue
        for out_dtype in dict.fromkeys(out_dtypes or (dtype, "float32")):
            for features in itertools.product((False, True), repeat=len(_FEATURES)):
                soft_cap, new_kv, split_kv, sparse = features
                if (sparse and new_kv) or (split_kv and kv_dtype == "fp8_ds_mla"):
                    continue  # there is no such call
                problem = _problem(dtype, kv_dtype, out_dtype, *features)
                for kernel in FP8_KERNELS.get(kv_dtype, KERNELS):
                    if kernel in MMA_KERNELS and dtype == "float32":
                        continue  # nothing that a user could do about it
                    if kernel not in MMA_KERNELS and (soft_cap or new_kv or split_kv):
                        continue  # run-time arguments there
                    if kernel == "mma_roles" and is_fp8 and new_kv:
                        continue  # refused
                    space = SPACES.get(kernel)
                    shipped = _shipped(kernel, problem, device)
                    if not shipped and not sparse:  # by its name alone
                        candidates.append(_Call(kernel, problem, None, is_shipped=False))
                    for config in shipped:
                        yield _Call(kernel, problem, config)
                        if space is not None and space.axes and config is not None:
                            for merged in (problem, replace(problem, num_tokens=_MANY_TOKENS)):
                                for nsplit in (1, *combine.merge_splits(merged.rows)):
                                    yield _Call(kernel, merged, space.change(config, {"nsplit": nsplit}))
                    if every_tile and space is not None and space.axes and out_dtype == dtype and not any(features):
                        tiles = space.candidates("gpu", {"nsplit": [1]}, kv_dtype)
                        candidates += [_Call(kernel, problem, config, is_shipped=False) for config in tiles]
                fixed = deterministic_config(dtype).kernel
                if not is_fp8 and not sparse and (fixed in MMA_KERNELS or not any(features)):
                    for chunks in (1, 9):  # both forms of the merge
                        bounded = replace(problem, max_kv_len=chunks * CHUNK_TOKENS)
                        yield _Call(fixed, bounded, None, deterministic=True)
    # Behind all others: a form that is shipped and a candidate too is shipped.
    yield from candidates


def _problem(
    dtype: str, kv_dtype: str, out_dtype: str, soft_cap: bool, new_kv: bool, split_kv: bool, sparse: bool
) -> Problem:
    """Make a small problem with the features of `feature_defines`, or of `list_defines`."""
    case = Case(
        name="variants",
        q_lens=(1,),
        kv_lens=(2,),
        heads=8,
        sm_scale=1.0,
        dtype=dtype,
        kv_dtype=kv_dtype if kv_dtype in FP8_CODES else None,
        logit_cap=30.0 if soft_cap else 0.0,
        new_kv=new_kv,
        paired=split_kv,
        mask="none" if sparse else "causal",
        topk=2 if sparse else 0,
    )
    return read_problem(build(case, 0) | {"out_dtype": out_dtype})


def _shipped(kernel: str, problem: Problem, device: Device) -> list[KernelConfig | None]:
    """List the constants that a call chooses; None where there are none to choose."""
    if kernel in MMA_KERNELS:
        has_new_kv = problem.new_kv is not None
        fitting = cost.fitting_classes(device, problem.is_sparse, problem.kv_dtype, has_new_kv)
        chosen = [c.config for c in fitting]
        chosen += [] if problem.is_sparse or problem.is_fp8 else tuned.configs(device)
        return [config for config in dict.fromkeys(chosen) if config.kernel == kernel]
    return [plan(problem, device, kernel=kernel).config] if SPACES[kernel].axes else [None]
