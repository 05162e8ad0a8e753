"""Text in, cubin out: NVRTC called directly, so that compiling needs no GPU and no CUDA toolkit."""

import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaflash.device import parse_arch
from mlaflash.errors import (
    CompileError,
    InvalidArgumentError,
    MissingDependencyError,
    UnsupportedError,
)
from mlaflash.jit import sources

_FIRST_WITH_CACHE = (12, 9)
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel for one architecture, and what the assembler said of it.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    arch : str
        Architecture that it was compiled for.
    defines : mapping of str to int
        Constants that it was compiled with.
    cubin : bytes
        Machine code, as the driver loads it.
    registers : int
        Registers of a thread.
    spill_bytes : int
        The larger of spill stores and spill loads of a thread.
    stack_bytes : int
        Stack frame of a thread.
    static_shared_bytes : int
        Shared memory of a block besides the dynamic part.
    log : str
        What NVRTC and the assembler said.
    seconds : float
        Time that NVRTC took, also where the kernel came from the cache.
    cached : bool
        Whether this call compiled nothing.
    nvrtc_version : str
        Such as ``"12.9"``.
    """

    kernel: str
    arch: str
    defines: Mapping[str, int]
    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    log: str = field(repr=False)
    seconds: float
    cached: bool
    nvrtc_version: str

    @property
    def entry(self) -> str:
        """Name of the ``__global__`` function."""
        return entry_name(self.kernel)


def entry_name(kernel: str) -> str:
    """Name of a kernel's ``__global__`` function."""
    return f"mlaflash_{kernel}"


def compile_options(defines: Mapping[str, int], arch: str, *, lineinfo: bool = False) -> tuple[str, ...]:
    """Build NVRTC's command line.

    Parameters
    ----------
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.
    arch : str
        Such as ``"sm_120"``.
    lineinfo : bool
        Whether the cubin carries line tables.

    Returns
    -------
    tuple of str

    Raises
    ------
    InvalidArgumentError
        A constant's name is not upper case, or its value is no integer.
    UnsupportedError
        The architecture is older than sm_80.
    """
    parse_arch(arch)
    return (
        "-std=c++17",
        "-default-device",
        # A header comes from the sources that were hashed, never from the current directory.
        "--no-source-include",
        "--ptxas-options=-v",
        f"-arch={arch}",
        *(("-lineinfo",) if lineinfo else ()),
        *define_options(defines),
    )


def define_options(defines: Mapping[str, int]) -> tuple[str, ...]:
    """Spell constants as options of a compiler: nothing but a name of capitals and a number gets there.

    Parameters
    ----------
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.

    Returns
    -------
    tuple of str
        Sorted.

    Raises
    ------
    InvalidArgumentError
        A constant's name is not upper case, or its value is no integer.
    """
    for name, value in defines.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(value, int):
            raise InvalidArgumentError(
                f"defines holds {name!r}: {value!r}; allowed are upper-case names with integer "
                f"values, such as {{'HT': 8}}. Rename it or convert the value."
            )
    return tuple(f"-DMLAFLASH_{name}={int(value)}" for name, value in sorted(defines.items()))


def nvrtc_version() -> str:
    """Version of the NVRTC in use, such as ``"12.9"``.

    Raises
    ------
    MissingDependencyError
        CuPy or NVRTC is not installed.
    """
    return _nvrtc()[1]


def supported_archs() -> list[str]:
    """List the architectures that this NVRTC and the kernels support, the oldest first.

    Raises
    ------
    MissingDependencyError
        CuPy or NVRTC is not installed.
    """
    nvrtc, _ = _nvrtc()
    return [f"sm_{number}" for number in nvrtc.getSupportedArchs() if number >= 80]


def compile_kernel(kernel: str, defines: Mapping[str, int], arch: str, *, lineinfo: bool = False) -> CompiledKernel:
    """Compile a kernel; nothing is cached and no GPU is asked for.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.
    arch : str
        Such as ``"sm_120"``.
    lineinfo : bool
        Whether the cubin carries line tables for profilers.

    Returns
    -------
    CompiledKernel

    Raises
    ------
    UnsupportedError
        The kernel or the architecture is unknown.
    MissingDependencyError
        CuPy or NVRTC is not installed.
    CompileError
        NVRTC refused the source, or its log lacks what it should report.
    """
    return compile_sources(sources.read(kernel), defines, arch, lineinfo=lineinfo)


def compile_sources(
    source_set: sources.SourceSet, defines: Mapping[str, int], arch: str, *, lineinfo: bool = False
) -> CompiledKernel:
    """Compile sources that are in memory already; see `compile_kernel`.

    Parameters
    ----------
    source_set : SourceSet
    defines : mapping of str to int
    arch : str
    lineinfo : bool

    Returns
    -------
    CompiledKernel
    """
    nvrtc, version = _nvrtc()
    options = compile_options(defines, arch, lineinfo=lineinfo)
    if nvrtc.getVersion() >= _FIRST_WITH_CACHE:
        # Where there is a driver, NVRTC answers a repeated compile from a cache of its own, without the log.
        options = (*options, "--no-cache")
    _check_arch(arch, nvrtc, version)
    kernel = source_set.kernel

    def failure(message: str, log: str) -> CompileError:
        return CompileError(
            message,
            kernel=kernel,
            defines=defines,
            arch=arch,
            options=options,
            log=log,
            source_path=source_set.path,
        )

    start = time.perf_counter()
    program = nvrtc.createProgram(
        source_set.source,
        source_set.path.name,
        [text.encode() for text in source_set.headers.values()],
        [name.encode() for name in source_set.headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, options)
            cubin = bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0")
            raise failure(f"NVRTC {version} refused the kernel ({error}); see its log below.", log) from error
        log = nvrtc.getProgramLog(program).rstrip("\0")
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - start

    usage = _parse_log(log, entry_name(kernel))
    if usage is None:
        raise failure(
            f"NVRTC {version} compiled the kernel, but its log does not tell the registers and "
            f"spills of exactly one function {entry_name(kernel)}. A kernel's file must define "
            "that one __global__ function.",
            log,
        )
    return CompiledKernel(
        kernel=kernel,
        arch=arch,
        defines=dict(defines),
        cubin=cubin,
        **usage,
        log=log,
        seconds=seconds,
        cached=False,
        nvrtc_version=version,
    )


def _parse_log(log: str, entry: str) -> dict[str, int] | None:
    """Read the assembler's report on a program's one kernel; None where it is not all there."""
    entries = re.findall(r"Compiling entry function '([^']+)'", log)
    # Device functions that were not inlined report a stack of their own; the kernel's comes under
    # its name.
    properties = re.search(rf"Function properties for {re.escape(entry)}\n(.*)", log)
    stack = _STACK.search(properties[1]) if properties else None
    used = [line for line in log.splitlines() if _REGISTERS.search(line)]
    if entries != [entry] or stack is None or len(used) != 1:
        return None
    registers = _REGISTERS.search(used[0])
    static_shared = _STATIC_SHARED.search(used[0])
    if registers is None:
        return None
    return {
        "registers": int(registers[1]),
        "spill_bytes": max(int(stack[2]), int(stack[3])),
        "stack_bytes": int(stack[1]),
        "static_shared_bytes": int(static_shared[1]) if static_shared else 0,
    }


def _check_arch(arch: str, nvrtc: Any, version: str) -> None:
    (major, minor), _ = parse_arch(arch)
    if major * 10 + minor not in nvrtc.getSupportedArchs():
        raise UnsupportedError(
            f"arch is {arch!r}; NVRTC {version} compiles for {', '.join(supported_archs())}. "
            "Name one of them, or install a newer NVRTC: pip install -U 'mlaflash[cuda12]' (or "
            "mlaflash[cuda13])."
        )


@functools.cache
def _nvrtc() -> tuple[Any, str]:
    """Return CuPy's binding of NVRTC and the version of the library behind it."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        major, minor = nvrtc.getVersion()
    # A missing library surfaces as RuntimeError from CuPy's loader.
    except (ImportError, RuntimeError) as error:
        missing = "CuPy" if isinstance(error, ImportError) else "NVRTC"
        raise MissingDependencyError(
            f"compiling a kernel needs {missing}, which cannot be loaded ({str(error).strip()}); "
            "pip install 'mlaflash[cuda12]' (or mlaflash[cuda13]), one of the two. "
            "The oracle and the emulator need neither."
        ) from error
    return nvrtc, f"{major}.{minor}"
