"""What a GPU offers, asked of CuPy or read from a datasheet.

No other module asks a device anything.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from mlaflash.errors import (
    ContextLostError,
    InvalidArgumentError,
    MissingDependencyError,
    NoDeviceError,
    UnsupportedError,
)
from mlaflash.settings import arch_override

# Names of cudaDeviceAttr, which CuPy takes by number.
_MULTIPROCESSOR_COUNT = 16
_L2_CACHE_SIZE = 38
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_SHARED_PER_MULTIPROCESSOR = 81
_SHARED_PER_BLOCK_OPTIN = 97
_RESERVED_SHARED_PER_BLOCK = 111

# Numbers of cudaError_t, and of CUresult alike, after which CUDA answers every call of the process with the same one:
# ECC, NVLink, contained; illegal address, timeout, destroyed context, assertion; hardware stack to launch failure, by
# rising number; tensor memory that was left allocated.
_LOST = frozenset((214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721))

_LEAST_CAPABILITY = (8, 0)
_ARCH = re.compile(r"sm_(\d{1,2})(\d)([af]?)")


@dataclass(frozen=True, slots=True)
class Device:
    """The limits of one GPU that a plan depends on.

    Parameters
    ----------
    name : str
        Name of the card.
    arch : str
        Architecture that its kernels are compiled for, such as ``"sm_90"``.
    num_sms : int
        Streaming multiprocessors.
    shared_per_block : int
        Largest dynamic shared memory of a block, in bytes (the opt-in limit).
    shared_per_sm : int
        Shared memory of a multiprocessor, in bytes.
    l2_bytes : int
        Level-2 cache.
    is_present : bool
        Whether this is a GPU of this machine; False for an entry of the datasheet.
    reserved_shared_per_block : int
        Shared memory that the driver takes per block besides the block's own, in bytes.
    """

    name: str
    arch: str
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    l2_bytes: int
    is_present: bool
    reserved_shared_per_block: int = 1024

    @classmethod
    def current(cls, index: int | None = None) -> "Device":
        """Ask CuPy for a GPU of this machine.

        Parameters
        ----------
        index : int or None
            CUDA's number of the device; None is CuPy's current one.

        Returns
        -------
        Device

        Raises
        ------
        MissingDependencyError
            CuPy is not installed.
        NoDeviceError
            There is no such GPU.
        UnsupportedError
            The GPU is older than sm_80, or ``MLAFLASH_ARCH`` names an architecture that it cannot
            run.
        """
        ordinal = current_ordinal() if index is None else index
        return _probe(ordinal, arch_override())

    @classmethod
    def for_arch(cls, arch: str) -> "Device":
        """Look up the usual card of an architecture, without a GPU.

        Parameters
        ----------
        arch : str
            Such as ``"sm_120"``; the suffix of ``"sm_90a"`` changes the target and no limit.

        Returns
        -------
        Device

        Raises
        ------
        UnsupportedError
            The architecture is unknown or older than sm_80.
        """
        capability, _ = parse_arch(arch)
        if capability not in _DATASHEET:
            known = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(_DATASHEET))
            raise UnsupportedError(
                f"arch is {arch!r}, which has no entry in the datasheet; known are {known}. "
                "Name one of them, or run on the GPU itself."
            )
        name, num_sms, shared_per_block, shared_per_sm, l2_bytes = _DATASHEET[capability]
        return cls(name, arch, num_sms, shared_per_block, shared_per_sm, l2_bytes, is_present=False)

    @classmethod
    def for_card(cls, card: str) -> "Device":
        """Look up a card that predictions are made for, without a GPU.

        Parameters
        ----------
        card : {"h200", "rtx-pro-6000", "rtx-5090"}

        Returns
        -------
        Device

        Raises
        ------
        UnsupportedError
            There is no such card in the datasheet.
        """
        if card not in CARDS:
            raise UnsupportedError(
                f"card is {card!r}, which has no entry in the datasheet; known are {', '.join(CARDS)}. Name one of "
                "them, or run on the card itself."
            )
        arch, name, num_sms, l2_bytes = CARDS[card]
        return replace(cls.for_arch(arch), name=name, num_sms=num_sms, l2_bytes=l2_bytes)


_KIB = 1024
_MIB = 1024 * 1024
# Largest shared memory of a block and of a multiprocessor, from the table of technical
# specifications per compute capability in the CUDA programming guide; multiprocessors and level-2
# cache of the card named.
_DATASHEET: dict[tuple[int, int], tuple[str, int, int, int, int]] = {
    (8, 0): ("A100", 108, 163 * _KIB, 164 * _KIB, 40 * _MIB),
    (8, 6): ("RTX A6000", 84, 99 * _KIB, 100 * _KIB, 6 * _MIB),
    (8, 7): ("Jetson AGX Orin", 16, 163 * _KIB, 164 * _KIB, 4 * _MIB),
    (8, 9): ("L40S", 142, 99 * _KIB, 100 * _KIB, 96 * _MIB),
    (9, 0): ("H100 SXM", 132, 227 * _KIB, 228 * _KIB, 50 * _MIB),
    (10, 0): ("B200", 148, 227 * _KIB, 228 * _KIB, 126 * _MIB),
    (10, 3): ("B300", 148, 227 * _KIB, 228 * _KIB, 126 * _MIB),
    (12, 0): ("RTX PRO 6000 Blackwell", 188, 99 * _KIB, 100 * _KIB, 128 * _MIB),
    (12, 1): ("GB10", 48, 99 * _KIB, 100 * _KIB, 24 * _MIB),
}
# Architecture, name, multiprocessors and level-2 cache, from the vendor's data sheets.
CARDS: dict[str, tuple[str, str, int, int]] = {
    "h200": ("sm_90", "H200", 132, 50 * _MIB),
    "rtx-pro-6000": ("sm_120", "RTX PRO 6000 Blackwell", 188, 128 * _MIB),
    "rtx-5090": ("sm_120", "RTX 5090", 170, 96 * _MIB),
}
"""Cards by the name that predictions are asked for with."""


def gpu_available() -> bool:
    """Whether CuPy is installed and CUDA finds at least one GPU."""
    try:
        return device_count() > 0
    except MissingDependencyError:
        return False


def device_count() -> int:
    """Count the GPUs that CUDA can use; 0 without a driver.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    """
    runtime = _runtime()
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def driver_version() -> str | None:
    """Newest CUDA that the driver supports, such as ``"13.0"``; None without a driver.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    """
    runtime = _runtime()
    try:
        version = int(runtime.driverGetVersion())
    except runtime.CUDARuntimeError:
        return None
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def current_ordinal() -> int:
    """CUDA's number of CuPy's current device.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    NoDeviceError
        There is no GPU.
    """
    runtime = _runtime()
    try:
        return int(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise context_loss(error) or _no_device(str(error)) from error


def context_loss(error: BaseException) -> ContextLostError | None:
    """Give the error for a CUDA context that is beyond use, where that is what CUDA said; None where it is not.

    Parameters
    ----------
    error : BaseException
        Of CuPy's binding of the runtime or of the driver.
    """
    if getattr(error, "status", None) not in _LOST:
        return None
    return ContextLostError(
        f"CUDA says {error}: a kernel that ran before this call, of whatever library, has failed, and with it all work "
        "of this process on the GPU. Nothing can run here any more: start the process again, under compute-sanitizer "
        "to see which kernel it was."
    )


class Scope:
    """Leaves the current device as it is, and says in the library's words that CUDA's context is lost."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise `ContextLostError` in place of CuPy's error, where that is what it means."""
        lost = None if error is None else context_loss(error)
        if lost is not None:
            raise lost from error


class _Elsewhere(Scope):
    """Makes another device the current one."""

    def __init__(self, ordinal: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(ordinal)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        self._device.__exit__()


HERE = Scope()
"""Of the device that is the current one."""


def on_device(ordinal: int) -> AbstractContextManager[Any]:
    """Make a GPU the current one inside a ``with`` block.

    Parameters
    ----------
    ordinal : int
        CUDA's number of the device.

    Raises
    ------
    MissingDependencyError, NoDeviceError
        As `current_ordinal`.
    ContextLostError
        CUDA says so inside the block.
    """
    return HERE if ordinal == current_ordinal() else _Elsewhere(ordinal)


def pointer_ordinal(ptr: int) -> int:
    """CUDA's number of the GPU that an address belongs to; a negative one for memory of the host.

    Parameters
    ----------
    ptr : int
    """
    with HERE:
        return int(_runtime().pointerGetAttributes(ptr).device)


def stream_is_capturing(stream: Any = None) -> bool:
    """Whether a CUDA graph is being captured on a stream.

    Parameters
    ----------
    stream : cupy.cuda.Stream or None
        None is CuPy's current stream.
    """
    runtime = _runtime()
    if stream is None:
        import cupy

        stream = cupy.cuda.get_current_stream()
    try:
        return bool(runtime.streamIsCapturing(stream.ptr))
    except runtime.CUDARuntimeError as error:
        lost = context_loss(error)
        if lost is not None:
            raise lost from error
        # CUDA refuses the question on the legacy stream while another stream of the process is
        # being captured.
        return True


def parse_arch(arch: str) -> tuple[tuple[int, int], str]:
    """Split an architecture's name into its compute capability and its suffix.

    Parameters
    ----------
    arch : str
        Such as ``"sm_120"`` or ``"sm_90a"``.

    Returns
    -------
    capability : tuple of int
        Such as (12, 0).
    suffix : str
        ``""``, ``"a"`` (this very architecture) or ``"f"`` (its family).

    Raises
    ------
    InvalidArgumentError
        This is no architecture's name.
    UnsupportedError
        The architecture is older than sm_80.
    """
    match = _ARCH.fullmatch(arch) if isinstance(arch, str) else None
    if match is None:
        raise InvalidArgumentError(
            f"arch is {arch!r}; allowed is a CUDA architecture such as sm_90, sm_90a or sm_120. Name one of them."
        )
    capability = int(match[1]), int(match[2])
    if capability < _LEAST_CAPABILITY:
        raise UnsupportedError(
            f"arch is {arch!r}; sm_80 is the least that the kernels support (they need cp.async "
            "and bfloat16). Use an Ampere GPU or a newer one."
        )
    return capability, match[3]


def compile_arch(compute_capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Choose the architecture to compile for.

    It is the device's own, else the nearest older one of the same major version.

    Parameters
    ----------
    compute_capability : tuple of int
        Of the device, such as (12, 1).
    supported : sequence of int
        What the compiler knows, as it counts them: 120 is (12, 0).

    Returns
    -------
    str
        Such as ``"sm_120"``. A kernel compiled for (12, 0) runs on (12, 1), and not the other way
        round.

    Raises
    ------
    UnsupportedError
        The device is older than sm_80, or the compiler knows nothing of its major version.
    """
    major, minor = compute_capability
    parse_arch(f"sm_{major}{minor}")
    runnable = [number for number in supported if number // 10 == major and number % 10 <= minor]
    if not runnable:
        known = ", ".join(f"sm_{number}" for number in supported if number >= 80)
        raise UnsupportedError(
            f"the device has compute capability {major}.{minor} and this NVRTC compiles for "
            f"{known or 'nothing'}. Install a newer NVRTC: pip install -U 'mlaflash[cuda12]' (or "
            "mlaflash[cuda13])."
        )
    return f"sm_{max(runnable)}"


def apply_budget(device: Device, budget: str) -> Device:
    """Give a device the shared memory of a smaller one, to measure there what a plan does here.

    Parameters
    ----------
    device : Device
    budget : str
        Architecture whose limits apply, such as ``"sm_120"``.

    Returns
    -------
    Device
        `device` with the smaller of both limits; everything else is unchanged.
    """
    limits = Device.for_arch(budget)
    return replace(
        device,
        shared_per_block=min(device.shared_per_block, limits.shared_per_block),
        shared_per_sm=min(device.shared_per_sm, limits.shared_per_sm),
    )


def occupancy_blocks(shared_bytes: int, device: Device) -> int:
    """Count the blocks that a multiprocessor's shared memory holds at once.

    Parameters
    ----------
    shared_bytes : int
        Static and dynamic shared memory of a block.
    device : Device
        Its limits count, a budget's included.

    Returns
    -------
    int
        0 where one block asks for more than a block may have.
    """
    if shared_bytes > device.shared_per_block:
        return 0
    return device.shared_per_sm // (shared_bytes + device.reserved_shared_per_block)


def padded_shared_bytes(shared_bytes: int, device: Device, budget: Device) -> int:
    """Ask for so much shared memory that no more blocks share a multiprocessor than under a budget.

    Parameters
    ----------
    shared_bytes : int
        What a block needs.
    device : Device
        Where it runs.
    budget : Device
        The same device with the limits of `apply_budget`.

    Returns
    -------
    int
        `shared_bytes`, or more where the device would hold more blocks than the budget allows.
    """
    blocks = occupancy_blocks(shared_bytes, budget)
    if blocks == 0 or occupancy_blocks(shared_bytes, device) <= blocks:
        return shared_bytes
    return min(device.shared_per_block, device.shared_per_sm // blocks - device.reserved_shared_per_block)


def check_runs_on(arch: str, compute_capability: tuple[int, int]) -> None:
    """Refuse, by name, an architecture whose kernels a device cannot run.

    Parameters
    ----------
    arch : str
        Architecture that a kernel is compiled for.
    compute_capability : tuple of int
        Of the device.

    Raises
    ------
    UnsupportedError
        The device cannot run it.
    """
    (major, minor), suffix = parse_arch(arch)
    own_major, own_minor = compute_capability
    newest_minor, oldest_minor = minor if suffix == "a" else own_minor, minor
    if major != own_major or not oldest_minor <= own_minor <= newest_minor:
        raise UnsupportedError(
            f"arch is {arch!r} and the device has compute capability {own_major}.{own_minor}, "
            f"which cannot run it; allowed is sm_{own_major}{own_minor}. Unset MLAFLASH_ARCH, or "
            "name that architecture."
        )


@functools.cache
def compute_capability(ordinal: int) -> tuple[int, int]:
    """Compute capability of a GPU of this machine, by CUDA's number of the device."""
    runtime = _runtime()
    try:
        return (
            int(runtime.deviceGetAttribute(_COMPUTE_CAPABILITY_MAJOR, ordinal)),
            int(runtime.deviceGetAttribute(_COMPUTE_CAPABILITY_MINOR, ordinal)),
        )
    except runtime.CUDARuntimeError as error:
        raise _no_device(str(error), ordinal) from error


@functools.cache
def _probe(ordinal: int, arch: str | None) -> Device:
    capability = compute_capability(ordinal)
    if arch is None:
        arch = compile_arch(capability, _compiler_archs(capability))
    else:
        check_runs_on(arch, capability)
    runtime = _runtime()
    name = runtime.getDeviceProperties(ordinal)["name"]

    def attribute(number: int) -> int:
        return int(runtime.deviceGetAttribute(number, ordinal))

    return Device(
        name=name.decode() if isinstance(name, bytes) else str(name),
        arch=arch,
        num_sms=attribute(_MULTIPROCESSOR_COUNT),
        shared_per_block=attribute(_SHARED_PER_BLOCK_OPTIN),
        shared_per_sm=attribute(_SHARED_PER_MULTIPROCESSOR),
        l2_bytes=attribute(_L2_CACHE_SIZE),
        is_present=True,
        reserved_shared_per_block=attribute(_RESERVED_SHARED_PER_BLOCK),
    )


def _compiler_archs(capability: tuple[int, int]) -> Sequence[int]:
    """Return what NVRTC knows; without NVRTC the device's own, so that its limits can be told."""
    from cupy_backends.cuda.libs import nvrtc

    try:
        return [int(number) for number in nvrtc.getSupportedArchs()]
    except (RuntimeError, OSError):
        return [capability[0] * 10 + capability[1]]


def _runtime() -> Any:
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError as error:
        raise MissingDependencyError(
            f"using a GPU needs CuPy, which cannot be imported ({error}); "
            "pip install 'mlaflash[cuda12]' (or mlaflash[cuda13]), one of the two. "
            "The oracle and the emulator need neither."
        ) from error
    return runtime


def _no_device(reason: str, ordinal: int | None = None) -> NoDeviceError:
    which = "no GPU" if ordinal is None else f"no GPU number {ordinal}"
    return NoDeviceError(
        f"CUDA finds {which} ({reason}). Check the driver with nvidia-smi, or use mlaflash.emulator, which needs none."
    )
