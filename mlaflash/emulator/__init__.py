"""The GPU's kernels on a CPU, every access checked: a correctness tool, not a fast path."""

from mlaflash.emulator.mask import pack_mask
from mlaflash.emulator.plan import VerifyPlan
from mlaflash.emulator.run import Report, run_kernel
from mlaflash.emulator.verify import mla_verify

__all__ = ["Report", "VerifyPlan", "mla_verify", "pack_mask", "run_kernel"]
