"""Context parallelism: a KV cache whose tokens are spread over GPUs, without torch.

`ShardedPlan` is a whole step on `NcclCommunicator`. Engines that communicate by themselves take its parts:
`shard_mask` and `shard_lens` for the local call, then `merge_partials` behind an all-gather, or `correct_partial`
before a reduce-scatter.
"""

from mlaflash.distributed.communicator import Communicator, NcclCommunicator
from mlaflash.distributed.masking import ShardMask, shard_mask
from mlaflash.distributed.merging import correct_partial, merge_partials
from mlaflash.distributed.plan import ShardedPlan
from mlaflash.sharding import Contiguous, Interleaved, shard_lens

__all__ = [
    "Communicator",
    "Contiguous",
    "Interleaved",
    "NcclCommunicator",
    "ShardMask",
    "ShardedPlan",
    "correct_partial",
    "merge_partials",
    "shard_lens",
    "shard_mask",
]
