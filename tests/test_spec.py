"""Acceptance: greedy against a plain walk, and random against the distribution that it must leave unchanged."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflash import emulator, spec
from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.lab.fuzz import greedy_walk
from mlaflash.mask_formats import parents_to_retrieve

Array = npt.NDArray[Any]
some = settings(max_examples=200, deadline=None)

CHAIN = [-1, 0, 1, 2]
FORK = [-1, 0, 0, 0]
TREE = [-1, 0, 0, 1, 1, 2, 2, 3]


def random_parents(batch: int, size: int, rng: np.random.Generator) -> Array:
    parents = np.full((batch, size), -1)
    for i in range(1, size):
        parents[:, i] = rng.integers(0, i, batch)
    return parents


# --- greedy ----------------------------------------------------------------------------------------------------------


@some
@given(
    batch=st.integers(0, 4),
    size=st.integers(1, 12),
    vocabulary=st.integers(1, 3),
    depth=st.one_of(st.none(), st.integers(0, 12)),
    form=st.sampled_from(["parents", "retrieve", "chain"]),
    seed=st.integers(0, 2**16),
)
def test_greedy_is_a_walk_along_the_targets_choices(
    batch: int, size: int, vocabulary: int, depth: int | None, form: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    draft, target = (rng.integers(0, vocabulary, (batch, size)).astype(np.int32) for _ in range(2))
    parents = np.broadcast_to(np.arange(-1, size - 1), (batch, size)) if form == "chain" else None
    keywords: dict[str, Any] = {}
    if parents is None:
        parents = random_parents(batch, size, rng)
        keywords = {"parents": parents.astype(np.int32)}
        if form == "retrieve":
            keywords = dict(zip(("next_token", "next_sibling"), parents_to_retrieve(parents), strict=True))
    result = spec.accept_greedy(draft, target, depth=depth, **keywords)
    most = size - 1 if depth is None else min(depth, size - 1)
    assert result.accept_index.shape == (batch, most + 1)
    for b in range(batch):
        path, bonus = greedy_walk(draft[b].tolist(), target[b].tolist(), parents[b].tolist(), most)
        padded = [b * size + i for i in path] + [-1] * (most + 1 - len(path))
        assert result.accept_index[b].tolist() == padded
        assert (result.accept_lens[b], result.bonus[b]) == (len(path), bonus)


def test_links_may_name_siblings_in_any_order() -> None:
    child, sibling = np.array([[3, -1, -1, 4, -1]]), np.array([[-1, 2, -1, 1, -1]])  # 0 > 3, 1, 2; 3 > 4
    draft, target = np.array([[9, 1, 2, 3, 4]]), np.array([[2, 0, 7, 0, 0]])
    result = spec.accept_greedy(draft, target, next_token=child, next_sibling=sibling)
    assert (result.accept_index[0, :3].tolist(), result.bonus.tolist()) == ([0, 2, -1], [7])


def test_tokens_that_pad_are_never_kept() -> None:
    parents = np.array([[-1, 0, -1, -1]])
    draft, target = np.array([[5, 6, 6, 6]]), np.full((1, 4), 6)
    assert spec.accept_greedy(draft, target, parents=parents).accept_index.tolist() == [[0, 1, -1, -1]]
    draft[0, 2:] = -1, 2147480000
    probs = np.full((1, 4, 7), 1 / 7)
    sampled = spec.accept_sampled(draft, probs, probs, np.full((1, 4), 0.5), parents=parents)
    assert sampled.accept_index.tolist() == [[0, 1, -1, -1]]


# --- random ----------------------------------------------------------------------------------------------------------


def drawn_tree(
    parents: list[int], draft_probs: Array, rng: np.random.Generator, count: int, *, with_replacement: bool
) -> Array:
    """Draw drafts: each token from its parent's probabilities, without replacement from what its siblings left."""
    size, vocabulary = draft_probs.shape
    tokens = np.zeros((count, size), np.int64)
    for i in range(1, size):
        q = np.tile(draft_probs[parents[i]], (count, 1))
        if not with_replacement:
            for sibling in range(1, i):
                if parents[sibling] == parents[i]:
                    q[np.arange(count), tokens[:, sibling]] = 0
        cumulative = q.cumsum(1)
        tokens[:, i] = (cumulative <= rng.random((count, 1)) * cumulative[:, -1:]).sum(1)
    assert tokens.max() < vocabulary
    return tokens


def chi_square(counts: Array, probabilities: Array) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; what cannot happen must not have happened."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible]
    assert expected.min() >= 5, "too few samples for the statistic to mean something"
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


def quantile(freedom: int) -> float:
    """Return what a chi-square variable exceeds once in 10,000 times (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.719 * spread**0.5) ** 3)


def next_tokens(result: spec.Acceptance, draft: Array, depth: int) -> Array:
    """Return the first `depth` tokens behind the root of each request, -1 where the step gave fewer."""
    batch, size = draft.shape
    tokens = np.full((batch, depth), -1)
    for j in range(depth):
        index = np.full(batch, -1)
        if j + 1 < result.accept_index.shape[1]:
            index = result.accept_index[:, j + 1]
        kept = index >= 0
        tokens[kept, j] = draft[kept, index[kept] % size]
        tokens[result.accept_lens == j + 1, j] = result.bonus[result.accept_lens == j + 1]
    return tokens


def model(context: Array, vocabulary: int) -> Array:
    """Return a target model: probabilities behind each pair of a depth and a token, one token impossible."""
    table = np.random.default_rng(7).dirichlet(np.full(vocabulary, 0.8), (8, vocabulary))
    table[:, :, 1] = 0
    return (table / table.sum(-1, keepdims=True))[context[..., 0], context[..., 1]]


COUNT = 200_000


def sample(
    parents: list[int], seed: int, *, drawn: str, vocabulary: int = 5, depth: int | None = None
) -> tuple[spec.Acceptance, Array]:
    rng = np.random.default_rng(seed)
    size = len(parents)
    draft_probs = rng.dirichlet(np.ones(vocabulary), size)
    with_replacement = drawn != "without"
    draft = drawn_tree(parents, draft_probs, rng, COUNT, with_replacement=with_replacement)
    if drawn == "chosen":  # the same for all, whatever it is
        draft = np.tile(np.array([0, 4, 0, 2, 3, 0, 2, 3])[:size], (COUNT, 1))
    depths = [0] * size
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
    context = np.stack([np.tile(depths, (COUNT, 1)), draft], -1)
    result = spec.accept_sampled(
        draft,
        model(context, vocabulary),
        None if drawn == "chosen" else np.broadcast_to(draft_probs, (COUNT, size, vocabulary)),
        rng.random((COUNT, size)),
        parents=None if parents == CHAIN else np.broadcast_to(parents, (COUNT, size)),
        depth=depth,
        with_replacement=with_replacement,
    )
    return result, draft


@pytest.mark.parametrize("drawn", ["with", "without", "chosen"])
@pytest.mark.parametrize("parents", [CHAIN, FORK, TREE], ids=["chain", "fork", "tree"])
def test_kept_tokens_are_distributed_as_the_target_models(parents: list[int], drawn: str) -> None:
    vocabulary = 5
    result, draft = sample(parents, seed=11, drawn=drawn)
    assert 1.05 < result.accept_lens.mean() < len(parents)
    tokens = next_tokens(result, draft, 2)

    root = model(np.array([0, 0]), vocabulary)
    statistic, freedom = chi_square(np.bincount(tokens[:, 0], minlength=vocabulary), root)
    assert statistic < quantile(freedom)

    # And so is the second, given the first, where the step went so far.
    for first in range(vocabulary):
        second = tokens[(tokens[:, 0] == first) & (tokens[:, 1] >= 0), 1]
        if second.size > 1000:
            statistic, freedom = chi_square(
                np.bincount(second, minlength=vocabulary), model(np.array([1, first]), vocabulary)
            )
            assert statistic < quantile(freedom)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_path_that_is_cut_off_leaves_the_distribution_as_it_is(depth: int) -> None:
    result, draft = sample(TREE, seed=5, drawn="with", depth=depth)
    assert result.accept_index.shape[1] == depth + 1
    tokens = next_tokens(result, draft, 1)[:, 0]
    statistic, freedom = chi_square(np.bincount(tokens, minlength=5), model(np.array([0, 0]), 5))
    assert statistic < quantile(freedom)


def test_the_statistic_sees_what_is_wrong() -> None:
    # Siblings drawn with replacement and tried as if without, and the other way round.
    rng = np.random.default_rng(3)
    vocabulary, size = 5, len(FORK)
    root = model(np.array([0, 0]), vocabulary)
    draft_probs = np.broadcast_to(rng.dirichlet(np.ones(vocabulary), size), (COUNT, size, vocabulary))
    target_probs = np.broadcast_to(root, (COUNT, size, vocabulary))
    for with_replacement in (False, True):
        draft = drawn_tree(FORK, draft_probs[0], rng, COUNT, with_replacement=with_replacement)
        result = spec.accept_sampled(
            draft,
            target_probs,
            draft_probs,
            rng.random((COUNT, size)),
            parents=np.broadcast_to(FORK, (COUNT, size)),
            with_replacement=not with_replacement,
        )
        tokens = next_tokens(result, draft, 1)[:, 0]
        statistic, freedom = chi_square(np.bincount(tokens, minlength=vocabulary), root)
        assert statistic > 3 * quantile(freedom)


def test_a_draft_from_the_target_model_itself_is_kept() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(6), 4)
    draft = drawn_tree(CHAIN, probs, rng, 1000, with_replacement=True)
    probs = np.broadcast_to(probs, (1000, 4, 6))
    result = spec.accept_sampled(draft, probs, probs, rng.random((1000, 4)))
    assert result.accept_lens.tolist() == [4] * 1000


@some
@given(
    batch=st.integers(1, 4),
    size=st.integers(1, 10),
    depth=st.one_of(st.none(), st.integers(0, 10)),
    drawn=st.sampled_from(["with", "without", "chosen"]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    seed=st.integers(0, 2**16),
)
def test_a_path_leads_from_parent_to_child(
    batch: int, size: int, depth: int | None, drawn: str, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parents = random_parents(batch, size, rng)
    draft = rng.integers(0, 4, (batch, size))
    target, proposal = (rng.dirichlet(np.full(4, 0.3), (batch, size)).astype(dtype) for _ in range(2))
    uniforms = rng.choice([0.0, 0.25, 0.5, 1 - 2**-53], (batch, size))
    result = spec.accept_sampled(
        draft,
        target,
        None if drawn == "chosen" else proposal,
        uniforms,
        parents=parents,
        depth=depth,
        with_replacement=drawn != "without",
    )
    index, lens = result.accept_index, result.accept_lens
    for b in range(batch):
        path = index[b, : lens[b]] - b * size
        assert path[0] == 0
        assert (index[b, lens[b] :] == -1).all()
        np.testing.assert_array_equal(parents[b, path[1:]], path[:-1])
        # Only what the target model can say is kept.
        assert (target[b, path[:-1], draft[b, path[1:]]] > 0).all()
        assert target[b, path[-1], result.bonus[b]] > 0
    # Which is what the compaction of KV takes.
    plan = emulator.plan_compact(np.arange(batch * size), index, lens)
    np.testing.assert_array_equal(plan.src >= 0, (index >= 0).ravel() & (plan.dst >= 0))


# --- what is refused -------------------------------------------------------------------------------------------------


TOKENS = np.zeros((2, 3), np.int64)
PROBS = np.full((2, 3, 4), 0.25)
UNIFORMS = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: spec.accept_greedy(TOKENS[0], TOKENS), ShapeError, r"draft has shape \(3,\)"),
        (lambda: spec.accept_greedy(TOKENS[:, :0], TOKENS), ShapeError, r"draft has shape \(2, 0\)"),
        (lambda: spec.accept_greedy(TOKENS, TOKENS[:1]), ShapeError, r"target is int64 \(1, 3\)"),
        (lambda: spec.accept_greedy(TOKENS, PROBS[..., 0]), ShapeError, "target is float64"),
        (lambda: spec.accept_greedy(TOKENS, [[1, 2, 3]]), ShapeError, "the arrays come from"),
        (lambda: spec.accept_greedy(TOKENS, TOKENS, depth=-1), InvalidArgumentError, "depth is -1"),
        (
            lambda: spec.accept_greedy(TOKENS, TOKENS, next_token=TOKENS),
            InvalidArgumentError,
            "the tree is given by next_token; pass parents",
        ),
        (
            lambda: spec.accept_greedy(TOKENS, TOKENS, parents=TOKENS, next_token=TOKENS, next_sibling=TOKENS),
            InvalidArgumentError,
            "the tree is given by parents, next_token, next_sibling",
        ),
        (
            lambda: spec.accept_sampled(TOKENS, PROBS, PROBS[..., :3], UNIFORMS),
            ShapeError,
            r"draft_probs is float64 \(2, 3, 3\); it must be .* of shape \(2, 3, 4\)",
        ),
        (lambda: spec.accept_sampled(TOKENS, PROBS, PROBS, UNIFORMS[:, 1:]), ShapeError, "uniforms is float64"),
        (
            lambda: spec.accept_sampled(TOKENS, PROBS[..., :0], None, UNIFORMS),
            ShapeError,
            r"target_probs is float64 \(2, 3, 0\)",
        ),
        (
            lambda: spec.accept_sampled(TOKENS, PROBS.astype(np.int64), None, UNIFORMS),
            ShapeError,
            "target_probs is int64",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
