"""Compile once: this process's memory first, then the cache on disk, then NVRTC."""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlaflash.errors import CacheMissError
from mlaflash.jit import sources
from mlaflash.jit.cache import CubinCache, make_key, open_cache
from mlaflash.jit.compiler import CompiledKernel, compile_options, compile_sources, nvrtc_version
from mlaflash.params import DTYPE_CODES
from mlaflash.settings import settings

MAX_COMPILERS = 8

_log = logging.getLogger("mlaflash")


@dataclass(frozen=True, slots=True)
class Stats:
    """What this process had to do for the kernels it asked for.

    Parameters
    ----------
    compiled : int
        Kernels that NVRTC compiled.
    disk_hits : int
        Kernels read from the cache on disk.
    memory_hits : int
        Kernels that this process had in memory.
    nvrtc_seconds : float
        Time spent in NVRTC.
    """

    compiled: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    nvrtc_seconds: float = 0.0


class _Counters:
    """Mutable twin of `Stats`: a launch adds to it, so it must be cheap."""

    def __init__(self) -> None:
        self.compiled = 0
        self.disk_hits = 0
        self.memory_hits = 0
        self.nvrtc_seconds = 0.0


counters = _Counters()
_state_lock = threading.Lock()
_compiled: dict[str, CompiledKernel] = {}
_key_locks: dict[str, threading.Lock] = {}


def stats() -> Stats:
    """Tell what this process has compiled and found so far."""
    return Stats(**vars(counters))


def compiler_threads() -> int:
    """Compilations that run side by side."""
    return min(os.cpu_count() or 1, MAX_COMPILERS)


def compile_cached(
    kernel: str,
    defines: Mapping[str, int],
    arch: str,
    *,
    lineinfo: bool | None = None,
    ahead_of_time: bool = False,
) -> CompiledKernel:
    """Compile a kernel unless this process or the cache on disk has it; needs no GPU.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.
    arch : str
        Such as ``"sm_120"``.
    lineinfo : bool or None
        Whether the cubin carries line tables for profilers; None asks ``MLAFLASH_JIT_LINEINFO``.
    ahead_of_time : bool
        Whether compiling is what the caller is there for, so that ``MLAFLASH_DISABLE_JIT`` does not count.

    Returns
    -------
    CompiledKernel
        With `cached` set and `seconds` 0 where NVRTC was not called.

    Raises
    ------
    UnsupportedError
        The kernel or the architecture is unknown.
    MissingDependencyError
        CuPy or NVRTC is not installed.
    CompileError
        NVRTC refused the source.
    CacheMissError
        ``MLAFLASH_DISABLE_JIT`` is set and the kernel is not in the cache.
    InvalidArgumentError
        The cache folder is a file.
    """
    configured = settings()
    source_set = sources.read(kernel)
    options = compile_options(defines, arch, lineinfo=configured.lineinfo if lineinfo is None else lineinfo)
    constants = "".join(f"-{name.lower()}{value}" for name, value in sorted(defines.items()))
    key = make_key(
        f"{kernel}{constants}-{arch}",
        {
            "kernel": kernel,
            "sources": source_set.digest,
            "options": options,
            "nvrtc": nvrtc_version(),
        },
    )
    with _state_lock:
        key_lock = _key_locks.setdefault(key, threading.Lock())
    # Threads that want the same kernel wait for one compilation; different kernels compile side by
    # side.
    with key_lock:
        if key in _compiled:
            counters.memory_hits += 1
            return replace(_compiled[key], cached=True, seconds=0.0)
        cache = open_cache()
        stored = cache.get(key) if cache else None
        compiled = (
            _from_record(*stored, asked={"kernel": kernel, "arch": arch, "defines": dict(defines)}) if stored else None
        )
        if compiled is not None:
            with _state_lock:
                counters.disk_hits += 1
        elif configured.disable_jit and not ahead_of_time:
            raise CacheMissError(
                f"kernel {kernel!r} for {arch} with {dict(defines)} is not in the cache "
                f"({_state(cache)}) and MLAFLASH_DISABLE_JIT "
                f"forbids to compile it. Fill the cache with: {_filling(defines, arch)}; for tiles that a call or a "
                "plan names, make it once without MLAFLASH_DISABLE_JIT."
            )
        else:
            _log.info("compiling %s%s for %s", kernel, constants, arch)
            compiled = compile_sources(source_set, defines, arch, lineinfo="-lineinfo" in options)
            _log.info(
                "compiled %s%s for %s in %.2f s: %d registers, %d bytes of spills",
                kernel,
                constants,
                arch,
                compiled.seconds,
                compiled.registers,
                compiled.spill_bytes,
            )
            with _state_lock:
                counters.compiled += 1
                counters.nvrtc_seconds += compiled.seconds
            if cache:
                cache.put(key, compiled.cubin, _to_record(compiled, options))
        _compiled[key] = compiled
    return compiled


def _state(cache: CubinCache | None) -> str:
    """Say where the cache is, or why there is none."""
    if cache is None:
        return "which is switched off"
    reason = cache.refusal()
    return str(cache.path) if reason is None else f"{cache.path}, which is not used because {reason}"


def _filling(defines: Mapping[str, int], arch: str) -> str:
    """Spell the command that compiles a kernel beforehand."""
    if "PLANNED_ROWS" in defines:
        return f"mlaflash compile --plan --arch {arch} with what the plan is made for (--heads, --kv-len, ...)"
    names = {code: name for name, code in DTYPE_CODES.items()}
    out = defines.get("OUT_DTYPE", -1)
    # Outputs in the type of q, and in float32, are compiled unasked.
    asked = out in names and out not in (defines.get("Q_DTYPE"), DTYPE_CODES["float32"])
    command = f"mlaflash compile --arch {arch}" + (f" --out-dtype {names[out]}" if asked else "")
    return f"{command} (which compiles what calls choose by themselves)"


_RECORDED = (
    "kernel",
    "arch",
    "registers",
    "spill_bytes",
    "stack_bytes",
    "static_shared_bytes",
    "log",
    "nvrtc_version",
)


def _to_record(compiled: CompiledKernel, options: tuple[str, ...]) -> dict[str, Any]:
    return {
        **{name: getattr(compiled, name) for name in _RECORDED},
        "defines": dict(compiled.defines),
        "options": list(options),
        "seconds": compiled.seconds,
    }


def _from_record(cubin: bytes, record: Mapping[str, Any], asked: Mapping[str, Any]) -> CompiledKernel | None:
    """Rebuild a kernel from the cache; None where the record lacks something, or is another kernel's."""
    if not {*_RECORDED, "defines"} <= record.keys() or any(record[name] != value for name, value in asked.items()):
        return None
    return CompiledKernel(
        **{name: record[name] for name in _RECORDED},
        defines=record["defines"],
        cubin=cubin,
        seconds=0.0,
        cached=True,
    )
