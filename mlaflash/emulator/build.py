"""Kernels as shared libraries: the same `.cu` files, compiled by the host's C++ compiler.

A library is found by a digest of everything that the compiler sees, in this process's memory, then
in the cache on disk, else it is compiled.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlaflash.errors import CacheMissError, CompileError, MissingDependencyError, MlaFlashError
from mlaflash.jit import sources
from mlaflash.jit.cache import make_key, open_cache
from mlaflash.jit.compiler import define_options
from mlaflash.settings import compiler_override, settings

SUFFIX = ".so"
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    "-x",
    "c++",
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    # A kernel sees one memory through many types, as it may on a GPU.
    "-fno-strict-aliasing",
    # The same results whether or not the host has a fused multiply-add.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-pass-failed",
    "-DMLAFLASH_EMULATOR",
)

_log = logging.getLogger("mlaflash")
_state_lock = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}
_key_locks: dict[str, threading.Lock] = {}


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """A kernel that the host compiler has compiled.

    Parameters
    ----------
    payload : bytes
        The shared library.
    log : str
        Warnings; empty where there are none.
    seconds : float
        Time that the compiler took.
    """

    payload: bytes = field(repr=False)
    log: str
    seconds: float


def find_compiler() -> tuple[str, ...]:
    """Find the host's C++ compiler.

    Returns
    -------
    tuple of str
        The command: ``$CXX`` where it is set, with its own options, else the first of `COMPILERS`.

    Raises
    ------
    MissingDependencyError
        There is none.
    """
    configured = compiler_override()
    if configured is not None:
        try:
            command = tuple(shlex.split(configured))
        except ValueError:  # a quotation mark without its second
            command = ()
        if command and shutil.which(command[0]):
            return command
        raise MissingDependencyError(
            f"CXX is {configured!r}, which is no program that can be run. The emulator needs a C++17 compiler: "
            "unset CXX or name one; on Debian, apt-get install g++ (or clang) brings one."
        )
    for name in COMPILERS:
        if shutil.which(name):
            return (name,)
    raise MissingDependencyError(
        f"no C++ compiler was found: looked for CXX, {', '.join(COMPILERS)}. The emulator compiles the kernels for "
        "the CPU: on Debian, apt-get install g++ (or clang)."
    )


def source_path(kernel: str | Path) -> Path:
    """Return the file of a kernel.

    Parameters
    ----------
    kernel : str or Path
        Name of one of the library's kernels, or a path to any other ``.cu`` file.

    Raises
    ------
    UnsupportedError
        There is no such kernel.
    """
    if isinstance(kernel, Path):
        return kernel.resolve()
    path = sources.kernel_root() / f"{kernel}.cu"
    # `read` knows how to refuse a name.
    return path if path.is_file() else sources.read(kernel).path


def compile_library(kernel: str | Path, defines: Mapping[str, int], *, options: Sequence[str] = ()) -> CompiledLibrary:
    """Compile a kernel for the CPU, whatever caches hold.

    Parameters
    ----------
    kernel : str or Path
        Name of one of the library's kernels, or a path to any other ``.cu`` file.
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.
    options : sequence of str
        More options for the compiler.

    Returns
    -------
    CompiledLibrary

    Raises
    ------
    UnsupportedError
        The kernel is unknown.
    MissingDependencyError
        There is no C++ compiler.
    CompileError
        The compiler refused the source.
    """
    path = source_path(kernel)
    root = sources.kernel_root()
    arguments = (*find_compiler(), *_options(defines), *options)
    # Reports name files as a reader knows them, and the library does not depend on where the sources lie.
    named = [f"-fmacro-prefix-map={folder}={short}" for folder, short in ((path.parent, "."), (root, "kernels"))]
    started = time.perf_counter()
    with _scratch(), tempfile.TemporaryDirectory(prefix="mlaflash-") as folder:
        library = Path(folder) / f"kernel{SUFFIX}"
        result = _run([*arguments, *named, f"-I{root / 'include'}", "-o", str(library), str(path)])
        seconds = time.perf_counter() - started
        log = result.stdout + result.stderr
        if result.returncode or not library.is_file():
            raise CompileError(
                f"{arguments[0]} refused kernel {path.stem!r} (exit status {result.returncode}).",
                kernel=path.stem,
                defines=defines,
                arch="host",
                options=arguments,
                log=log,
                source_path=path,
            )
        return CompiledLibrary(library.read_bytes(), log, seconds)


def load_library(kernel: str | Path, defines: Mapping[str, int]) -> ctypes.CDLL:
    """Load a kernel's library; compile it unless this process or the cache on disk has it.

    Parameters
    ----------
    kernel : str or Path
        Name of one of the library's kernels, or a path to any other ``.cu`` file.
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.

    Returns
    -------
    ctypes.CDLL

    Raises
    ------
    UnsupportedError
        The kernel is unknown.
    MissingDependencyError
        There is no C++ compiler.
    CompileError
        The compiler refused the source.
    CacheMissError
        ``MLAFLASH_DISABLE_JIT`` is set and the library is not in the cache.
    InvalidArgumentError
        The cache folder is a file.
    """
    path = source_path(kernel)
    options = _options(defines)
    constants = "".join(f"-{name.lower()}{value}" for name, value in sorted(defines.items()))
    command = find_compiler()
    key = make_key(
        f"{path.stem}{constants}-host",
        {
            "kernel": path.stem,
            "sources": _digest(path),
            "options": options,
            "compiler": [*command, _version(command)],
            "machine": platform.machine(),
        },
    )
    with _state_lock:
        key_lock = _key_locks.setdefault(key, threading.Lock())
    with key_lock:
        if key not in _libraries:
            _libraries[key] = _load(key, path, kernel, defines)
        return _libraries[key]


def _load(key: str, path: Path, kernel: str | Path, defines: Mapping[str, int]) -> ctypes.CDLL:
    cache = open_cache(suffix=SUFFIX)
    info = {"kernel": path.stem, "defines": dict(defines), "arch": "host"}
    stored = cache.get(key) if cache else None
    if cache and stored is not None and stored[1] == info:
        try:
            return ctypes.CDLL(str(cache.payload_path(key)))
        except OSError as error:
            # Whole, and yet this machine cannot load it (another libc, a folder mounted noexec).
            _log.info("cannot load %s (%s)", cache.payload_path(key), error)
    if settings().disable_jit:
        raise CacheMissError(
            f"kernel {path.stem!r} for the emulator with {dict(defines)} is not in the cache "
            f"({cache.path if cache else 'which is switched off'}) and MLAFLASH_DISABLE_JIT forbids to compile it. "
            "Unset MLAFLASH_DISABLE_JIT."
        )
    _log.info("compiling %s for the emulator", key)
    compiled = compile_library(kernel, defines)
    _log.info("compiled %s for the emulator in %.2f s", key, compiled.seconds)
    if cache and cache.put(key, compiled.payload, info):
        try:
            return ctypes.CDLL(str(cache.payload_path(key)))
        except OSError as error:
            _log.info("cannot load %s (%s)", cache.payload_path(key), error)
    with _scratch(), tempfile.NamedTemporaryFile(prefix="mlaflash-", suffix=SUFFIX) as file:
        file.write(compiled.payload)
        file.flush()
        # The mapping outlives the name.
        return ctypes.CDLL(file.name)


@contextmanager
def _scratch() -> Iterator[None]:
    """Say what to do where the folder for temporary files does not do."""
    try:
        yield
    except OSError as error:
        raise MlaFlashError(
            f"the emulator cannot use the folder for temporary files: {error}. Make room there, or set TMPDIR to a "
            "folder that can be written and whose files can be executed."
        ) from error


def _options(defines: Mapping[str, int]) -> tuple[str, ...]:
    return (*OPTIONS, *define_options(defines))


def _digest(path: Path) -> str:
    root = sources.kernel_root()
    headers = [*sorted((root / "include").glob("*")), *sorted((root / "host").glob("*"))]
    digest = hashlib.sha256()
    for file in (path, *headers):
        for part in (file.name.encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    result = _run([*command, "--version"])
    return result.stdout + result.stderr


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise MissingDependencyError(
            f"the C++ compiler {command[0]!r} cannot be run: {error}. Set CXX to one that can, or unset it; on Debian, "
            "apt-get install g++ (or clang) brings one."
        ) from error
