"""Acceptance of drafted tokens, chain or tree, on NumPy and on CuPy arrays: what is kept, and what comes next.

Token 0 of each request's draft is the root: the last token that is certain already. Token i stands for one more token
behind its parent's, and row i of what the target model gives is for the token behind token i. Without `parents`, or
links, a draft is a chain. No value is read from the device, and nothing here imports CuPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mlaflash.checks import integer
from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.mask_formats import module_of, namespace

_FLOATS = ("float16", "float32", "float64")


class Acceptance(NamedTuple):
    """What of a draft is kept.

    Attributes
    ----------
    accept_index : array, shape (B, depth + 1), int64
        The accepted path of each request, its root first: places in the flat batch, ``b * S + i``, as
        `mlaflash.kv.plan_compact` takes them; -1 pads.
    accept_lens : array, shape (B,), int64
        Entries of each path, at least 1.
    bonus : array, shape (B,), int64
        The token behind each path: the root of the next draft.
    """

    accept_index: Any
    accept_lens: Any
    bonus: Any


def accept_greedy(
    draft: Any,
    target: Any,
    *,
    parents: Any = None,
    next_token: Any = None,
    next_sibling: Any = None,
    depth: int | None = None,
) -> Acceptance:
    """Keep the longest path whose every token is the one that the target model would have chosen.

    Parameters
    ----------
    draft : array, shape (B, S), integers
        Drafted tokens, the root's first.
    target : array, shape (B, S), integers
        The target model's choice behind each of them.
    parents : array, shape (B, S), integers, optional
        Each token's parent within its request, before it; -1 for the root, and for tokens that pad.
    next_token, next_sibling : array, shape (B, S), integers, optional
        In place of `parents`: first child and next sibling of each token, -1 for none, as SGLang has them.
    depth : int, optional
        The most tokens to keep behind the root; by default S - 1.

    Returns
    -------
    Acceptance

    Raises
    ------
    ShapeError
        Shape or dtype of an array, or arrays of two libraries.
    InvalidArgumentError
        `depth` is below 0, or the tree is given twice or by half.
    """
    xp, depth, tree = _tree(draft, depth, parents, next_token, next_sibling, target=target)
    batch, size = draft.shape
    rows = xp.arange(batch)
    # Token 0 is nobody's child, whatever its parent says.
    tree = xp.where(xp.arange(size) == 0, -1, tree)
    at, alive = xp.zeros(batch, np.int64), xp.ones(batch, np.bool_)
    path = xp.full((batch, depth + 1), -1, np.int64)
    path[:, 0] = 0
    for step in range(1, depth + 1):
        right = (tree == at[:, None]) & (draft == target[rows, at][:, None])
        alive = alive & right.any(1)
        at = xp.where(alive, right.argmax(1), at)
        path[:, step] = xp.where(alive, at, -1)
    return _accepted(xp, path, size, target[rows, at].astype(np.int64))


def accept_sampled(
    draft: Any,
    target_probs: Any,
    draft_probs: Any,
    uniforms: Any,
    *,
    parents: Any = None,
    next_token: Any = None,
    next_sibling: Any = None,
    depth: int | None = None,
    with_replacement: bool = True,
) -> Acceptance:
    """Keep drafted tokens at random, so that what is kept, with the token behind it, is a sample of the target model.

    A child x of the last kept token is kept with probability min(1, p(x) / q(x)); else p becomes max(0, p - q), made
    to sum to 1, and the next child is tried. With none left, the token behind the path is drawn from p.

    Parameters
    ----------
    draft : array, shape (B, S), integers
        Drafted tokens, the root's first.
    target_probs : array, shape (B, S, V), float
        p: the target model's probabilities of the token behind each drafted one, after temperature and filters.
    draft_probs : array, shape (B, S, V), float, or None
        q: what the children of each token were drawn from. None: they were chosen and not drawn, such as the most
        likely ones; a child is then kept with its share of what is left of p.
    uniforms : array, shape (B, S), float
        Independent random numbers from [0, 1): column i decides on token i, column 0 draws the token behind the path.
    parents, next_token, next_sibling, depth
        As in `accept_greedy`. Children are tried in ascending order, which must be the order that they were drawn in;
        links decide on the parents alone.
    with_replacement : bool
        Whether siblings were drawn independently of each other. False: each was drawn from what q left when the
        siblings before it were taken out.

    Returns
    -------
    Acceptance

    Raises
    ------
    ShapeError
        Shape or dtype of an array, or arrays of two libraries.
    InvalidArgumentError
        `depth` is below 0, or the tree is given twice or by half.

    Notes
    -----
    Chains: Leviathan, Kalman and Matias, arXiv:2211.17192, and Chen et al., arXiv:2302.01318. Trees: the sequential
    multi-step scheme of SpecInfer, arXiv:2305.09781, algorithm 2, and without replacement that of Sequoia,
    arXiv:2402.12374. A token that stands below another one in the tree has a higher number. A batch takes S - 1 steps
    over (B, V), in float32, or in float64 where `target_probs` is.
    """
    xp, depth, tree = _tree(
        draft,
        depth,
        parents,
        next_token,
        next_sibling,
        target_probs=target_probs,
        draft_probs=draft_probs,
        uniforms=uniforms,
    )
    batch, size = draft.shape
    rows, tokens = xp.arange(batch), xp.arange(target_probs.shape[2])
    work = np.float64 if target_probs.dtype == np.float64 else np.float32
    at, length = xp.zeros(batch, np.int64), xp.ones(batch, np.int64)
    path = xp.full((batch, depth + 2), -1, np.int64)
    path[:, 0] = 0
    p = target_probs[:, 0].astype(work)
    q = None if draft_probs is None else draft_probs[:, 0].astype(work)
    # Parents come before their children: one pass meets every child of the last kept token, in order.
    for i in range(1, size):
        # What pads may be no token.
        token = xp.clip(draft[:, i], 0, tokens.shape[0] - 1)
        tried = (tree[:, i] == at) & (length <= depth)
        is_token = tokens == token[:, None]
        drawn_from = is_token.astype(work) if q is None else q
        kept = tried & (uniforms[:, i] * drawn_from[rows, token] < p[rows, token])
        refused = tried & ~kept

        p = xp.where(refused[:, None], _scaled(xp, xp.maximum(p - drawn_from, 0), p), p)
        p = xp.where(kept[:, None], target_probs[:, i].astype(work), p)
        if q is not None:
            if not with_replacement:
                left = xp.where(is_token, 0, q)
                q = xp.where(refused[:, None], _scaled(xp, left, left), q)
            q = xp.where(kept[:, None], draft_probs[:, i].astype(work), q)
        # What is not kept goes into a column of its own, which is cut off.
        path[rows, xp.where(kept, length, depth + 1)] = i
        at = xp.where(kept, i, at)
        length = length + kept
    return _accepted(xp, path[:, : depth + 1], size, _draw(xp, p, uniforms[:, 0]))


def _scaled(xp: Any, weights: Any, otherwise: Any) -> Any:
    """Make weights sum to 1; where they sum to 0, which only rounding brings about, take something else."""
    total = weights.sum(1, keepdims=True)
    return xp.where(total > 0, weights / xp.where(total > 0, total, 1), otherwise)


def _draw(xp: Any, p: Any, uniform: Any) -> Any:
    """Draw a token from each row, by the inverse of its distribution function."""
    below = xp.cumsum(p.astype(np.float64), axis=1)
    token = (below <= uniform[:, None] * below[:, -1:]).sum(1)
    # Rounding must not lead behind the last token that has a probability.
    last = p.shape[1] - 1 - (p[:, ::-1] > 0).argmax(1)
    return xp.minimum(token, last).astype(np.int64)


def _accepted(xp: Any, path: Any, size: int, bonus: Any) -> Acceptance:
    offsets = xp.arange(path.shape[0])[:, None] * size
    return Acceptance(xp.where(path >= 0, path + offsets, -1), (path >= 0).sum(1), bonus)


def _tree(
    draft: Any, depth: int | None, parents: Any, next_token: Any, next_sibling: Any, **others: Any
) -> tuple[Any, int, Any]:
    """Check the arguments; return the arrays' module, the depth and the parents."""
    links = {"next_token": next_token, "next_sibling": next_sibling}
    given = {name: array for name, array in {"parents": parents, **links}.items() if array is not None}
    if given.keys() not in (set(), {"parents"}, links.keys()):
        raise InvalidArgumentError(
            f"the tree is given by {', '.join(given)}; pass parents, or both next_token and next_sibling, or nothing"
            " for a chain."
        )
    optional = {name: array for name, array in others.items() if name != "draft_probs" or array is not None}
    arrays = {"draft": draft, **optional, **given}
    modules = {name: module_of(array) for name, array in arrays.items()}
    if len(set(modules.values())) > 1 or modules["draft"] not in ("numpy", "cupy"):
        raise ShapeError(f"the arrays come from {modules}; all must be NumPy arrays or all CuPy arrays: convert them.")
    if draft.ndim != 2 or not draft.shape[1]:
        raise ShapeError(f"draft has shape {draft.shape}; it must be (B, S) with a root for each request.")
    for name, array in arrays.items():
        is_integer = name in ("draft", "target", *given)
        shape = (*draft.shape, *others["target_probs"].shape[-1:]) if name.endswith("probs") else draft.shape
        fits = array.dtype.kind in "iu" if is_integer else array.dtype.name in _FLOATS
        if array.shape != shape or not fits or 0 in shape[2:]:
            wanted = "integers" if is_integer else ", ".join(_FLOATS)
            raise ShapeError(f"{name} is {array.dtype.name} {array.shape}; it must be {wanted} of shape {shape}.")
    xp, size = namespace(draft), draft.shape[1]
    most = size - 1 if depth is None else min(integer("depth", depth, 0), size - 1)
    if parents is not None:
        return xp, most, parents
    if next_token is None:
        return xp, most, xp.broadcast_to(xp.arange(-1, size - 1), draft.shape)
    return xp, most, _linked_parents(xp, next_token, next_sibling)


def _linked_parents(xp: Any, next_token: Any, next_sibling: Any) -> Any:
    """Find the parents of trees that are given as first child and next sibling."""
    batch, size = next_token.shape
    rows, source = xp.arange(batch)[:, None], xp.broadcast_to(xp.arange(size), next_token.shape)
    # Column `size` takes what leads nowhere.
    parent, before = (xp.full((batch, size + 1), -1, np.int64) for _ in range(2))
    for link, back in ((next_token, parent), (next_sibling, before)):
        back[rows, xp.where((link > 0) & (link < size), link, size)] = source
    parent, before = parent[:, :size], before[:, :size]
    # A token's first sibling, by steps of twice the length each time.
    first = xp.where(before >= 0, before, source)
    for _ in range(size.bit_length()):
        first = xp.take_along_axis(first, first, 1)
    return xp.take_along_axis(parent, first, 1)
