"""Every exception that the library raises on purpose.

A message says what was given, what is allowed and what to do, in the caller's words. Each class
also derives from the built-in exception that a caller would expect, so `except ValueError` keeps
working around a bad argument.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path


class MlaFlashError(Exception):
    """Base class of everything that mlaflash raises on purpose."""


class InvalidArgumentError(MlaFlashError, ValueError):
    """An argument or a setting has a value that is not allowed."""


class ShapeError(InvalidArgumentError):
    """An array has the wrong rank, width, dtype or device, or two arrays disagree."""


class UnsupportedError(MlaFlashError, NotImplementedError):
    """The request is well formed and not supported: an architecture, dtype, width, kernel name."""


class TileError(UnsupportedError, ValueError):
    """A tile configuration that no device, or not this device, can run.

    Parameters
    ----------
    message : str
        What was given, what is allowed, what to do.
    shared_bytes : int or None
        Shared memory that one block of the configuration asks for, where that is the reason.
    shared_limit : int or None
        Shared memory that one block may have, where that is the reason.
    """

    def __init__(self, message: str, *, shared_bytes: int | None = None, shared_limit: int | None = None) -> None:
        super().__init__(message)
        self.shared_bytes = shared_bytes
        self.shared_limit = shared_limit


class MissingDependencyError(MlaFlashError, ImportError):
    """Something optional is not installed; the message names the extra or packages to install."""


class NoDeviceError(MlaFlashError, RuntimeError):
    """A GPU was asked for and there is none that CUDA can use."""


class CompileError(MlaFlashError, RuntimeError):
    """A compiler refused a kernel; the compiler's log is part of the message.

    Parameters
    ----------
    message : str
        One sentence.
    kernel : str
        Name of the kernel.
    defines : mapping of str to int
        Constants that it was compiled with.
    arch : str
        Target, such as ``"sm_120"``, or ``"host"`` for the emulator.
    options : sequence of str
        Everything on the compiler's command line.
    log : str
        What the compiler said.
    source_path : Path or None
        The file that holds the kernel.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        defines: Mapping[str, int],
        arch: str,
        options: Sequence[str],
        log: str,
        source_path: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.defines = dict(defines)
        self.arch = arch
        self.options = tuple(options)
        self.log = log
        self.source_path = source_path

    def __str__(self) -> str:
        constants = " ".join(f"{name}={value}" for name, value in sorted(self.defines.items()))
        return "\n".join(
            (
                str(self.args[0]),
                f"  kernel {self.kernel} for {self.arch}, constants: {constants or 'none'}",
                f"  source {self.source_path or 'unknown'}",
                f"  options {' '.join(self.options)}",
                self.log.rstrip(),
            )
        )


class CacheMissError(MlaFlashError, RuntimeError):
    """Compiling is switched off and the kernel is not in the cache."""


class CaptureError(MlaFlashError, RuntimeError):
    """A CUDA graph capture forbids what was needed, such as compiling a kernel."""


class LaunchError(MlaFlashError, RuntimeError):
    """The driver refused to load or to launch a kernel."""


class ContextLostError(LaunchError):
    """A kernel has failed so that CUDA refuses this process everything from now on; only a new process helps."""


class CommunicationError(MlaFlashError, RuntimeError):
    """Ranks that compute together cannot reach each other: one is gone, or did not come in time."""


class BusyError(MlaFlashError, RuntimeError):
    """A plan is in the hands of another thread."""


class EmulatorError(MlaFlashError, RuntimeError):
    """The emulator caught a kernel doing something that is wrong on a GPU.

    Parameters
    ----------
    message : str
        What was caught, where.
    kind : str
        One of ``race``, ``poison``, ``async``, ``bounds``, ``misaligned``, ``barrier``, ``divergence``,
        ``deadlock``, ``stack``.
    report : object
        What the emulator had counted until then, or None.
    """

    def __init__(self, message: str, *, kind: str, report: object = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.report = report
