"""Lists of moves that overlap in every way, and what they must come to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ids = tuple[Array, Array]

NAMES = ("shift_up", "shift_down", "shift_by_many", "swaps", "cycles_of_three", "one_cycle", "reversal", "fan", "apart")


def ids(name: str, size: int, rng: np.random.Generator) -> Ids:
    """Return src and dst of `size` moves between slots 0 .. 2 * size."""
    order = np.arange(size)
    if name == "shift_up":
        return order, order + 1
    if name == "shift_down":
        return order + 1, order
    if name == "shift_by_many":
        return order, order + max(size // 3, 1)
    if name == "swaps":
        return order, order ^ 1 if size % 2 == 0 else np.roll(order, 1)
    if name == "cycles_of_three":
        size -= size % 3
        cycles = rng.permutation(2 * order.size)[:size].reshape(-1, 3)
        return cycles.reshape(-1), np.roll(cycles, 1, 1).reshape(-1)
    if name == "one_cycle":
        ring = rng.permutation(2 * size)[:size]
        return ring, np.roll(ring, 1)
    if name == "reversal":
        return order, order[::-1].copy()
    if name == "fan":  # few sources, which are written too
        return rng.integers(0, max(size // 4, 1), size), rng.permutation(size)
    mixed = rng.permutation(2 * size)
    return mixed[:size], mixed[size:]


def random_layers(shape: Sequence[int], count: int, rng: np.random.Generator, dtype: Any = np.uint8) -> list[Array]:
    """Return layers of random bits, NaN included."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return [rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape) for _ in range(count)]


def moved(layer: Array, src: Array, dst: Array) -> Array:
    """Read all rows, then write them; entries with -1 move nothing."""
    live = (src >= 0) & (dst >= 0)
    rows = layer[src[live]]
    result = layer.copy()
    result[dst[live]] = rows
    return result


def compaction(
    out_slots: Array, accept_index: Array, accept_lens: Array | None, bounds: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Return each request's moves, slot by slot."""
    requests = []
    for b, path in enumerate(accept_index.tolist()):
        length = len(path) if accept_lens is None else accept_lens[b]
        begin, stop = bounds[b], bounds[b + 1]
        pairs = []
        for j, index in enumerate(path):
            kept = j < length and begin + j < index < stop
            pairs.append((int(out_slots[index]), int(out_slots[begin + j])) if kept else (-1, -1))
        requests.append(pairs)
    return requests
