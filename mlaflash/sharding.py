"""Which rank holds which tokens of a KV cache that is spread over several GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlaflash.checks import integer
from mlaflash.errors import InvalidArgumentError, ShapeError

_MOST = 2**31


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Tokens are dealt out in turn: token i lies on rank ``i // interleave % num_ranks``.

    As in vLLM's decode context parallelism, whose ``cp_kv_cache_interleave_size`` is `interleave`. A page of the cache
    holds tokens of one rank alone, in their order; with `interleave` the page size, whole pages are dealt out.

    Parameters
    ----------
    num_ranks : int
        GPUs that hold the cache.
    interleave : int
        Tokens in a row on one rank.

    Raises
    ------
    InvalidArgumentError
        A number below 1, or a product of both that int32 does not hold.
    """

    num_ranks: int
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check both numbers."""
        for name in ("num_ranks", "interleave"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.num_ranks * self.interleave >= _MOST:
            raise InvalidArgumentError(
                f"num_ranks is {self.num_ranks} and interleave {self.interleave}; their product must be below {_MOST}."
            )

    def most_tokens(self, kv_len: int) -> int:
        """Return the most tokens that any rank holds of a request of `kv_len` tokens or fewer.

        Parameters
        ----------
        kv_len : int
        """
        cycles, rest = divmod(kv_len, self.num_ranks * self.interleave)
        return cycles * self.interleave + min(rest, self.interleave)


@dataclass(frozen=True, slots=True, eq=False)
class Contiguous:
    """Each rank holds one run of tokens: rank r those from ``begins[r]`` to ``begins[r + 1]``, the last one the rest.

    Parameters
    ----------
    begins : array, shape (N,) or (B, N), int32
        First token of each rank, for all requests or for each: rising from 0. Runs may be empty. On the GPU it is read
        by the kernels, and again at each replay of a graph.

    Raises
    ------
    ShapeError
        Rank or element type of the array.
    """

    begins: Any

    def __post_init__(self) -> None:
        """Check shape and element type; no value is read."""
        shape, dtype = tuple(getattr(self.begins, "shape", ())), getattr(self.begins, "dtype", None)
        if len(shape) not in (1, 2) or not shape[-1] or str(dtype).rpartition(".")[2] != "int32":
            raise ShapeError(f"begins is {dtype} {shape}; it must be int32, (ranks,) or (requests, ranks).")

    @property
    def num_ranks(self) -> int:
        """GPUs that hold the cache."""
        return int(self.begins.shape[-1])

    def most_tokens(self, kv_len: int) -> int:
        """Return the most tokens that any rank can hold of a request of `kv_len` tokens: all of them.

        Parameters
        ----------
        kv_len : int
        """
        return kv_len


Sharding = Interleaved | Contiguous


def check_rank(sharding: Sharding, rank: Any) -> int:
    """Return the number of a rank.

    Parameters
    ----------
    sharding : Interleaved or Contiguous
    rank : int

    Raises
    ------
    InvalidArgumentError
        There is no such rank, or `sharding` is something else.
    """
    if not isinstance(sharding, Interleaved | Contiguous):
        raise InvalidArgumentError(f"sharding is {sharding!r}; it must be Interleaved or Contiguous.")
    number = integer("rank", rank, 0)
    if number >= sharding.num_ranks:
        raise InvalidArgumentError(f"rank is {number}; the ranks of this sharding are 0 .. {sharding.num_ranks - 1}.")
    return number


def shard_lens(kv_lens: Any, sharding: Sharding, rank: int) -> Any:
    """Count the tokens of each request that lie on a rank.

    Parameters
    ----------
    kv_lens : array, shape (B,), int32 or int64
        Tokens of each request on all ranks; of NumPy, CuPy or torch.
    sharding : Interleaved or Contiguous
    rank : int

    Returns
    -------
    array, shape (B,), as `kv_lens`
        The `kv_lens` of the local call; its page table lists the pages of this rank alone. Made by a few small
        operations of the array's own library: `shard_mask` and `ShardedPlan` do it in the kernel that packs the mask.

    Raises
    ------
    InvalidArgumentError
        There is no such rank.
    ShapeError
        Rank or element type of `kv_lens`.
    """
    rank = check_rank(sharding, rank)
    dtype = str(getattr(kv_lens, "dtype", None)).rpartition(".")[2]
    if dtype not in ("int32", "int64") or len(kv_lens.shape) != 1:
        raise ShapeError(
            f"kv_lens is {dtype} {tuple(getattr(kv_lens, 'shape', ()))}; it must be int32 or int64, (requests,)."
        )
    if isinstance(sharding, Interleaved):
        interleave, cycle = sharding.interleave, sharding.num_ranks * sharding.interleave
        return kv_lens // cycle * interleave + (kv_lens % cycle - rank * interleave).clip(0, interleave)
    before = kv_lens.clip(None, sharding.begins[..., rank])
    if rank + 1 == sharding.num_ranks:
        return kv_lens - before
    return kv_lens.clip(None, sharding.begins[..., rank + 1]) - before
