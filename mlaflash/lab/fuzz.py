"""Random problems over the public interface: each outcome is the reference's answer or a typed error, else a finding.

A trial is made of a seed and its number alone, so that it can be repeated by itself. Trials come in blocks that share
what kernels are compiled for; the rest of each is drawn anew.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash import kv, oracle, spec
from mlaflash.errors import (
    CompileError,
    EmulatorError,
    InvalidArgumentError,
    LaunchError,
    MlaFlashError,
    UnsupportedError,
)
from mlaflash.lab.compare import compare, tolerance, tolerance_of_few
from mlaflash.lab.inputs import GARBAGE_ID, Case, build
from mlaflash.lab.mask_inputs import NAMES as MASK_FORMATS
from mlaflash.lab.mask_inputs import Batch, encode, widened
from mlaflash.lab.move_inputs import NAMES as MOVE_ORDERS
from mlaflash.lab.move_inputs import compaction, ids, moved, random_layers
from mlaflash.lab.plan_inputs import BUILDS, FP8_BUILDS, judge, random_setup, random_step
from mlaflash.lab.space import SPACES
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import NARROW_E4M3, ROLES_E4M3
from mlaflash.params import DL, numpy_dtype
from mlaflash.schedule import FP8_KERNELS, KERNELS
from mlaflash.sharding import Contiguous, Interleaved, Sharding, shard_lens
from mlaflash.tiles import KernelConfig

Array = npt.NDArray[Any]
Rng = np.random.Generator
Put = Callable[[Any], Any]

BLOCKS: Final = {"emulator": 20, "gpu": 150}
"""Trials that share their builds: NVRTC takes longer than the host's compiler, and a GPU less time for a trial."""

PLAN_STEPS: Final = 3
_PAIRS: Final = {"emulator": 30_000, "gpu": 1_000_000}
_PLAN_BUILDS: Final = (*BUILDS, *FP8_BUILDS)
_HEADS: Final = (1, 2, 4, 5, 8, 12, 16, 20, 32, 64, 128)
_PAGE_SIZES: Final = (1, 2, 3, 16, 48, 64)
_UNTOUCHED: Final = 77.0  # of memory that no kernel wrote; every element type has it
# What is wrong inside the library, whatever it was given.
_FAULTS: Final = (EmulatorError, LaunchError, CompileError)


class _Wrong(Exception):
    """A result that is not the reference's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A trial that ended as none may.

    Attributes
    ----------
    trial : int
    kind : str
        Which part of the interface it was about.
    problem : str
        What was asked for.
    reason : str
        What came of it.
    """

    trial: int
    kind: str
    problem: str
    reason: str


@dataclass(slots=True)
class Tally:
    """What trials came to.

    Attributes
    ----------
    right, refused : Counter of str
        By kind: trials with the reference's answer, and with a typed error.
    findings : list of Finding
    """

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def trials(self) -> int:
        """How many there were."""
        return self.right.total() + self.refused.total() + len(self.findings)


class Place:
    """Where trials run: the calls of the interface, and how arrays get there and back.

    Parameters
    ----------
    kind : {"emulator", "gpu"}
    """

    def __init__(self, kind: str) -> None:
        import mlaflash

        self.kind = kind
        self.pairs = _PAIRS[kind]
        if kind == "emulator":
            from mlaflash import emulator

            self.calls: Any = emulator
            self.plan: Any = emulator.VerifyPlan
            self.kv: Any = emulator
            self.distributed: Any = emulator
        else:
            self.calls, self.plan, self.kv = mlaflash, mlaflash.VerifyPlan, mlaflash.kv
            self.distributed = mlaflash.distributed

    def put(self, array: Any) -> Any:
        """Give a NumPy array, or a mask of one, to the device; anything else as it is.

        Parameters
        ----------
        array : Any
        """
        if self.kind == "emulator":
            return array
        import cupy

        if isinstance(array, TreeMask) and isinstance(array.words, np.ndarray):
            return TreeMask(cupy.asarray(array.words), array.max_q)
        return cupy.asarray(array) if isinstance(array, np.ndarray) else array

    def get(self, array: Any) -> Array:
        """Fetch a result.

        Parameters
        ----------
        array : array
        """
        return np.asarray(array if self.kind == "emulator" else array.get())

    def seeded(self, rng: Rng) -> dict[str, int]:
        """Draw the order of threads, where that is to be chosen.

        Parameters
        ----------
        rng : numpy.random.Generator
        """
        seed = int(rng.integers(2**32))
        return {"seed": seed} if self.kind == "emulator" else {}


@dataclass(slots=True)
class _Trial:
    place: Place
    fixed: Rng  # of the block
    rng: Rng
    problem: str = ""

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def fuzz(
    place: Place,
    seed: int,
    *,
    seconds: float | None = None,
    trials: Sequence[int] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[Finding | Tally]:
    """Run trials until the time is over.

    Parameters
    ----------
    place : Place
    seed : int
    seconds : float, optional
        How long; the trial in progress is ended.
    trials : sequence of int, optional
        Which ones; by default all from 0 on.
    progress : callable
        Told what is done, how much of it, and of how much (seconds).

    Yields
    ------
    Finding
        As they are found.
    Tally
        At the end.
    """
    tally = Tally()
    started = time.monotonic()
    number = 0
    while trials is None or number < len(trials):
        spent = time.monotonic() - started
        if seconds is not None and spent >= seconds:
            break
        progress("fuzzing (seconds)", int(spent), int(seconds or 1))
        finding = run_trial(place, seed, number if trials is None else trials[number], tally)
        if finding is not None:
            yield finding
            if place.kind == "gpu" and not _is_usable():
                break
        number += 1
    yield tally


def run_trial(place: Place, seed: int, number: int, tally: Tally) -> Finding | None:
    """Run one trial, and count it.

    Parameters
    ----------
    place : Place
    seed, number : int
        What it is made of.
    tally : Tally
    """
    kind = kind_of(seed, number)
    fixed = np.random.default_rng([seed, 1, number // BLOCKS[place.kind], KINDS.index(kind)])
    trial = _Trial(place, fixed, np.random.default_rng([seed, 2, number]))
    reason = ""
    try:
        was_refused = _KINDS[kind][0](trial)
        (tally.refused if was_refused else tally.right)[kind] += 1
    except _Wrong as error:
        reason = str(error)
    except Exception as error:  # whatever else it is, it is what this is here to find
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        return None
    finding = Finding(number, kind, trial.problem, reason)
    tally.findings.append(finding)
    return finding


def kind_of(seed: int, number: int) -> str:
    """Tell what a trial is about.

    Parameters
    ----------
    seed, number : int
    """
    return str(np.random.default_rng([seed, 0, number]).choice(KINDS, p=[share for _, share in _KINDS.values()]))


def _is_usable() -> bool:
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


# --- calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What kernels are compiled for."""

    dtype: str
    kv_dtype: str | None
    out_dtype: str
    kernel: str | None
    tiles: KernelConfig | None
    deterministic: bool
    logit_cap: float
    new_kv: bool
    paired: bool


def _fixed(rng: Rng, *, is_sparse: bool = False) -> _Fixed:
    kv_dtype = (None, None, None, "float8_e4m3", "fp8_ds_mla")[rng.integers(5)]
    dtype = str(rng.choice(("bfloat16", "float16") if kv_dtype else ("bfloat16", "bfloat16", "float16", "float32")))
    kernels = FP8_KERNELS[kv_dtype] if kv_dtype else KERNELS if dtype != "float32" else ("naive", "tile")
    if is_sparse:
        kernels = tuple(name for name in kernels if name != "mma_roles")
    kernel: str | None = str(rng.choice(kernels))
    deterministic = bool(kv_dtype is None and not is_sparse and rng.random() < 0.15)
    tiles = None
    if deterministic or rng.random() < 0.3:
        kernel = None
    elif rng.random() < 0.7:
        candidates = list(SPACES[str(kernel)].candidates("emulator", {"nsplit": (1, 2, 5)}, kv_dtype or dtype))
        tiles = candidates[rng.integers(len(candidates))]
    return _Fixed(
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=str(rng.choice((dtype, dtype, "float32"))),
        kernel=kernel,
        tiles=tiles,
        deterministic=deterministic,
        logit_cap=float(rng.choice((0.0, 0.0, 0.5, 30.0))),
        new_kv=bool(rng.random() < 0.3) and not (kv_dtype and kernel == "mma_roles"),
        paired=bool(rng.random() < 0.3),
    )


def _lens(trial: _Trial, heads: int) -> list[tuple[int, int]]:
    """Draw query and KV tokens of each request, with as much to compute as the place bears."""
    rng, left = trial.rng, trial.place.pairs
    longest = trial.pick(20, 80, 300) if trial.place.kind == "emulator" else trial.pick(40, 600, 20_000)
    found = []
    for _ in range(int(rng.integers(1, 5))):
        q_len = int(rng.integers(0, trial.pick(2, 9, 34)))
        kv_len = int(trial.pick(0, 1, 15, 16, 17, 63, 64, 65, *rng.integers(0, longest + 1, 8)))
        while q_len * kv_len * heads > left:
            q_len, kv_len = (q_len // 2, kv_len) if q_len * heads > kv_len else (q_len, kv_len // 2)
        left -= q_len * kv_len * heads
        found.append((q_len, kv_len))
    return found


def _case(trial: _Trial, fixed: _Fixed) -> Case:
    rng = trial.rng
    heads = int(rng.choice(_HEADS))
    if trial.chance(0.05):  # masks of several words a row
        heads, q_len = 1, int(rng.integers(65, 140))
        lens = [(q_len, q_len + int(rng.integers(0, 60)))]
    else:
        lens = _lens(trial, heads)
    return Case(
        name="fuzz",
        q_lens=tuple(q_len for q_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
        heads=heads,
        sm_scale=trial.pick(0.14468, 0.14468, -0.13523, 0.0, float(10.0 ** rng.uniform(-2, 1))),
        page_size=int(rng.choice(_PAGE_SIZES)),
        dtype=fixed.dtype,
        kv_dtype=fixed.kv_dtype,
        mask=trial.pick("causal", "none", "chain", "tree", "dense"),
        logit_cap=fixed.logit_cap,
        id_dtype=trial.pick("int32", "int64"),
        addressing=trial.pick("indices", "block_table", "dense"),
        paired=fixed.paired,
        new_kv=fixed.new_kv,
    )


def _verify(trial: _Trial) -> bool:
    fixed = _fixed(trial.fixed)
    arguments, options = _call(trial, fixed)
    return _hold(trial, "mla_verify", arguments, options, (InvalidArgumentError,))


def _call(trial: _Trial, fixed: _Fixed) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the arguments that matter to the reference, and those that do not."""
    rng = trial.rng
    case = _case(trial, fixed)
    arguments = build(case, int(rng.integers(2**32)))
    mask = arguments["mask"]
    if isinstance(mask, TreeMask) and trial.chance(0.2):
        arguments["tail_lens"] = rng.integers(0, mask.max_q + 1, case.batch).astype(np.int32)
    if trial.chance(0.25):
        _add_padding(arguments, int(rng.integers(1, 9)))
    elif len(set(case.q_lens)) == 1 and trial.chance(0.5):
        del arguments["qo_indptr"]
        if trial.chance(0.5):
            arguments["q"] = _by_request(arguments["q"], case)
    if fixed.kv_dtype == "float8_e4m3" and trial.chance(0.5):
        arguments["kv_scale"] = np.array([arguments["kv_scale"]], np.float32)
    options: dict[str, Any] = {
        "kernel": fixed.kernel,
        "tiles": fixed.tiles,
        "deterministic": fixed.deterministic,
        "out_dtype": fixed.out_dtype,
        "budget": trial.pick(None, "sm_120"),
    }
    arguments["lse_base"] = trial.pick("e", "2")
    if trial.chance(0.3):
        longest = max((*case.q_lens, 0))
        options["max_q_len"] = max(1, longest + int(rng.integers(0, 3)))
    if trial.chance(0.3):
        options["max_kv_len"] = max((*case.kv_lens, 1)) + int(rng.integers(0, 50))
    trial.problem = f"{case}, {fixed}, {options}"
    return arguments, options


def _by_request(q: Any, case: Case) -> Any:
    if isinstance(q, tuple):
        return tuple(_by_request(piece, case) for piece in q)
    return q.reshape(case.batch, case.q_lens[0], *q.shape[1:])


def _add_padding(arguments: dict[str, Any], rows: int) -> None:
    def padded(array: Array) -> Array:
        return np.concatenate([array, np.full((rows, *array.shape[1:]), np.nan, array.dtype)])

    for name in ("q", "new_kv"):
        given = arguments.get(name)
        if given is not None:
            arguments[name] = tuple(map(padded, given)) if isinstance(given, tuple) else padded(given)
    mask = arguments["mask"]
    if isinstance(mask, TreeMask):
        arguments["mask"] = TreeMask(widened(mask, mask.num_tokens + rows, mask.max_q), mask.max_q)


def _hold(
    trial: _Trial,
    name: str,
    arguments: dict[str, Any],
    options: dict[str, Any],
    forbidden: tuple[type[MlaFlashError], ...],
) -> bool:
    """Make a call and hold it against the oracle; True where it was refused with an error that is none of these."""
    place = trial.place
    given = {key: _laid(trial, key, value) for key, value in arguments.items()}
    room = None
    if forbidden and trial.chance(0.25):
        first = arguments["q"][0] if isinstance(arguments["q"], tuple) else arguments["q"]
        laid, room = _room(trial, first.shape, options["out_dtype"])
        given |= laid
    try:
        results = getattr(place.calls, name)(**given, **options, validate=True, **place.seeded(trial.rng))
        out, lse = map(place.get, results)
    except _FAULTS:
        raise
    except MlaFlashError as error:
        # A tile that does not fit is both a value and unsupported.
        if isinstance(error, forbidden) and not isinstance(error, UnsupportedError):
            raise
        return True
    if room is not None and room.shape != out.shape:
        beside = np.delete(place.get(room), np.s_[DL // 2 : DL // 2 + DL], axis=-1)
        if not (beside == _UNTOUCHED).all():
            raise _Wrong("what lies beside the rows of out was written to")
    expected_out, expected_lse = getattr(oracle, name)(**arguments)
    if not forbidden and not np.isfinite(expected_out).all():
        # Garbage that some row sees may reach rows beside it, by weights of 0.
        out = np.where(np.isnan(out), expected_out.astype(out.dtype), out)
    q = arguments["q"][0] if isinstance(arguments["q"], tuple) else arguments["q"]
    limits = tolerance_of_few(tolerance(q.dtype.name, out.dtype.name, partials=True), expected_out)
    found = compare(out, lse, expected_out, expected_lse, limits)
    if not found.passed:
        raise _Wrong(
            f"{found.reason}; {found.worst_array}{list(found.worst_index)} is {found.worst_actual:.8g}, expected "
            f"{found.worst_expected:.8g}"
        )
    return False


def _laid(trial: _Trial, name: str, value: Any) -> Any:
    """Give an argument to the device, rows in one of the layouts that engines have."""
    put = trial.place.put
    if isinstance(value, tuple):
        if name == "kv_cache" and value[0].ndim == 3 and trial.chance(0.2):
            value = tuple(piece[:, :, None] for piece in value)
        if name == "kv_cache" and trial.chance(0.3):
            whole = put(np.concatenate(value, -1))
            return whole[..., :DL], whole[..., DL:]
        return tuple(_laid(trial, name, piece) for piece in value)
    if name not in ("q", "kv_cache", "new_kv") or not isinstance(value, np.ndarray) or value.ndim < 2:
        return put(value)
    way = trial.pick("as it is", "as it is", "wide", "odd", "transposed", "one head")
    if way in ("wide", "odd"):
        pad = 32 if way == "wide" else int(trial.rng.integers(1, 40))
        room = np.zeros((*value.shape[:-1], value.shape[-1] + pad), value.dtype)
        begin = pad // 32 * 16 if way == "wide" else int(trial.rng.integers(0, pad + 1))
        room[..., begin : begin + value.shape[-1]] = value
        return put(room)[..., begin : begin + value.shape[-1]]
    if way == "transposed" and value.ndim >= 3 and name == "q":
        return _heads_first(put, value)
    if way == "one head" and name == "kv_cache" and value.ndim == 3 and value.shape[-1] > DL:
        value = value[:, :, None]
    return put(value)


def _heads_first(put: Put, rows: Array) -> Any:
    """Lay rows so that all tokens of a head follow each other, as a batched product does; the axes stay."""
    return np.moveaxis(put(np.ascontiguousarray(np.moveaxis(rows, -2, 0))), 0, -2)


def _room(trial: _Trial, shape: tuple[int, ...], out_dtype: str) -> tuple[dict[str, Any], Any]:
    """Make out and lse of rows of q, laid as engines do, and the array that holds out."""
    put, way = trial.place.put, trial.pick("as it is", "wide", "heads first", "heads reversed")
    width = 2 * DL if way == "wide" else DL
    room = np.full((*shape[:-1], width), _UNTOUCHED, numpy_dtype(out_dtype))
    lse = np.full(shape[:-1], _UNTOUCHED, np.float32)
    if way == "heads first":
        out = room = _heads_first(put, room)
        return {"out": out, "lse": _heads_first(put, lse[..., None])[..., 0]}, room
    room, lse = put(room), put(lse)
    if way == "heads reversed":
        return {"out": room[..., ::-1, :], "lse": lse[..., ::-1]}, room
    begin = DL // 2 if way == "wide" else 0
    return {"out": room[..., begin : begin + DL], "lse": lse}, room


def _sparse(trial: _Trial) -> bool:
    fixed = replace(_fixed(trial.fixed, is_sparse=True), deterministic=False, new_kv=False)
    if fixed.kernel == "mma_roles":
        fixed = replace(fixed, kernel=None, tiles=None)
    case = replace(
        _case(trial, fixed), mask="none", addressing="indices", topk=int(trial.pick(1, 15, 16, 17, 40, 64, 100))
    )
    while case.num_tokens * case.heads * case.topk > trial.place.pairs and case.topk > 1:
        case = replace(case, topk=case.topk // 2)
    arguments = build(case, int(trial.rng.integers(2**32)))
    arguments["lse_base"] = trial.pick("e", "2")
    options = {"kernel": fixed.kernel, "tiles": fixed.tiles, "out_dtype": fixed.out_dtype}
    trial.problem = f"{case}, {fixed}"
    return _hold(trial, "mla_sparse", arguments, options, (InvalidArgumentError,))


# --- garbage -------------------------------------------------------------------------------------------------------

_INTEGERS: Final = (-(2**31), -1, 0, 1, 7, 1000, GARBAGE_ID, 2**31 - 1)
_SCALARS: Final[Mapping[str, tuple[Any, ...]]] = {
    "sm_scale": (float("nan"), float("inf"), 1e39, "0.1", None, True, np.float16(0.1), [0.1]),
    "logit_cap": (-1.0, float("nan"), float("inf"), None, "x", 1e-30, 1e30),
    "page_size": (0, -1, 3, 2**31, 1.5, None, "16", True),
    "max_q_len": (0, -1, 1, 2**31, 2**40, 1.5, "4"),
    "max_kv_len": (0, -1, 1, 2**31, 2**40, 1.5, "4"),
    "kernel": ("bogus", "mma_wide", "mma_roles", "tile", "combine", 3),
    "tiles": ("bogus", 3, NARROW_E4M3, ROLES_E4M3),
    "out_dtype": ("float64", "int8", "bogus", 3, object()),
    "lse_base": ("10", 2, None),
    "mask": ("bogus", None, "tree", 3, TreeMask(np.zeros((1, 1), np.uint32), 1)),
    "kv_dtype": ("float8_e4m3", "fp8_ds_mla", "float8_e5m2", "bogus", 3),
    "kv_scale": (0.0, -1.0, float("nan"), float("inf"), "x", np.zeros(2, np.float32), np.ones(1, np.float64)),
    "budget": ("sm_70", "bogus", 90, "sm_90"),
    "deterministic": (True,),
    "new_kv": (np.zeros((1, 576), np.float32), "x"),
    "qo_indptr": (None, np.zeros(0, np.int32), "x"),
    "out": (np.zeros((1, 1, 512), np.float32), "x"),
    "lse": (np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float64)),
}
_ARRAYS: Final = ("q", "kv_cache", "kv_lens", "kv_indptr", "kv_indices", "block_table", "qo_indptr", "tail_lens")
_DTYPES: Final = ("int8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64", "bool", "complex64")


def _garbage(trial: _Trial) -> bool:
    """Make a call with something wrong in it, in checked mode."""
    fixed = _fixed(trial.fixed)
    arguments, options = _call(trial, fixed)
    changes = [_spoil(trial, arguments, options) for _ in range(int(trial.pick(1, 1, 2)))]
    trial.problem += f", changed: {'; '.join(changes)}"
    both = arguments | options
    asked = {name: both.pop(name) for name in tuple(both) if name in _NOT_ASKED}
    try:
        oracle.mla_verify(**both)
    except Exception as error:  # the oracle refuses in its own words
        return _expect_refusal(trial, both, asked, error)
    both = {name: value for name, value in both.items() if name not in ("out", "lse")}
    return _hold(trial, "mla_verify", both, asked, ())


_NOT_ASKED: Final = ("kernel", "tiles", "deterministic", "out_dtype", "budget", "max_q_len", "max_kv_len", "out", "lse")


def _expect_refusal(trial: _Trial, arguments: dict[str, Any], options: dict[str, Any], why: Exception) -> bool:
    place = trial.place
    given = {name: _put_any(place.put, value) for name, value in (arguments | options).items()}
    try:
        place.calls.mla_verify(**given, validate=True, **place.seeded(trial.rng))
    except _FAULTS:
        raise
    except MlaFlashError:
        return True
    raise _Wrong(f"the call went through, and the oracle says {type(why).__name__}: {why}")


def _put_any(put: Put, value: Any) -> Any:
    return tuple(_put_any(put, piece) for piece in value) if isinstance(value, tuple) else put(value)


def _spoil(trial: _Trial, arguments: dict[str, Any], options: dict[str, Any]) -> str:
    """Change one argument, and say how."""
    if trial.chance(0.35):
        name = str(trial.rng.choice(tuple(_SCALARS)))
        value = trial.pick(*_SCALARS[name])
        (options if name in _NOT_ASKED else arguments)[name] = value
        shown = f"{type(value).__name__} {value.shape}" if isinstance(value, np.ndarray) else repr(value)
        return f"{name} = {shown}"
    name = str(trial.rng.choice([name for name in _ARRAYS if isinstance(arguments.get(name), np.ndarray)]))
    array = arguments[name].copy()
    is_integers = array.dtype.kind in "iu" and name != "kv_cache"
    way = trial.pick("value", "value", "value", "order", "shape", "dtype") if is_integers else trial.pick(
        "shape", "dtype", "strides"
    )  # fmt: skip
    if way == "value" and array.size:
        place = int(trial.rng.integers(array.size))
        value = int(trial.pick(*_INTEGERS, *(() if array.dtype.itemsize < 8 else (2**32, -(2**63), 2**63 - 1))))
        array.flat[place] = np.array(value).astype(array.dtype)
        arguments[name] = array
        return f"{name}.flat[{place}] = {value}"
    if way == "order":
        arguments[name] = np.ascontiguousarray(array[::-1])
        return f"{name} reversed"
    if way == "dtype":
        dtype = trial.pick(*_DTYPES)
        with np.errstate(all="ignore"):
            arguments[name] = array.view(np.uint8) if array.dtype.kind == "V" else array.astype(dtype)
        return f"{name} as {arguments[name].dtype}"
    if way == "strides":
        arguments[name] = array[..., ::-1] if trial.chance(0.5) else np.asfortranarray(array)
        return f"{name} with strides {arguments[name].strides}"
    changed: tuple[Callable[[], Array], ...] = (
        lambda: array[:-1],
        lambda: array[..., :-1],
        lambda: array[None],
        lambda: array[:0],
        lambda: array.reshape(-1),
        lambda: np.concatenate([array, array]),
    )
    arguments[name] = np.ascontiguousarray(trial.pick(*changed)())
    return f"{name} of shape {arguments[name].shape}"


# --- plans ---------------------------------------------------------------------------------------------------------


def _plan(trial: _Trial) -> bool:
    """Run steps on one plan, with updates between them that are refused and must leave no trace."""
    place, rng = trial.place, trial.rng
    build_ = _PLAN_BUILDS[trial.fixed.integers(len(_PLAN_BUILDS))]
    longest = 600 if place.kind == "emulator" else 20_000
    setup = random_setup(rng, (build_,), longest=longest)
    how: dict[str, Any] = {}
    if place.kind == "emulator":
        how = {"num_sms": int(trial.pick(1, 2, 7, 33)), **place.seeded(rng)}
    lse_base = trial.pick("e", "2")
    trial.problem = f"{setup}, {how}, lse_base {lse_base}"
    plan = place.plan(**setup.arguments(), lse_base=lse_base, copy_ids=trial.chance(0.7), **how)
    for number in range(PLAN_STEPS):
        step = random_step(rng, setup, pairs=place.pairs)
        trial.problem = f"{setup}, {how}, step {number}: kv_lens {step.arguments['kv_lens'].tolist()}"
        if trial.chance(0.4):
            _refused_update(trial, plan, step.update())
        plan.update(**step.update(place.put), validate=trial.chance(0.5))
        out, lse = map(place.get, plan.run(**step.run(place.put)))
        expected = oracle.mla_verify(**step.arguments, lse_base=lse_base)
        found = judge((out, lse), expected, build_.dtype)
        if not found.passed:
            raise _Wrong(f"{found.reason}; {found.worst_array}{list(found.worst_index)} is {found.worst_actual:.8g}")
    return False


def _refused_update(trial: _Trial, plan: Any, update: dict[str, Any]) -> None:
    name = str(
        trial.rng.choice([name for name in ("kv_lens", "qo_indptr", "block_table", "kv_indptr") if name in update])
    )
    array = update[name].copy()
    if not array.size:
        return
    array.flat[int(trial.rng.integers(array.size))] = trial.pick(-(2**31), -1, 2**31 - 1)
    update = {key: trial.place.put(value) for key, value in (update | {name: array}).items() if key != "mask"}
    try:
        plan.update(**update, mask="bogus", validate=True)
    except _FAULTS:
        raise
    except MlaFlashError:
        return
    raise _Wrong(f"update() took a mask 'bogus' and {name} {array.tolist()}")


# --- masks, moves, acceptance --------------------------------------------------------------------------------------


def _pack(trial: _Trial) -> bool:
    rng, place = trial.rng, trial.place
    q_lens = tuple(int(q) for q in rng.integers(0, trial.pick(2, 9, 34, 70), rng.integers(1, 6)))
    batch = Batch(q_lens, tuple(int(p) for p in rng.integers(0, 70, len(q_lens))), int(rng.integers(2**32)))
    name = str(rng.choice(MASK_FORMATS))
    max_q = max(q_lens) + int(trial.pick(0, 0, 1, 33))
    tokens = batch.num_tokens + int(trial.pick(0, 0, 5))
    trial.problem = f"{batch} as {name}, {tokens} tokens, {max_q} columns"
    encoded = encode(name, batch, max_q, wide=trial.chance(0.5))
    source = encoded.make(**{key: place.put(array) for key, array in encoded.arrays.items()})
    bounds = place.put(batch.qo_indptr)
    mask = place.calls.pack_mask(source, tokens, max_q, qo_indptr=bounds, **place.seeded(rng))
    if not np.array_equal(place.get(mask.words), widened(encoded.expected, tokens, max_q)):
        raise _Wrong("the words are not those of the host's converter")
    return False


def _move(trial: _Trial) -> bool:
    rng, place = trial.rng, trial.place
    size = int(trial.pick(1, 2, 3, 24, 57, 300))
    name = str(rng.choice(MOVE_ORDERS))
    src, dst = ids(name, size, rng)
    slots = 2 * size + 3
    width = int(trial.pick(4, 36, 64, 656, 1152, 5))
    layers = random_layers((slots, width), int(trial.pick(1, 2, 5)), rng)
    kind = trial.pick(np.int32, np.int64)
    src, dst = src.astype(kind), dst.astype(kind)
    holes = rng.random(src.size) < trial.pick(0.0, 0.3)
    src[holes] = -1
    n = int(rng.integers(0, src.size + 1)) if trial.chance(0.3) else None
    trial.problem = f"{name} of {size} rows of {width} bytes, {len(layers)} layers, n {n}"
    expected = [moved(layer, src[:n], dst[:n]) for layer in layers]
    there = [place.put(layer.copy()) for layer in layers]
    count = None if n is None else place.put(np.array([n], np.int32))
    if src.size and trial.chance(0.3):
        array = trial.pick(src, dst)
        array[rng.integers(array.size)] = trial.pick(slots, -2, 2**31 - 1, -(2**31))
        try:
            place.kv.move_rows(there, place.put(src), place.put(dst), count, validate=True, **place.seeded(rng))
        except _FAULTS:
            raise
        except MlaFlashError:
            if all(np.array_equal(place.get(a), b) for a, b in zip(there, layers, strict=True)):
                return True
            raise _Wrong("a refused move has moved something") from None
        expected = [moved(layer, src[:n], dst[:n]) for layer in layers]  # behind the first n
    else:
        place.kv.move_rows(
            there, place.put(src), place.put(dst), count, validate=trial.chance(0.5), **place.seeded(rng)
        )
    if not all(np.array_equal(place.get(a), b) for a, b in zip(there, expected, strict=True)):
        raise _Wrong("the rows are not where they belong")
    return False


def _compact(trial: _Trial) -> bool:
    """Any accept_index, garbage included: what is no step forward within its request moves nothing."""
    rng, place = trial.rng, trial.place
    q_lens = rng.integers(0, 10, rng.integers(1, 6))
    width = int(rng.integers(1, 7))
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    slots = rng.permutation(1000)[: bounds[-1]].astype(trial.pick(np.int32, np.int64))
    index = rng.integers(-2, bounds[-1] + 2, (q_lens.size, width)).astype(trial.pick(np.int32, np.int64))
    lens = rng.integers(-1, width + 2, q_lens.size) if trial.chance(0.5) else None
    trial.problem = f"q_lens {q_lens.tolist()}, accept_index {index.tolist()}, accept_lens {lens}"
    there = [None if array is None else place.put(array) for array in (slots, index, lens)]
    moves = place.kv.plan_compact(*there, qo_indptr=place.put(bounds), **place.seeded(rng))
    pairs = [pair for request in compaction(slots, index, lens, bounds.tolist()) for pair in request]
    found = list(zip(place.get(moves.src).tolist(), place.get(moves.dst).tolist(), strict=True))
    if found != pairs:
        raise _Wrong(f"the moves are {found}, expected {pairs}")
    return False


def _accept(trial: _Trial) -> bool:
    rng, place = trial.rng, trial.place
    batch, size, depth = int(rng.integers(0, 5)), int(rng.integers(1, 13)), int(rng.integers(0, 13))
    draft, target = (rng.integers(0, trial.pick(1, 2, 3), (batch, size)) for _ in range(2))
    parents = np.full((batch, size), -1)
    for i in range(1, size):
        parents[:, i] = rng.integers(-1, i, batch)
    trial.problem = f"draft {draft.tolist()}, target {target.tolist()}, parents {parents.tolist()}, depth {depth}"
    kept = spec.accept_greedy(place.put(draft), place.put(target), parents=place.put(parents), depth=depth)
    index, lens, bonus = (place.get(array) for array in kept)
    for b in range(batch):
        path, follower = greedy_walk(draft[b].tolist(), target[b].tolist(), parents[b].tolist(), depth)
        if (index[b, : lens[b]] - b * size).tolist() != path or bonus[b] != follower:
            raise _Wrong(f"request {b} keeps {index[b].tolist()}, expected {path}")
    return False


def greedy_walk(
    draft: Sequence[int], target: Sequence[int], parents: Sequence[int], depth: int
) -> tuple[list[int], int]:
    """Follow the target's choices down from the root; of children alike, the first.

    Parameters
    ----------
    draft, target, parents : sequence of int
        Of one request, as in `mlaflash.spec.accept_greedy`.
    depth : int

    Returns
    -------
    path : list of int
    bonus : int
    """
    path = [0]
    while len(path) <= depth:
        at = path[-1]
        fitting = [i for i in range(1, len(draft)) if parents[i] == at and draft[i] == target[at]]
        if not fitting:
            break
        path.append(fitting[0])
    return path, target[path[-1]]


# --- spread over ranks, and laid anew --------------------------------------------------------------------------------


def _shard(trial: _Trial) -> bool:
    """Merge what each rank makes of its tokens: it is one call over all of them."""
    rng, place = trial.rng, trial.place
    dtype = str(trial.fixed.choice(("bfloat16", "float16", "float32")))
    logit_cap = float(trial.fixed.choice((0.0, 30.0)))
    fixed = _Fixed(
        dtype, None, "float32", None, None, deterministic=False, logit_cap=logit_cap, new_kv=False, paired=False
    )
    case = replace(
        _case(trial, fixed), page_size=1, addressing="indices", mask=trial.pick("causal", "chain", "tree", "dense")
    )
    arguments = build(case, int(rng.integers(2**32)))
    mask, lens = arguments["mask"], arguments["kv_lens"]
    max_q = max((*case.q_lens, mask.max_q if isinstance(mask, TreeMask) else 0))
    sharding = _sharding(trial, case)
    base = trial.pick("e", "2")
    trial.problem = f"{case}, {sharding}, lse_base {base}"
    bounds = place.put(arguments["qo_indptr"])
    parts = []
    for rank in range(sharding.num_ranks):
        shard = place.distributed.shard_mask(
            place.put(mask),
            sharding,
            rank,
            kv_lens=place.put(lens),
            num_tokens=case.num_tokens,
            max_q=max_q,
            qo_indptr=bounds,
            **place.seeded(rng),
        )
        tokens = [np.flatnonzero(owner == rank) for owner in _owners(sharding, lens, place)]
        for found in (shard.kv_lens, shard_lens(place.put(lens), sharding, rank)):
            if place.get(found).tolist() != [own.size for own in tokens]:
                raise _Wrong(f"rank {rank} is said to hold {place.get(found).tolist()} tokens")
        begins = arguments["kv_indptr"][:-1]
        ids = [arguments["kv_indices"][begin + own] for begin, own in zip(begins, tokens, strict=True)]
        local = {
            "kv_indptr": np.cumsum([0, *(own.size for own in tokens)]).astype(np.int32),
            "kv_indices": np.concatenate([arguments["kv_indices"][:0], *ids]),
        }
        parts.append(
            place.calls.mla_verify(
                q=place.put(arguments["q"]),
                kv_cache=place.put(arguments["kv_cache"]),
                sm_scale=case.sm_scale,
                kv_lens=shard.kv_lens,
                **{name: place.put(array) for name, array in local.items()},
                qo_indptr=bounds,
                mask=shard.mask,
                tail_lens=shard.tail_lens,
                logit_cap=logit_cap,
                lse_base=base,
                out_dtype=trial.pick(dtype, "float32"),
                validate=True,
                **place.seeded(rng),
            )
        )
    outs = [place.get(out).astype(np.float32) for out, _ in parts]
    lses = [place.get(lse) for _, lse in parts]
    merged = place.distributed.merge_partials(
        place.put(np.stack(outs)), place.put(np.stack(lses)), lse_base=base, **place.seeded(rng)
    )
    expected = oracle.mla_verify(**arguments, lse_base=base)
    out, lse = map(place.get, merged)
    result = compare(out, lse, *expected, tolerance_of_few(tolerance(dtype, dtype, partials=True), expected[0]))
    if not result.passed:
        raise _Wrong(f"{result.reason}; {result.worst_array}{list(result.worst_index)} is {result.worst_actual:.8g}")
    return False


def _sharding(trial: _Trial, case: Case) -> Sharding:
    num_ranks = int(trial.rng.integers(2, 5))
    if trial.chance(0.6):
        return Interleaved(num_ranks, int(trial.pick(1, 2, 7, 16, 64)))
    rows = trial.pick(1, case.batch)
    begins = np.sort(trial.rng.integers(0, max((*case.kv_lens, 1)) + 20, (rows, num_ranks)), axis=1).astype(np.int32)
    begins[:, 0] = 0
    return Contiguous(trial.place.put(begins[0] if rows == 1 else begins))


def _owners(sharding: Sharding, lens: Array, place: Place) -> list[Array]:
    """Say on which rank each token of each request lies."""
    if isinstance(sharding, Interleaved):
        return [np.arange(n) // sharding.interleave % sharding.num_ranks for n in lens]
    begins = np.broadcast_to(place.get(sharding.begins), (len(lens), sharding.num_ranks))
    return [np.searchsorted(begins[b], np.arange(n), side="right") - 1 for b, n in enumerate(lens)]


def _defrag(trial: _Trial) -> bool:
    """Lay a request anew: its rows follow its table."""
    rng, place = trial.rng, trial.place
    align, num_slots = int(trial.pick(1, 4, 16, 64)), int(rng.integers(1, 400))
    is_free = rng.random(num_slots) < trial.pick(0.1, 0.5, 0.9)
    edges = np.flatnonzero(np.diff(np.pad(is_free.astype(np.int8), 1)))
    kind = trial.pick(np.int32, np.int64)
    runs = np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(kind)
    table = rng.permutation(np.flatnonzero(~is_free)).astype(kind)
    slots = table[: rng.integers(0, table.size + 1)]
    most = trial.pick(None, int(rng.integers(0, num_slots)))
    shared = (rng.random(num_slots) < 0.05).astype(np.int32) if trial.chance(0.5) else None
    trial.problem = f"{slots.tolist()} into {runs.tolist()}, {num_slots} slots, align {align}, max_moves {most}"
    moves, remap = kv.plan_defrag(
        place.put(slots), place.put(runs), num_slots=num_slots, align=align, max_moves=most, immovable=place.put(shared)
    )
    layer = random_layers((num_slots, 36), 1, rng)[0]
    there = place.put(layer.copy())
    place.kv.move_rows([there], *moves, validate=True, **place.seeded(rng))
    new = place.get(kv.apply_remap(place.put(table), remap))
    if not np.array_equal(place.get(there)[new], layer[table]):
        raise _Wrong("the rows are not where the table says")
    if most is not None and (new != table).sum() > most:
        raise _Wrong(f"{(new != table).sum()} rows have moved")
    if shared is not None and (new != table)[shared[table] != 0].any():
        raise _Wrong("a row that others share has moved")
    return False


_KINDS: Final[Mapping[str, tuple[Callable[[_Trial], bool], float]]] = {
    "verify": (_verify, 0.27),
    "garbage": (_garbage, 0.22),
    "plan": (_plan, 0.15),
    "sparse": (_sparse, 0.12),
    "shard": (_shard, 0.06),
    "mask": (_pack, 0.06),
    "move": (_move, 0.06),
    "compact": (_compact, 0.02),
    "defrag": (_defrag, 0.02),
    "accept": (_accept, 0.02),
}
"""What a trial is about, and the share of each."""

KINDS: Final = tuple(_KINDS)
"""What trials are about."""
