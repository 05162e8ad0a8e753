"""The GPU's kernels on a CPU, every access checked: a correctness tool, not a fast path."""

from mlaflash.emulator.distributed import (
    HostCommunicator,
    ShardedPlan,
    SharedMemory,
    correct_partial,
    merge_partials,
    shard_mask,
)
from mlaflash.emulator.kv import move_rows, plan_compact
from mlaflash.emulator.mask import pack_mask
from mlaflash.emulator.plan import VerifyPlan
from mlaflash.emulator.run import Report, run_kernel
from mlaflash.emulator.verify import mla_sparse, mla_verify

__all__ = [
    "HostCommunicator",
    "Report",
    "ShardedPlan",
    "SharedMemory",
    "VerifyPlan",
    "correct_partial",
    "merge_partials",
    "mla_sparse",
    "mla_verify",
    "move_rows",
    "pack_mask",
    "plan_compact",
    "run_kernel",
    "shard_mask",
]
