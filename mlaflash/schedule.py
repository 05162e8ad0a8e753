"""From a problem and a device to launches: which kernels, grids, splits and workspaces. No device is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlaflash import combine, cost, tuned
from mlaflash.checks import flag
from mlaflash.device import Device, occupancy_blocks, parse_arch
from mlaflash.errors import InvalidArgumentError, TileError, UnsupportedError
from mlaflash.interop import ArrayView
from mlaflash.mma_tiles import (
    MAX_TAIL_LEN,
    NARROW,
    NARROW_32,
    NARROW_PAIR,
    ROLES_E4M3,
    ROWS_32,
    MmaKernelConfig,
    MmaNarrowConfig,
    MmaRolesConfig,
    feature_defines,
)
from mlaflash.params import FP8_CODES, MASK_CODES, new_params, page_divisor
from mlaflash.problem import Problem
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig, check_shared, dtype_defines, list_defines

MMA_KERNELS = ("mma_narrow", "mma_wide", "mma_roles")
KERNELS = ("naive", "tile", *MMA_KERNELS)
FP8_KERNELS = {"float8_e4m3": ("mma_narrow", "mma_roles"), "fp8_ds_mla": ("mma_narrow",)}
"""Those that read caches of 8 bits, by what these hold."""

NAIVE_SCORES_LIMIT = 1 << 30
"""Largest workspace of `naive` in bytes: it keeps a float32 score for each row and KV token."""

CHUNK_TOKENS = 256
"""KV tokens of a chunk of a deterministic call: enough blocks for one short request, and partial results that are read
and written at a ninth of the bytes of the KV for each row tile of 16."""

_TOKENS_PER_SPLIT = 64
_WAVES = 2
_NARROW_BLOCKS = 2  # of NARROW_PAIR that the registers of an SM hold
_FP8_CAPABILITY = (8, 9)
_MAX_STRIDE = 2**31 - 1
_MAX_BATCH = 65535


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch but for its argument.

    Attributes
    ----------
    kernel : str
    defines : dict of str to int
    grid : tuple of int
    block : int
        Threads.
    shared_bytes : int
        Dynamic shared memory of a block.
    is_dependent : bool
        Whether its blocks may start before the launch before it has ended: the kernel itself waits for the results.
    """

    kernel: str
    defines: dict[str, int]
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    is_dependent: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory that a schedule needs besides the caller's arrays.

    Attributes
    ----------
    name : str
        Field of the kernels' argument that points to it.
    shape : tuple of int
    dtype : str
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The launches of one verify call, in order.

    Attributes
    ----------
    config : KernelConfig
        Constants of the kernel that reads the KV.
    num_splits : int
    launches : tuple of Launch
    workspaces : tuple of Workspace
    """

    config: KernelConfig
    num_splits: int
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...]


def plan(
    problem: Problem,
    device: Device,
    *,
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    deterministic: bool = False,
) -> Schedule:
    """Choose the launches for a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
        Its limits count; a budget's too.
    kernel : str or None
        One of `KERNELS`; None chooses: a tensor-core kernel where the problem allows one, else `tile`.
    tiles : KernelConfig or None
        Constants of the kernel; None takes the defaults.
    deterministic : bool
        Whether the bits of a row may depend on its own q and tokens alone: one kernel with the same constants for
        whatever rows, chunks of `CHUNK_TOKENS`, and a merge in a fixed order.

    Returns
    -------
    Schedule

    Raises
    ------
    UnsupportedError
        There is no such kernel, the problem is too large for `naive`, no kernel does it deterministically, or the cache
        holds 8 bits and the kernel or the device does not read those.
    InvalidArgumentError
        `tiles` belong to another kernel, or are not those of a deterministic call.
    TileError
        The configuration does not fit the device.
    """
    check_fp8(problem.kv_dtype, device)
    if flag("deterministic", deterministic):
        return _plan_deterministic(problem, device, kernel, tiles)
    config = _choose(kernel, tiles, problem, device)
    _check_kernel(config.kernel, problem)
    check_cache(config, problem.kv_dtype, has_new_kv=problem.new_kv is not None)
    check_shared(config, device, problem.kv_dtype)
    if isinstance(config, NaiveConfig):
        return _plan_naive(problem, config)
    if isinstance(config, TileConfig):
        return _plan_tile(problem, config, device)
    if isinstance(config, MmaKernelConfig):
        return _plan_mma(problem, config, device)
    raise UnsupportedError(f"kernel {config.kernel!r} is not one of {', '.join(KERNELS)}.")


def check_fp8(kv_dtype: str, device: Device) -> None:
    """Refuse a cache of 8 bits where the device cannot convert its numbers.

    Parameters
    ----------
    kv_dtype : str
    device : Device

    Raises
    ------
    UnsupportedError
        With both names.
    """
    if kv_dtype in FP8_CODES and parse_arch(device.arch)[0] < _FP8_CAPABILITY:
        raise UnsupportedError(
            f"kv_cache is {kv_dtype} and {device.name} is {device.arch}; sm_89 is the least that converts numbers of "
            "8 bits. Use a newer GPU, or a 16-bit cache."
        )


def check_cache(config: KernelConfig, kv_dtype: str, *, has_new_kv: bool) -> None:
    """Refuse constants that are for other caches.

    Parameters
    ----------
    config : KernelConfig
    kv_dtype : str
        What the cache holds.
    has_new_kv : bool
        Whether the last q_len tokens come from `new_kv`.

    Raises
    ------
    TileError
        With the constant and what is allowed.
    UnsupportedError
        The kernel does not take `new_kv` beside such a cache.
    """
    is_fp8 = kv_dtype in FP8_CODES
    if isinstance(config, MmaNarrowConfig):
        for name, usual, takes in (
            ("step_tiles", 1, is_fp8),
            ("row_tiles", 1, kv_dtype != "fp8_ds_mla"),
            ("column_warps", 4, kv_dtype == "float8_e4m3"),
            ("shared_steps", 0, kv_dtype == "float8_e4m3"),
        ):
            value = getattr(config, name)
            if value != usual and not takes:
                others = {"step_tiles": "of 8 bits", "row_tiles": "of 16 bits and of float8_e4m3"}
                caches = others.get(name, "of float8_e4m3")
                raise TileError(
                    f"{name} is {value} and kv_cache is {kv_dtype}; other than {usual} is for caches {caches}. "
                    f"Use {usual}."
                )
    if isinstance(config, MmaRolesConfig) and not is_fp8 and config.row_tiles != 4:
        raise TileError(
            f"row_tiles is {config.row_tiles} and kv_cache is {kv_dtype}; other than 4 is for caches of float8_e4m3. "
            "Use 4, or mma_narrow."
        )
    if isinstance(config, MmaRolesConfig) and is_fp8 and config.lookahead != ROLES_E4M3.lookahead:
        raise TileError(
            f"lookahead is {config.lookahead} and kv_cache is {kv_dtype}; it must be {ROLES_E4M3.lookahead} there. Use "
            f"{ROLES_E4M3.lookahead}."
        )
    if isinstance(config, MmaRolesConfig) and is_fp8 and has_new_kv:
        raise UnsupportedError(
            f"kernel 'mma_roles' does not take new_kv beside a {kv_dtype} cache; mma_narrow does. Leave kernel and "
            "tiles out."
        )


def fp8_kernels(kv_dtype: str) -> str:
    """Say which kernels read a cache of 8 bits.

    Parameters
    ----------
    kv_dtype : str
    """
    kernels = FP8_KERNELS[kv_dtype]
    return f"{' and '.join(kernels)} {'does' if len(kernels) == 1 else 'do'}"


def _check_kernel(kernel: str, problem: Problem) -> None:
    """Refuse a kernel that does not read the cache; where there is nothing but padding, none does."""
    if not problem.is_fp8 or not problem.batch or kernel in FP8_KERNELS[problem.kv_dtype]:
        return
    refusal = mma_refusal(problem)
    instead = f", but not this problem: {refusal}." if refusal else ". Leave kernel and tiles out."
    raise UnsupportedError(
        f"kernel {kernel!r} does not read a {problem.kv_dtype} cache; {fp8_kernels(problem.kv_dtype)}{instead}"
    )


def _choose(kernel: str | None, tiles: KernelConfig | None, problem: Problem, device: Device) -> KernelConfig:
    name = None if isinstance(kernel, str) and kernel == "auto" else kernel
    if name is not None and not (isinstance(name, str) and name in KERNELS):
        raise UnsupportedError(f"kernel is {name!r}; allowed are {', '.join(KERNELS)}, or None to have it chosen.")
    if tiles is not None:
        if not isinstance(tiles, KernelConfig) or name not in (None, tiles.kernel):
            raise InvalidArgumentError(
                f"tiles is {tiles!r} and kernel is {name!r}; the tiles must be those of the kernel. Leave one out."
            )
        return tiles
    if name is not None:
        _check_kernel(name, problem)
    if name == "naive":
        return NaiveConfig()
    if name in MMA_KERNELS:
        return _named_config(name, problem, device)
    if name is None and mma_refusal(problem) is None:
        choice = mma_choice(problem, device)
        return replace(choice.config, nsplit=choice.num_splits)
    large = TileConfig(tk=32)
    return large if large.shared_bytes(problem.dtype) <= device.shared_per_block else TileConfig()


def _named_config(kernel: str, problem: Problem, device: Device) -> MmaKernelConfig:
    """Return the constants of a kernel that is asked for by its name alone: for few rows those of its smaller tiles."""
    rows = problem.max_q_len * problem.num_heads
    if kernel == "mma_wide" and rows <= ROWS_32.rows:
        return ROWS_32
    if kernel == "mma_narrow" and not problem.is_fp8:
        fitting = [c.config for c in cost.fitting_classes(device, problem.is_sparse, problem.kv_dtype)]
        return NARROW_32 if rows > NARROW.rows and NARROW_32 in fitting else NARROW
    return cost.config_for(kernel, problem.kv_dtype, problem.is_sparse)


def mma_choice(problem: Problem, device: Device, row_tile: int | None = None) -> cost.Choice:
    """Choose constants and splits of a tensor-core kernel; see `mlaflash.tuned.find` and `mlaflash.cost.choose`.

    Parameters
    ----------
    problem : Problem
    device : Device
    row_tile : int, optional
        Packed rows of a block, where they are given. Those that nothing is known of for such a cache take the splits
        of what is chosen.
    """
    has_new_kv = problem.new_kv is not None
    if row_tile not in {c.config.rows for c in cost.row_classes(problem.kv_dtype) if c.takes_new_kv >= has_new_kv}:
        row_tile = None
    rows = max(1, problem.max_q_len * problem.num_heads)
    partial_bytes = 4 if problem.out_dtype == "float32" else 2
    is_tuned = row_tile is None and not problem.is_sparse and partial_bytes == problem.kv.latent.itemsize == 2
    known = tuned.find(rows, problem.batch, problem.max_kv_len, device, problem.page_size) if is_tuned else None
    if known is not None:
        return known
    return cost.choose(
        rows,
        max(1, problem.batch),
        problem.max_kv_len,
        device,
        partial_bytes=partial_bytes,
        row_tile=row_tile,
        is_sparse=problem.is_sparse,
        has_new_kv=has_new_kv,
        kv_dtype=problem.kv_dtype,
    )


def _plan_naive(problem: Problem, config: NaiveConfig) -> Schedule:
    scores = Workspace("scores", (problem.num_tokens, problem.num_heads, problem.max_kv_len), "float32")
    if scores.num_bytes > NAIVE_SCORES_LIMIT:
        raise UnsupportedError(
            f"naive keeps a score for each of {problem.rows} rows x {problem.max_kv_len} tokens, {scores.num_bytes} "
            f"bytes; allowed are {NAIVE_SCORES_LIMIT}. Use the kernel tile, or a smaller max_kv_len."
        )
    launch = Launch(
        "naive",
        dtype_defines(problem.dtype, problem.out_dtype, "float32") | list_defines(problem.is_sparse),
        (problem.rows, 1, 1),
        config.threads,
        config.shared_bytes(problem.dtype),
    )
    return Schedule(config, 1, (launch,), (scores,))


def _plan_tile(problem: Problem, config: TileConfig, device: Device) -> Schedule:
    head_tiles = -(-problem.num_heads // config.ht)
    blocks = problem.num_tokens * head_tiles
    splits = config.nsplit or default_splits(blocks, problem.max_kv_len, device)
    types = dtype_defines(problem.dtype, problem.out_dtype, "float32")
    launch = Launch(
        "tile",
        types | config.defines() | list_defines(problem.is_sparse),
        (blocks, splits, 1),
        config.threads,
        config.shared_bytes(problem.dtype),
    )
    return with_combine(problem, config, launch, splits, "float32")


def mma_refusal(problem: Problem) -> str | None:
    """Say why no tensor-core kernel takes a problem; None where one does.

    Parameters
    ----------
    problem : Problem
    """
    if problem.batch == 0 and not problem.is_empty:
        return "kv_lens is empty, and every query token padding"
    if problem.dtype == "float32":
        return "q is float32; the tensor cores take bfloat16 and float16"
    if problem.batch > _MAX_BATCH:
        return f"the batch has {problem.batch} requests, and a grid at most {_MAX_BATCH} along z"
    if not problem.is_aligned:
        return "a row of q, kv_cache or new_kv does not start on 16 bytes, which asynchronous copies need"
    if problem.mask_columns > MAX_TAIL_LEN:
        return f"the TreeMask has {problem.mask_columns} columns; at most {MAX_TAIL_LEN} fit a block's shared memory"
    strides = [*problem.page_strides, *problem.page_rope_strides]
    if problem.new_kv is not None:
        strides += [problem.new_kv.latent.strides[0], problem.new_kv.rope.strides[0]]
    if max(strides) > _MAX_STRIDE:
        return f"kv_cache or new_kv has a stride of more than {_MAX_STRIDE} elements; the kernels keep it in 32 bits"
    return None


def _plan_mma(problem: Problem, config: MmaKernelConfig, device: Device) -> Schedule:
    refusal = mma_refusal(problem)
    if refusal is not None:
        instead = "" if problem.is_fp8 else " Use the kernel tile."
        raise UnsupportedError(f"kernel {config.kernel!r} does not take this problem: {refusal}.{instead}")
    if problem.is_sparse and isinstance(config, MmaRolesConfig):
        raise UnsupportedError(
            f"kernel {config.kernel!r} does not take lists of slots; mma_narrow does, and mma_wide with caches of 16 "
            "bits. Leave kernel and tiles out to have them chosen."
        )
    if problem.is_sparse and isinstance(config, MmaNarrowConfig) and config.row_tiles == 2 and not problem.is_fp8:
        raise UnsupportedError(
            f"row_tiles is 2 and kv_cache is {problem.kv_dtype}; two row tiles over 16 bits do not take lists of "
            "slots. Use 1, or leave kernel and tiles out to have them chosen."
        )
    # One at least: the last request's blocks also write the padding behind it.
    row_tiles = max(1, -(-problem.max_q_len * problem.num_heads // config.rows))
    splits = config.nsplit or mma_choice(problem, device, config.rows).num_splits
    # Halved traffic between the kernels, for 1.16 times the error of a 16-bit result at 132 splits of 128 k tokens.
    partial_dtype = problem.out_dtype
    features = feature_defines(problem.logit_cap, problem.new_kv is not None, problem.is_split_kv)
    features |= list_defines(problem.is_sparse)
    launch = Launch(
        config.kernel,
        dtype_defines(problem.dtype, problem.out_dtype, partial_dtype, problem.kv_dtype) | config.defines() | features,
        (row_tiles, splits, problem.batch),
        config.threads,
        config.shared_bytes(problem.kv_dtype),
    )
    return with_combine(problem, config, launch, splits, partial_dtype)


def deterministic_config(dtype: str) -> TileConfig | MmaNarrowConfig:
    """Return the kernel and the constants of every deterministic call of an element type.

    Parameters
    ----------
    dtype : str
        Of q and the KV.
    """
    return TileConfig(tk=32) if dtype == "float32" else NARROW_PAIR


def _plan_deterministic(problem: Problem, device: Device, kernel: str | None, tiles: KernelConfig | None) -> Schedule:
    if problem.is_fp8:
        raise UnsupportedError(
            f"deterministic is set and kv_cache is {problem.kv_dtype}; no kernel does that. Leave deterministic out."
        )
    config = deterministic_config(problem.dtype)
    is_its_kernel = kernel is None or (isinstance(kernel, str) and kernel in ("auto", config.kernel))
    if not is_its_kernel or not (tiles is None or (isinstance(tiles, KernelConfig) and tiles == config)):
        raise InvalidArgumentError(
            f"kernel is {kernel!r}, tiles {tiles!r} and deterministic is set; {problem.dtype} rows then come from "
            f"{config.kernel} with {config} alone, so that they are the same in every call. Leave kernel and tiles out."
        )
    if problem.batch == 0:
        return plan(problem, device)  # nothing but padding, which every kernel makes the same of
    refusal = mma_refusal(problem) if config.kernel in MMA_KERNELS else None
    if refusal is not None:
        raise UnsupportedError(
            f"deterministic is set, and {config.kernel}, which computes {problem.dtype} then, does not take this "
            f"problem: {refusal}. Change that, or leave deterministic out."
        )
    chunks = max(1, -(-problem.max_kv_len // CHUNK_TOKENS))
    if chunks > combine.MAX_CHUNKS:
        raise UnsupportedError(
            f"max_kv_len is {problem.max_kv_len} and deterministic is set; allowed are {combine.MAX_CHUNKS} chunks of "
            f"{CHUNK_TOKENS} tokens, {combine.MAX_CHUNKS * CHUNK_TOKENS}. Give max_kv_len where the page table holds "
            "more than a request has."
        )
    check_shared(config, device, problem.dtype)
    # Two at least, so that a row of one chunk goes through the merge, as it does in a call with longer ones.
    splits = max(2, chunks)
    if isinstance(config, MmaNarrowConfig):
        partial_dtype = problem.out_dtype
        features = feature_defines(problem.logit_cap, problem.new_kv is not None, problem.is_split_kv)
        row_tiles = max(1, -(-problem.max_q_len * problem.num_heads // config.rows))
        grid = (row_tiles, _chunk_runs(row_tiles * problem.batch, chunks, config, device), problem.batch)
    else:
        partial_dtype, features = "float32", {}
        grid = (problem.num_tokens * -(-problem.num_heads // config.ht), splits, 1)
    types = dtype_defines(problem.dtype, problem.out_dtype, partial_dtype) | {"DETERMINISTIC": CHUNK_TOKENS}
    warps = combine.chunk_warps(chunks, problem.rows)
    launch = Launch(
        config.kernel, types | config.defines() | features, grid, config.threads, config.shared_bytes(problem.dtype)
    )
    merge = Launch(
        "combine",
        types | {"SPLIT_WARPS": warps},
        (problem.rows, warps, 1),
        combine.block(1),
        combine.chunk_shared_bytes(),
        is_dependent=True,
    )
    return Schedule(config, splits, (launch, merge), _partials(problem, splits, partial_dtype))


def _chunk_runs(blocks: int, chunks: int, config: MmaNarrowConfig, device: Device) -> int:
    """Say into how many runs the chunks of each row tile go, one for a block: no bit depends on it."""
    slots = device.num_sms * min(_NARROW_BLOCKS, occupancy_blocks(config.shared_bytes(), device))

    def time(runs: int) -> float:
        """In chunks: a block's start is a third of one."""
        return -(-blocks * runs // slots) * (1 / 3 + -(-chunks // runs))

    wanted = {chunks} | {min(chunks, max(1, waves * slots // blocks)) for waves in (1, 2, 3, 4)}
    return min(wanted, key=lambda runs: (time(runs), runs))


def default_splits(blocks: int, max_kv_len: int, device: Device) -> int:
    """Split the KV until the grid fills the device about twice, but never below 64 tokens a split.

    Parameters
    ----------
    blocks : int
        Blocks of one split.
    max_kv_len : int
        Tokens of the longest request.
    device : Device
    """
    wanted = -(-_WAVES * device.num_sms // max(blocks, 1))
    most = max(1, max_kv_len // _TOKENS_PER_SPLIT)
    return min(wanted, most, combine.MAX_SPLITS)


def with_combine(problem: Problem, config: KernelConfig, launch: Launch, splits: int, partial_dtype: str) -> Schedule:
    """Add the merge of the splits, and the memory between both, to a launch that writes partial outputs.

    Parameters
    ----------
    problem : Problem
    config : KernelConfig
    launch : Launch
        Of the kernel that reads the KV.
    splits : int
    partial_dtype : str
        Element type of the partial outputs.
    """
    if splits == 1:
        return Schedule(config, 1, (launch,), ())
    types = dtype_defines(problem.dtype, problem.out_dtype, partial_dtype)
    merge = Launch(
        "combine",
        types | combine.defines(splits, problem.rows),
        combine.grid(problem.rows, splits),
        combine.block(splits, problem.rows),
        combine.shared_bytes(splits, problem.rows),
        is_dependent=True,
    )
    return Schedule(config, splits, (launch, merge), _partials(problem, splits, partial_dtype))


def _partials(problem: Problem, splits: int, dtype: str) -> tuple[Workspace, ...]:
    return (
        Workspace("partial_out", (splits, problem.rows, 512), dtype),
        Workspace("partial_lse", (problem.rows, splits), "float32"),
    )


def build_params(
    problem: Problem,
    schedule: Schedule,
    out: ArrayView,
    lse: ArrayView,
    workspace_ptrs: dict[str, int],
) -> np.ndarray[Any, Any]:
    """Fill the kernels' argument.

    Parameters
    ----------
    problem : Problem
    schedule : Schedule
    out, lse : ArrayView
        Of shapes `problem.out_shape` and the same without its last axis.
    workspace_ptrs : dict of str to int
        Address of each workspace of the schedule, by name; and of ``page_ids``, int32 0 .. B - 1, for a dense problem.

    Returns
    -------
    numpy.ndarray, shape (1,), `mlaflash.params.PARAMS_DTYPE`
    """
    magic, shift = page_divisor(problem.page_size)
    q, kv, new = problem.q, problem.kv, problem.new_kv
    fields: dict[str, Any] = {
        "q_nope": q.latent_ptr,
        "q_pe": q.rope_ptr,
        "kv_c": kv.latent_ptr,
        "k_pe": kv.rope_ptr,
        "kv_scale": problem.kv_scale.ptr if problem.kv_scale is not None else 0,
        "out": out.ptr,
        "lse": lse.ptr,
        "q_nope_stride_t": q.latent.strides[-3],
        "q_nope_stride_h": q.latent.strides[-2],
        "q_pe_stride_t": q.rope.strides[-3],
        "q_pe_stride_h": q.rope.strides[-2],
        "kv_c_stride_page": problem.page_strides[0],
        "kv_c_stride_token": problem.page_strides[1],
        "k_pe_stride_page": problem.page_rope_strides[0],
        "k_pe_stride_token": problem.page_rope_strides[1],
        "out_stride_t": out.strides[-3],
        "out_stride_h": out.strides[-2],
        "lse_stride_t": lse.strides[-2],
        "lse_stride_h": lse.strides[-1],
        "max_kv_len": problem.max_kv_len,
        "num_tokens": problem.num_tokens,
        "num_heads": problem.num_heads,
        "batch": problem.batch,
        "max_q_len": problem.max_q_len,
        "page_size": problem.page_size,
        "page_magic": magic,
        "page_shift": shift,
        "num_splits": schedule.num_splits,
        "mask_mode": MASK_CODES[problem.mask_mode],
        "vectorized": problem.is_aligned,
        "sm_scale": problem.sm_scale,
        "logit_cap": problem.logit_cap,
        "kv_scale_value": problem.kv_scale_value,
        "lse_base_2": problem.lse_base == "2",
    }
    for name, view in (
        ("qo_indptr", problem.qo_indptr),
        ("kv_lens", problem.kv_lens),
        ("kv_indptr", problem.kv_indptr),
        ("tail_lens", problem.tail_lens),
    ):
        fields[name] = view.ptr if view is not None else 0
    if problem.page_ids is not None:
        fields["page_ids"] = problem.page_ids.ptr
        fields["wide_ids"] = problem.page_ids.dtype == "int64"
        if problem.block_table:
            fields["block_table_stride"] = problem.page_ids.strides[0]
    else:
        fields["block_table_stride"] = 1
    if problem.kv_indptr is not None:
        fields["wide_indptr"] = problem.kv_indptr.dtype == "int64"
    if problem.mask_words is not None:
        fields["mask_words"] = problem.mask_words.ptr
        fields["mask_words_per_row"] = problem.mask_words.shape[1]
    if new is not None:
        fields |= {
            "new_kv_c": new.latent_ptr,
            "new_k_pe": new.rope_ptr,
            "new_kv_c_stride": new.latent.strides[0],
            "new_k_pe_stride": new.rope.strides[0],
        }
    return new_params(**fields, **workspace_ptrs)
