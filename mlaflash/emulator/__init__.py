"""The GPU's kernels on a CPU, every access checked: a correctness tool, not a fast path."""

from mlaflash.emulator.run import Report, run_kernel
from mlaflash.emulator.verify import mla_sparse, mla_verify

__all__ = ["Report", "mla_sparse", "mla_verify", "run_kernel"]
