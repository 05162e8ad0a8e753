"""Speculative decoding held against plain decoding, token by token: chains, trees, compaction and defragmentation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash import kv, spec
from mlaflash.lab.compare import finite_only
from mlaflash.lab.model import Model, ModelConfig, oracle_logits
from mlaflash.masks import TreeMask
from mlaflash.params import D, numpy_dtype

Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]

CHAIN: Final = (-1, 0, 1, 2)
TREE: Final = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
DRAFTS: Final = {"plain": (-1,), "chain": CHAIN, "tree": TREE}
"""Each draft token's parent, by the way to decode."""
DTYPES: Final = ("float32", "bfloat16")
DEFRAG_STEPS: Final = 16
LOGIT_ERRORS: Final = {"float32": 5e-5, "bfloat16": 0.05, "float16": 0.01}
"""How far a logit, whose standard deviation is about 2, may be from the oracle's."""

_RIGHT = (0.6, 0.25)  # how often a token's first draft is right, and its second one
_ALIGN = 16
_SCATTER = 4  # free slots for each that is taken
_ROOM = 2  # slots of the pool for each that is needed at most


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernels run.

    Attributes
    ----------
    name : str
    xp : module
        ``numpy`` or ``cupy``.
    verify, plan_compact, move_rows : callable
    wait : callable
        Returns when the work that was enqueued is done.
    is_timed : bool
        Whether seconds mean anything.
    """

    name: str
    xp: Any
    verify: Callable[..., Any]
    plan_compact: Callable[..., kv.Moves]
    move_rows: Callable[..., None]
    wait: Callable[[], object]
    is_timed: bool


SMALL: Final = ModelConfig(layers=2, heads=2, hidden=64, vocab=64)
"""A model for the emulator."""


def emulator_place() -> Place:
    """Give the emulator."""
    from mlaflash import emulator

    return Place("emulator", np, emulator.mla_verify, emulator.plan_compact, emulator.move_rows, lambda: None, False)


def gpu_place() -> Place:
    """Give CuPy's current GPU."""
    import cupy

    from mlaflash.attention import mla_verify

    wait = cupy.cuda.get_current_stream().synchronize
    return Place("gpu", cupy, mla_verify, kv.plan_compact, kv.move_rows, wait, True)


def settings_for(kind: str) -> tuple[Place, ModelConfig, int, int, int]:
    """Choose how much to decode where.

    Parameters
    ----------
    kind : {"gpu", "emulator"}

    Returns
    -------
    place : Place
    config : ModelConfig
    requests, count, defrag_steps : int
        As in `check_tokens`.
    """
    if kind == "gpu":
        return gpu_place(), ModelConfig(), 20, 200, DEFRAG_STEPS
    return emulator_place(), SMALL, 2, 24, DEFRAG_STEPS // 4


@dataclass(frozen=True, slots=True)
class Generation:
    """What was decoded.

    Attributes
    ----------
    tokens : numpy.ndarray, shape (B, count)
    logits : numpy.ndarray, shape (B, count, vocab), float32
        That each token is the largest of.
    steps : int
        Calls of the model behind the prompt.
    accepted : float
        Tokens of a request and step.
    seconds : float
    moved : int
        Rows that defragmentation moved, in each layer.
    """

    tokens: Array
    logits: Array
    steps: int
    accepted: float
    seconds: float
    moved: int


class Decoder:
    """A model with a paged cache of one token a page, from which several requests decode side by side.

    Parameters
    ----------
    place : Place
    model : Model
        On the same arrays.
    batch : int
        Requests.
    deterministic : bool
        As in `mlaflash.mla_verify`.
    seed : int
        Of the order in which slots are handed out.
    defrag_steps : int
        Steps from one defragmentation to the next.
    """

    def __init__(
        self, place: Place, model: Model, batch: int, *, deterministic: bool, seed: int, defrag_steps: int
    ) -> None:
        config = model.config
        self._defrag_steps = defrag_steps
        self._place, self._model, self._batch = place, model, batch
        self._deterministic = deterministic
        self._rng = np.random.default_rng(seed)
        self._num_rows = batch * max(map(len, DRAFTS.values()))  # of every call, so that products have one shape
        width = -(-config.max_tokens // _ALIGN) * _ALIGN
        self._num_slots = _ALIGN * (1 + _ROOM * batch * width // _ALIGN)  # slot 0 takes what padding writes
        # NaN: a row that nobody wrote cannot pass for one of the request.
        bits = np.full((self._num_slots, D), np.nan, numpy_dtype(config.dtype))
        self._layers = [place.xp.array(bits) for _ in range(config.layers)]
        self._table = np.full((batch, width), -1, np.int32)
        self._lens = np.zeros(batch, np.int64)

    def decode(
        self, prompts: Array, count: int, parents: Sequence[int], draft: Callable[[int, int, int], Array] | None = None
    ) -> Generation:
        """Decode `count` tokens behind each prompt, greedily.

        Parameters
        ----------
        prompts : numpy.ndarray, shape (B, tokens)
        count : int
        parents : sequence of int
            Of the draft tokens of a step; ``(-1,)`` decodes plainly.
        draft : callable, optional
            Of a request, the number of its tokens decoded so far and its root: gives the step's tokens.

        Returns
        -------
        Generation
        """
        for begin in range(0, prompts.shape[1] - 1, len(TREE)):
            self._prefill(prompts[:, begin : min(begin + len(TREE), prompts.shape[1] - 1)])
        roots = prompts[:, -1].astype(np.int64)
        tokens: list[list[int]] = [[] for _ in range(self._batch)]
        logits: list[list[Array]] = [[] for _ in range(self._batch)]
        steps, turns, moved, seconds = 0, 0, 0, 0.0
        while live := [b for b in range(self._batch) if len(tokens[b]) < count]:
            drafts = np.array([[roots[b]] if draft is None else draft(b, len(tokens[b]), roots[b]) for b in live])
            self._place.wait()
            begin_seconds = time.perf_counter()
            paths, found, behind = self._step(live, drafts, parents)
            steps, turns = steps + 1, turns + len(live)
            if steps % self._defrag_steps == 0:
                moved += self._defragment()
            self._place.wait()
            seconds += time.perf_counter() - begin_seconds
            behind = _to_host(behind)
            for b, path in zip(live, paths, strict=True):
                tokens[b] += found[path].tolist()
                logits[b] += list(behind[path])
                roots[b] = tokens[b][-1]
        kept = sum(len(own) for own in tokens)
        stacked = np.array([own[:count] for own in logits])
        return Generation(np.array([own[:count] for own in tokens]), stacked, steps, kept / turns, seconds, moved)

    def _prefill(self, tokens: Array) -> None:
        live = list(range(self._batch))
        self._forward(live, tokens, range(tokens.shape[1]), "causal")
        self._lens += tokens.shape[1]

    def _step(self, live: list[int], drafts: Array, parents: Sequence[int]) -> tuple[list[Array], Array, Any]:
        """Verify a draft of each live request and keep what is right: its rows of the call, the tokens, the logits."""
        xp, size = self._place.xp, len(parents)
        is_chain = list(parents) == list(range(-1, size - 1))
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        mask: Any = "causal"
        if not is_chain:
            words = TreeMask.from_parents(np.tile(np.array(parents), (len(live), 1))).words
            padded = np.zeros((self._num_rows, words.shape[1]), np.uint32)
            padded[: len(words)] = words
            mask = TreeMask.from_packed(xp.asarray(padded), size)
        windows, behind = self._forward(live, drafts, depths, mask)
        target = behind.argmax(axis=-1)
        drafted = xp.asarray(drafts)
        trees = xp.asarray(np.tile(np.array(parents), (len(live), 1)))
        accepted = spec.accept_greedy(
            drafted, target[: drafted.size].reshape(drafted.shape), parents=trees, depth=max(depths)
        )
        moves = self._place.plan_compact(xp.asarray(windows.reshape(-1)), accepted.accept_index, accepted.accept_lens)
        self._place.move_rows(self._layers, *moves)
        index, lens, found = (_to_host(array) for array in (accepted.accept_index, accepted.accept_lens, target))
        paths = [row[:length] for row, length in zip(index, lens, strict=True)]
        for b, length in zip(live, lens, strict=True):
            self._lens[b] += length
            self._table[b, self._lens[b] :] = -1
        return paths, found, behind

    def _forward(self, live: list[int], tokens: Array, depths: Sequence[int], mask: Any) -> tuple[Array, Any]:
        """Run the model on the new tokens of the live requests; give their slots, and the logits of all rows."""
        xp, size = self._place.xp, tokens.shape[1]
        free = np.setdiff1d(np.arange(1, self._num_slots), self._table)
        # Scattered, but not all over the pool: defragmentation needs runs that are free.
        nearest = free[: _SCATTER * len(live) * size]
        windows = self._rng.choice(nearest, (len(live), size), replace=False).astype(np.int32)
        for b, window in zip(live, windows, strict=True):
            self._table[b, self._lens[b] : self._lens[b] + size] = window
        counts = np.zeros(self._batch, np.int64)
        counts[live] = size
        positions = self._lens[live][:, None] + np.array(depths)
        flat_tokens, flat_positions, slots = (xp.asarray(self._padded(array)) for array in (tokens, positions, windows))
        arguments: dict[str, Any] = {
            "kv_lens": xp.asarray(np.where(counts > 0, self._lens + counts, 0).astype(np.int32)),
            "qo_indptr": xp.asarray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            "block_table": xp.asarray(self._table),
        }

        def attend(layer: int, q: Any, rows: Any) -> Any:
            cache = self._layers[layer]
            bits = np.uint16 if cache.itemsize == 2 else np.uint32
            cache.view(bits)[slots] = rows.view(bits)
            out, _ = self._place.verify(
                q,
                cache,
                sm_scale=self._model.config.sm_scale,
                mask=mask,
                out_dtype="float32",
                max_q_len=size,
                deterministic=self._deterministic,
                validate=False,
                **arguments,
            )
            return out

        return windows, self._model.logits(flat_tokens, flat_positions, attend)

    def _padded(self, array: Array) -> Array:
        """Lay the values of the live requests before zeros: token 0, place 0, slot 0."""
        rows = np.zeros(self._num_rows, np.int64)
        rows[: array.size] = array.reshape(-1)
        return rows

    def _defragment(self) -> int:
        """Lay all requests into aligned runs of free slots; tell how many rows of a layer moved."""
        xp = self._place.xp
        used = np.zeros(self._num_slots + 2, np.int8)
        used[[0, 1, -1]] = 1  # shifted by one: a border before the first slot, slot 0, a border behind the last one
        used[self._table[self._table >= 0] + 1] = 1
        edges = np.flatnonzero(np.diff(used))
        runs = np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.int32)
        table = xp.asarray(self._table)
        # Rows of the table begin at multiples of the blocks, whose empty places are -1.
        moves, remap = kv.plan_defrag(table.reshape(-1), xp.asarray(runs), num_slots=self._num_slots, align=_ALIGN)
        self._place.move_rows(self._layers, *moves)
        self._table = _to_host(kv.apply_remap(table, remap))
        return int((_to_host(moves.src) >= 0).sum())


class NoisyDrafter:
    """Drafts the tokens that plain decoding gave, but for errors.

    Parameters
    ----------
    tokens : numpy.ndarray, shape (B, count)
        From plain decoding.
    parents : sequence of int
    vocab : int
    seed : int
    """

    def __init__(self, tokens: Array, parents: Sequence[int], vocab: int, seed: int) -> None:
        self._tokens, self._parents, self._vocab = tokens, parents, vocab
        self._rng = np.random.default_rng(seed)

    def __call__(self, request: int, decoded: int, root: int) -> Array:
        """Draft behind `root`, the last of so many tokens of a request."""
        drafts = self._rng.integers(0, self._vocab, len(self._parents))
        drafts[0] = root
        at, right = 0, self._tokens[request, decoded:]
        for token in right:
            children = [i for i, parent in enumerate(self._parents) if parent == at]
            chosen = int(np.searchsorted(np.cumsum(_RIGHT), self._rng.random()))
            if chosen >= len(children):
                break
            at = children[chosen]
            drafts[at] = token
        return drafts


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a sequence first leaves that of plain decoding.

    Attributes
    ----------
    request, index : int
    gap : float
        Between the oracle's two largest logits there.
    """

    request: int
    index: int
    gap: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of decoding, held against plain decoding and against the oracle.

    Attributes
    ----------
    decoding : str
        Of `DRAFTS`.
    dtype : str
    deterministic : bool
    requests, steps : int
    accepted : float
        Tokens of a request and step.
    seconds : float
    plain_steps, plain_seconds
        Of plain decoding.
    moved : int
        Rows of a layer that defragmentation moved.
    difference : float
        The farthest that a logit is from plain decoding's, where the tokens before are the same; 0: the same bits.
    logit_error : float
        The farthest that a logit is from the oracle's.
    bound : float
        The farthest allowed, twice: two logits that are farther apart keep their order.
    divergences : tuple of Divergence
    """

    decoding: str
    dtype: str
    deterministic: bool
    requests: int
    steps: int
    accepted: float
    seconds: float
    plain_steps: int
    plain_seconds: float
    moved: int
    difference: float
    logit_error: float
    bound: float
    divergences: tuple[Divergence, ...]

    @property
    def failure(self) -> str:
        """Say what is wrong; empty where nothing is."""
        if not 2 * self.logit_error <= self.bound:
            return f"a logit is {self.logit_error:.2e} from the oracle's, more than {self.bound / 2:.0e}"
        if self.deterministic and self.divergences:
            first = self.divergences[0]
            return f"request {first.request} leaves plain decoding at token {first.index} (gap {first.gap:.2e})"
        if self.deterministic and self.decoding == "chain" and self.difference:
            return "the tokens are those of plain decoding, the bits of the logits are not"
        wide = [divergence for divergence in self.divergences if not divergence.gap <= self.bound]
        if wide:
            return f"request {wide[0].request} leaves plain decoding at token {wide[0].index}, gap {wide[0].gap:.2e}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; a number that is not finite is None."""
        return finite_only(asdict(self)) | {"passed": not self.failure, "failure": self.failure}

    @property
    def widest_gap(self) -> float:
        """The widest gap at which a sequence left plain decoding; 0 where none did."""
        return max((divergence.gap for divergence in self.divergences), default=0.0)


def check_tokens(
    place: Place,
    config: ModelConfig,
    *,
    requests: int,
    count: int,
    prompt_tokens: int = 12,
    deterministic: bool = True,
    seed: int = 0,
    defrag_steps: int = DEFRAG_STEPS,
    progress: Progress = lambda what, done, total: None,
) -> Iterator[Outcome]:
    """Decode the same prompts plainly, by chains and by trees.

    Parameters
    ----------
    place : Place
    config : ModelConfig
        `max_tokens` is replaced by what is needed.
    requests : int
        Prompts, each drawn from a seed of its own.
    count : int
        Tokens to decode behind each.
    prompt_tokens : int
        At least 2.
    deterministic : bool
        As in `mlaflash.mla_verify`.
    seed : int
        Of the first prompt.
    defrag_steps : int
        Steps from one defragmentation to the next.
    progress : callable
        Told what is done, how much of it, and of how much.

    Returns
    -------
    iterator of Outcome
        In the order of `DRAFTS`.

    Notes
    -----
    A row of a chain sees the same tokens at the same places as a decode step does: with `deterministic` its logits are
    bitwise the same. A row of a tree sees them at other places, with gaps between, so that sums are rounded otherwise:
    its tokens are the same unless the two largest logits are closer than such a difference.
    """
    longest = max(map(len, DRAFTS.values()))
    config = replace(config, max_tokens=prompt_tokens + count + 2 * longest)
    model = Model(config, place.xp)
    prompts = np.stack(
        [np.random.default_rng(seed + b).integers(0, config.vocab, prompt_tokens) for b in range(requests)]
    )

    def run(decoding: str, reference: Array | None, tokens: int) -> Generation:
        parents = DRAFTS[decoding]
        drafter = None if reference is None else NoisyDrafter(reference, parents, config.vocab, seed)
        decoder = Decoder(place, model, requests, deterministic=deterministic, seed=seed, defrag_steps=defrag_steps)
        return decoder.decode(prompts, tokens, parents, drafter)

    plain: Generation | None = None
    for done, decoding in enumerate(DRAFTS):
        progress(f"decoding on the {place.name}", done, len(DRAFTS))
        reference = None if plain is None else plain.tokens
        if place.is_timed:
            run(decoding, reference, min(count, 2))  # compiles, loads, allocates
        found = run(decoding, reference, count)
        plain = found if plain is None else plain
        errors, differences, divergences = [], [], []
        for b in range(requests):
            sequence = np.concatenate([prompts[b], found.tokens[b, :-1]]).astype(np.int64)
            expected = _expected(config, sequence.tobytes())[prompt_tokens - 1 :]
            errors.append(np.abs(found.logits[b] - expected).max())
            differs = np.flatnonzero(found.tokens[b] != plain.tokens[b])
            common = slice(int(differs[0]) + 1 if differs.size else count)
            differences.append(np.abs(found.logits[b, common] - plain.logits[b, common]).max())
            if differs.size:
                best = np.sort(expected[differs[0]])[-2:]
                divergences.append(Divergence(b, int(differs[0]), float(best[1] - best[0])))
        yield Outcome(
            decoding=decoding,
            dtype=config.dtype,
            deterministic=deterministic,
            requests=requests,
            steps=found.steps,
            accepted=found.accepted,
            seconds=found.seconds,
            plain_steps=plain.steps,
            plain_seconds=plain.seconds,
            moved=found.moved,
            # NumPy's maximum keeps NaN.
            difference=float(np.max(differences)),
            logit_error=float(np.max(errors)),
            bound=2 * LOGIT_ERRORS[config.dtype],
            divergences=tuple(divergences),
        )


@functools.lru_cache(maxsize=128)
def _expected(config: ModelConfig, sequence: bytes) -> Array:
    """Ask the oracle once for a sequence, which several ways to decode should give."""
    return oracle_logits(config, np.frombuffer(sequence, np.int64))


def _to_host(array: Any) -> Array:
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())
