"""Compile kernels without a GPU, keep them, and launch them on one."""

from mlaflash.jit.cached import Stats, compile_cached, compiler_threads, stats
from mlaflash.jit.compiler import CompiledKernel, compile_kernel
from mlaflash.jit.kernel import Kernel, load

__all__ = [
    "CompiledKernel",
    "Kernel",
    "Stats",
    "compile_cached",
    "compile_kernel",
    "compiler_threads",
    "load",
    "stats",
]
