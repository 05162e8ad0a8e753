"""The scaling model: what it must do whatever its constants are, and the table that the docs have of it."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mlaflash import Device, VerifyShape, cost
from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.scaling import NVLINK, PCIE5, Link, predict_replicated, predict_sharded

SM_120 = Device.for_arch("sm_120")
H200 = Device.for_card("h200")
SHAPE = VerifyShape(num_heads=64, q_len=8, kv_len=262_144, page_size=64)
ROOT = Path(__file__).parents[1]


def test_one_rank_is_the_step_without_an_exchange() -> None:
    alone = predict_sharded(SHAPE, 1, PCIE5, SM_120)
    assert alone == predict_replicated(SHAPE, 1, SM_120)
    assert alone.total_us == alone.attention_us == cost.choose(512, 1, 262_144, SM_120).predicted_us


def test_bytes_and_latency_are_those_of_the_messages() -> None:
    nothing = Link("nothing", gb_s=1e12, latency_us=0.0, hop_us=0.0)
    slow = replace(nothing, gb_s=1.0)
    late = replace(nothing, latency_us=100.0, hop_us=10.0)
    for ranks in (2, 4, 8):
        base = predict_sharded(SHAPE, ranks, nothing, SM_120)
        by_bytes, by_latency = (predict_sharded(SHAPE, ranks, link, SM_120) for link in (slow, late))
        # At 1 GB/s a microsecond is 1,000 bytes.
        others = 512 * (ranks - 1) / ranks
        assert by_bytes.gather_us - base.gather_us == pytest.approx(others * 576 * 2 / 1e3, rel=1e-6)
        assert by_bytes.exchange_us - base.exchange_us == pytest.approx(others * (512 * 2 + 4) / 1e3, rel=1e-6)
        assert by_latency.total_us - base.total_us == pytest.approx(2 * (100 + 10 * (ranks - 2)))
        assert (by_bytes.attention_us, by_bytes.merge_us) == (base.attention_us, base.merge_us)


def test_long_contexts_scale_and_short_ones_do_not() -> None:
    times = [predict_sharded(SHAPE, ranks, NVLINK, SM_120).total_us for ranks in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[1] < 0.62 * times[0]
    short = replace(SHAPE, kv_len=1024)
    assert predict_sharded(short, 8, PCIE5, SM_120).total_us > predict_sharded(short, 1, PCIE5, SM_120).total_us


def test_a_cache_of_8_bits_is_read_faster_and_exchanged_alike() -> None:
    halved = replace(SHAPE, kv_dtype="float8_e4m3", q_len=1, num_heads=16, batch=32)
    whole = replace(halved, kv_dtype=None)
    for predict in (partial(predict_sharded, link=NVLINK), predict_replicated):
        few, many = (predict(shape, num_ranks=2, device=H200) for shape in (halved, whole))
        assert few.attention_us < many.attention_us
        assert (few.gather_us, few.exchange_us) == (many.gather_us, many.exchange_us)


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="3 ranks must have equally many"):
        predict_sharded(SHAPE, 3, NVLINK, SM_120)
    with pytest.raises(InvalidArgumentError, match="5 ranks must have equally many"):
        predict_replicated(SHAPE, 5, SM_120)
    with pytest.raises(UnsupportedError, match="float32"):
        predict_sharded(replace(SHAPE, dtype="float32"), 2, NVLINK, SM_120)
    with pytest.raises(InvalidArgumentError, match="gb_s is 0"):
        Link("none", 0, 1)
    with pytest.raises(InvalidArgumentError, match="latency_us is -1"):
        Link("none", 1, -1)


def test_the_table_of_the_docs_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "distributed", raising=False)
    import distributed

    assert distributed.predicted_table() in (ROOT / "docs" / "distributed.md").read_text()
