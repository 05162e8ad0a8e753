"""Inputs are seeded, poisoned where nothing may be read, and neither flat nor one-hot."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.kv import dequantize_ds_mla, dequantize_e4m3
from mlaflash.lab import presets
from mlaflash.lab.inputs import GARBAGE_ID, Case, build
from mlaflash.masks import TreeMask
from mlaflash.oracle import mla_sparse, mla_verify

CASE = Case(
    name="ragged",
    q_lens=(3, 0, 2, 4),
    kv_lens=(17, 5, 0, 3),
    heads=2,
    sm_scale=0.14468,
    page_size=4,
    mask="tree",
    id_dtype="int64",
)
EVERY_CASE = [
    pytest.param(preset, problem, id=f"{preset}-{problem.name}")
    for preset in presets.PRESETS
    for problem in presets.cases(preset, "emulator")
]


READ = {
    None: lambda cache: cache.astype(np.float32),
    "float8_e4m3": dequantize_e4m3,
    "fp8_ds_mla": dequantize_ds_mla,
}


def flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace pairs by joined arrays and the mask by its words."""
    named = {
        name: np.concatenate(value, axis=-1) if isinstance(value, tuple) else value for name, value in arguments.items()
    }
    if isinstance(named.get("mask"), TreeMask):
        named["mask"] = named["mask"].words
    return named


@pytest.mark.parametrize(("preset", "problem"), EVERY_CASE)
def test_the_seed_alone_decides(preset: str, problem: Case) -> None:
    first, again, other = (flat(build(problem, seed)) for seed in (7, 7, 8))
    assert first.keys() == again.keys()
    for name, value in first.items():
        assert np.asarray(value).tobytes() == np.asarray(again[name]).tobytes(), name
    assert not np.array_equal(first["q"], other["q"])


@pytest.mark.parametrize(("preset", "problem"), [case for case in EVERY_CASE if not case.values[1].topk])
def test_a12_all_that_is_not_read_is_poison_and_all_that_is_read_is_not(preset: str, problem: Case) -> None:
    arguments = build(problem, 0)
    out, _ = mla_verify(**arguments)
    assert np.isfinite(out).all()
    joined = flat(arguments)
    read = [max(kv - q, 0) if problem.new_kv else kv for q, kv in zip(problem.q_lens, problem.kv_lens, strict=True)]
    numbers = READ[problem.kv_dtype](joined["kv_cache"])
    finite, nan = np.isfinite(numbers).all(axis=-1), np.isnan(numbers).all(axis=-1)
    assert finite.sum() == sum(read)
    assert nan.sum() == finite.size - sum(read) > 0
    if problem.addressing != "dense":
        assert nan[0].all()
        ids = arguments.get("kv_indices", arguments.get("block_table"))
        assert ids.dtype == problem.id_dtype
        assert (ids == GARBAGE_ID).sum() >= problem.batch


@pytest.mark.parametrize("page_size", [1, 4])
def test_lists_name_all_that_is_not_poison(page_size: int) -> None:
    lists = replace(CASE, q_lens=(5, 0, 2, 4), mask="none", topk=37, page_size=page_size)
    arguments = build(lists, 0)
    out, lse = mla_sparse(**arguments)
    assert np.isfinite(out).all()
    indices, lens = arguments["indices"], arguments["topk_lens"]
    assert (indices.dtype, indices.shape) == (np.dtype("int64"), (11, 37))
    # The third request has no tokens, and its two query tokens an empty list.
    empty = [token for token in range(11) if np.isneginf(lse[token]).all()]
    assert {1, 5, 6} <= set(empty) < set(range(11))
    counted = np.arange(37) < lens[:, None]
    assert (indices[~counted] == GARBAGE_ID).all()
    named = indices[counted]
    assert (named == -1).any()
    finite = np.isfinite(arguments["kv_cache"].astype(np.float32)).all(axis=-1).ravel()
    assert np.flatnonzero(finite).tolist() == np.unique(named[named >= 0]).tolist()
    assert not finite[:page_size].any()
    row = indices[0]
    assert len(np.unique(row)) < len(row) == lens[0]


def test_ids_past_the_needed_pages_are_garbage() -> None:
    listed = build(CASE, 0)
    assert np.diff(listed["kv_indptr"]).tolist() == [6, 3, 1, 2]
    for end in listed["kv_indptr"][1:]:
        assert listed["kv_indices"][end - 1] == GARBAGE_ID
    table = build(replace(CASE, addressing="block_table"), 0)["block_table"]
    assert (table == GARBAGE_ID).sum(axis=1).tolist() == [1, 4, 6, 5]


def test_pages_are_shuffled_and_used_once() -> None:
    ids = build(replace(CASE, kv_lens=(400, 5, 0, 3)), 0)["kv_indices"]
    used = ids[ids != GARBAGE_ID]
    assert len(set(used.tolist())) == len(used)
    assert (np.diff(used) != 1).mean() > 0.5


def test_new_tokens_without_a_place_are_poison() -> None:
    new_kv = build(replace(CASE, new_kv=True), 0)["new_kv"].astype(np.float32)
    missing = np.isnan(new_kv).all(axis=-1)
    # Requests: 3 of 17, 0 of 5, 2 of 0 and 4 of 3 tokens.
    assert missing.tolist() == [False] * 3 + [True] * 2 + [True] + [False] * 3


@pytest.mark.parametrize("sm_scale", [0.14468, 0.13523, 1.0, -0.5])
@pytest.mark.parametrize("kv_len", [40, 4000])
def test_softmax_is_neither_flat_nor_one_hot(sm_scale: float, kv_len: int) -> None:
    arguments = build(replace(CASE, q_lens=(4,), kv_lens=(kv_len,), heads=8, mask="none", sm_scale=sm_scale), 0)
    ids = arguments["kv_indices"]
    token = np.arange(kv_len)
    rows = arguments["kv_cache"][ids[token // 4], token % 4].astype(np.float64)
    scores = sm_scale * arguments["q"].astype(np.float64) @ rows.T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    entropy = -(weights * np.log(weights)).sum(-1) / np.log(kv_len)
    assert 0.3 < np.median(entropy) < 0.9
    assert np.median(weights.max(-1)) < 0.7


def test_trees_branch() -> None:
    parents = build(replace(CASE, q_lens=(16,), kv_lens=(20,)), 0)["mask"].to_parents()
    assert (parents != np.arange(-1, 15)).any()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"q_lens": (1,)}, InvalidArgumentError, "q_lens has 1"),
        ({"q_lens": (1, 2, 3, -1)}, InvalidArgumentError, "q_lens"),
        ({"heads": 0}, InvalidArgumentError, "heads is 0"),
        ({"page_size": 0}, InvalidArgumentError, "page_size is 0"),
        ({"dtype": "float8"}, UnsupportedError, "float8"),
        ({"kv_dtype": "float8_e5m2"}, UnsupportedError, "kv_dtype is 'float8_e5m2'; .*float8_e4m3, fp8_ds_mla"),
        ({"mask": "window"}, InvalidArgumentError, "mask is 'window'"),
        ({"addressing": "hashed"}, InvalidArgumentError, "addressing"),
        ({"id_dtype": "uint8"}, InvalidArgumentError, "id_dtype"),
        ({"q_lens": (8,), "kv_lens": (2**31,)}, InvalidArgumentError, r"2147483648 KV tokens; .* below 2\*\*31"),
        ({"heads": 2**31}, InvalidArgumentError, r"x 2147483648 heads"),
        ({"topk": 8}, InvalidArgumentError, "topk is 8, mask 'tree'"),
        ({"topk": -1, "mask": "none"}, InvalidArgumentError, "topk is -1"),
        ({"topk": 8, "mask": "none", "new_kv": True}, InvalidArgumentError, "new_kv True"),
    ],
)
def test_impossible_cases_are_refused(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        replace(CASE, **changes)


@pytest.mark.parametrize("device", ["gpu", "emulator"])
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_cover_what_goes_wrong(preset: str, device: str) -> None:
    problems = presets.cases(preset, device)
    assert len({problem.name for problem in problems}) == len(problems)
    assert {problem.dtype for problem in problems} == {"float32", "bfloat16", "float16"}
    assert {problem.mask for problem in problems} == {"causal", "none", "chain", "tree", "dense"}
    assert {problem.addressing for problem in problems} == {"indices", "block_table", "dense"}
    assert {problem.id_dtype for problem in problems} == {"int32", "int64"}
    assert {1, 16, 64} <= {problem.page_size for problem in problems}
    assert any(problem.page_size & (problem.page_size - 1) for problem in problems)
    for page_size in (16, 64):
        assert any(
            kv_len % page_size for problem in problems if problem.page_size == page_size for kv_len in problem.kv_lens
        )
    assert any(problem.logit_cap for problem in problems)
    assert any(problem.new_kv for problem in problems)
    assert any(problem.paired for problem in problems)
    assert any(problem.topk for problem in problems)
    assert {problem.kv_dtype for problem in problems} == {None, "float8_e4m3", "fp8_ds_mla"}
    lengths = [(q, kv) for problem in problems for q, kv in zip(problem.q_lens, problem.kv_lens, strict=True)]
    assert any(q > 0 and kv == 0 for q, kv in lengths)
    assert any(q > kv > 0 for q, kv in lengths)
    assert any(q == 0 < kv for q, kv in lengths)
    assert any(len(set(problem.q_lens)) > 1 for problem in problems)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_are_small_enough_for_the_emulator(preset: str) -> None:
    problems = presets.cases(preset, "emulator")
    assert sum(problem.macs for problem in problems) <= presets.MAX_EMULATOR_MACS


@pytest.mark.parametrize(
    ("preset", "heads", "sm_scale"), [("kimi-k2-tp8", 8, 0.14468), ("deepseek-v3-tp8", 16, 0.13523)]
)
def test_model_presets_have_the_models_numbers(preset: str, heads: int, sm_scale: float) -> None:
    for device, least in (("gpu", 4096), ("emulator", 1)):
        problems = presets.cases(preset, device)
        assert {problem.heads for problem in problems} == {heads}
        assert {problem.sm_scale for problem in problems} == {sm_scale}
        drafts = {
            (problem.q_lens[0], problem.mask)
            for problem in problems
            if problem.batch == 1 and problem.kv_lens[0] >= least
        }
        assert {8, 16} <= {q_len for q_len, _ in drafts}
        assert {"chain", "tree", "causal"} <= {mask for _, mask in drafts}
    contexts = {kv_len for problem in presets.cases(preset, "gpu") for kv_len in problem.kv_lens}
    assert {4096, 16384, 65536} <= contexts


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="kimi-k2-tp8"):
        presets.cases("kimi", "gpu")
    with pytest.raises(InvalidArgumentError, match="emulator"):
        presets.cases("quick", "cpu")
