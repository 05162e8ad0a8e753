"""Results that would lie on each other, or on what is still to be read, are refused; all other memory is fine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from mlaflash import MaskSource, emulator
from mlaflash.errors import ShapeError
from mlaflash.interop import numpy_view, require_apart, share_memory
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.mma_tiles import NARROW

CASE = Case(
    name="memory", q_lens=(3, 2), kv_lens=(40, 20), heads=4, sm_scale=0.1, page_size=16, dtype="float32", mask="tree"
)


def shared(one: Any, other: Any) -> bool:
    return share_memory(numpy_view("one", one), numpy_view("other", other))


def test_views_between_each_other_are_told_from_views_on_each_other() -> None:
    room = np.zeros((6, 5, 64), np.float16)
    assert not shared(room[..., :32], room[..., 32:])
    assert shared(room[..., :33], room[..., 32:])
    assert not shared(room[::2], room[1::2])
    assert shared(room[::2], room[::-3])
    assert not shared(room[:, 0], room.transpose(1, 0, 2)[1:])
    assert not shared(room, room[:0])
    assert shared(room.view(np.uint8)[0, 0, 3:4], room[0, 0, 1:2])
    assert not shared(room.view(np.uint8)[0, 0, 4:5], room[0, 0, 1:2])


def test_memory_is_compared_where_nobody_may_look_into_it() -> None:
    """As that of a GPU: NumPy gets addresses alone."""
    view = numpy_view("x", np.zeros((4, 8), np.float32))._replace(ptr=4096, strides=(16, 1), array=None)
    assert share_memory(view, view._replace(ptr=4096 + 28))
    assert not share_memory(view, view._replace(ptr=4096 + 32))


def test_what_is_hard_to_tell_counts_as_shared() -> None:
    room = np.zeros(20_000, np.uint8)
    one = as_strided(room, (11, 12, 13, 14), (971, 317, 119, 7), writeable=False)
    other = as_strided(room[5:], (12, 11, 14, 13), (877, 419, 113, 11), writeable=False)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(one[::2, ::2, ::2, ::2], other[::2, ::2, ::2, ::2], max_work=0)
    assert shared(one, other)


@pytest.mark.parametrize("strides", [(0, 1), (8, 0), (3, 1), (1, 1), (-3, 1)])
def test_elements_that_lie_on_each_other(strides: tuple[int, int]) -> None:
    view = numpy_view("x", np.zeros((4, 8), np.float32))
    with pytest.raises(ShapeError, match="some of its elements lie on each other"):
        require_apart([view._replace(strides=strides)], [])
    for fine in ((8, 1), (-8, 1), (1, 4), (16, -2)):
        require_apart([view._replace(strides=fine)], [])


def results(case: Case, **more: Any) -> dict[str, Any]:
    shape = (case.num_tokens, case.heads)
    return {"out": np.zeros((*shape, 512), case.dtype), "lse": np.zeros(shape, np.float32)} | more


@pytest.mark.parametrize("other", ["q", "kv_cache", "kv_lens", "kv_indices", "lse", "out"])
def test_results_of_a_call_share_no_memory(other: str) -> None:
    arguments = build(CASE, 0)
    given = results(CASE)
    count, size = CASE.num_tokens * CASE.heads, CASE.num_tokens * CASE.heads * 512
    if other == "q":
        given["out"] = arguments["q"][..., :512]
    elif other == "lse":
        given["lse"] = given["out"][..., 0]
    elif other == "out":
        given["out"] = as_strided(given["out"], strides=(2048, 0, 4))
    else:
        room = np.zeros(max(size, arguments[other].size), np.float32)
        laid = room.view(arguments[other].dtype)[: arguments[other].size].reshape(arguments[other].shape)
        laid[...] = arguments[other]
        arguments[other] = laid
        given |= (
            {"out": room[:size].reshape(given["out"].shape)}
            if other == "kv_cache"
            else {"lse": room[:count].reshape(given["lse"].shape)}
        )
    with pytest.raises(ShapeError, match=other):
        emulator.mla_verify(**arguments, **given)


def test_results_may_lie_between_what_is_read() -> None:
    arguments = build(CASE, 0)
    expected = emulator.mla_verify(**arguments)
    room = np.zeros((CASE.num_tokens, CASE.heads, 1092), np.float32)
    room[..., :576] = arguments["q"]
    given = {"out": room[..., 576:1088], "lse": room[..., 1088]}
    for found, wanted in zip(
        emulator.mla_verify(**(arguments | {"q": room[..., :576]}), **given), expected, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_results_of_a_plan_share_no_memory() -> None:
    case = Case(name="plan", q_lens=(3, 2), kv_lens=(40, 20), heads=4, sm_scale=0.1, page_size=16, mask="causal")
    arguments = build(case, 1)
    plan = emulator.VerifyPlan(**plan_arguments(case, tiles=NARROW, num_sms=1))
    plan.update(**{name: arguments[name] for name in ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices")})
    expected = plan.run(arguments["q"], arguments["kv_cache"])
    with pytest.raises(ShapeError, match="out shares memory with q"):
        plan.run(arguments["q"], arguments["kv_cache"], out=arguments["q"][..., :512])
    # And the plan goes on.
    np.testing.assert_array_equal(plan.run(arguments["q"], arguments["kv_cache"])[0], expected[0])


def test_merged_results_share_no_memory_but_a_part_may_become_one() -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((2, 5, 4, 512)).astype(np.float32), np.zeros((2, 5, 4), np.float32)
    with pytest.raises(ShapeError, match="lse shares memory with lses"):
        emulator.correct_partial(outs[0], lses, 0, lse=lses[0])
    with pytest.raises(ShapeError, match="out shares memory with outs"):
        emulator.correct_partial(outs[0, :4], lses[:, :4], 0, corrected=outs[0, 1:])
    with pytest.raises(ShapeError, match="lse shares memory with out"):
        emulator.merge_partials(outs, lses, out=(out := np.zeros((5, 4, 512), np.float32)), lse=out[..., 0])
    part = outs[1].copy()
    found, _ = emulator.correct_partial(part, lses, 1)
    assert found is part
    np.testing.assert_allclose(part, outs[1] / 2, rtol=1e-6)


def test_packed_words_share_no_memory_with_their_source() -> None:
    words = np.ones((8, 1), np.uint32)
    with pytest.raises(ShapeError, match="words shares memory with words"):
        emulator.pack_mask(MaskSource.from_packed(words), 8, 4, words=words)


def test_layers_lie_between_each_other_but_not_on_each_other() -> None:
    room = np.random.default_rng(0).integers(0, 256, (30, 6, 64), dtype=np.uint8)
    before = room.copy()
    src, dst = np.arange(4), np.arange(4) + 10
    emulator.move_rows([room[:, i] for i in (4, 0, 2)], src, dst)
    np.testing.assert_array_equal(room[10:14, ::2], before[:4, ::2])
    np.testing.assert_array_equal(room[:, 1::2], before[:, 1::2])
    flat = room.reshape(-1, 64)
    emulator.move_rows([flat[:60], flat[60:120], flat[120:]], src, dst)
    for layers in (
        [flat[:60], flat[59:119]],
        [room[:29, 0], room.reshape(-1)[32:-352].reshape(29, 6, 64)[:, 0]],
        [room[:20, 0], room[10:, 0]],
        [room[:20, 0], room[:20, 2], room[10:, 0]],
    ):
        with pytest.raises(ShapeError, match="share memory"):
            emulator.move_rows(layers, src, dst)
