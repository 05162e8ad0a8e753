"""The cost model: what it chooses where measurements say so, and that it behaves between them."""

from dataclasses import replace
from statistics import median

import candidates
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaflash import combine
from mlaflash.cost import (
    FP8_ROW_CLASSES,
    ROW_CLASSES,
    TOKENS_PER_SPLIT,
    Speed,
    blocks_per_sm,
    choice_of,
    choose,
    speed_of,
)
from mlaflash.device import Device, apply_budget
from mlaflash.errors import InvalidArgumentError, TileError
from mlaflash.mma_tiles import NARROW, NARROW_32, NARROW_32_DEEP, ROWS_64, ROWS_64_ROLES
from mlaflash.params import row_bytes

H200 = replace(Device.for_arch("sm_90"), name="NVIDIA H200")
PRO_6000 = Device.for_arch("sm_120")
DEVICES = [H200, PRO_6000, Device.for_arch("sm_80"), Device.for_arch("sm_89")]

counts = st.integers(1, 1024)
lengths = st.integers(0, 300_000)


@pytest.mark.parametrize(
    ("batch", "rows", "kv_len", "measured_us"),
    [
        (32, 8, 8192, 79),
        (32, 16, 8192, 79),
        (1, 16, 4096, 13.5),
        (1, 16, 8192, 15.7),
        (1, 16, 65536, 30),
        (1, 16, 200_000, 67),
        (1, 64, 4096, 15.5),
        (1, 64, 8192, 19.0),
    ],
)
def test_predictions_are_near_what_was_measured_on_an_h200(batch, rows, kv_len, measured_us):
    assert choose(rows, batch, kv_len, H200).predicted_us == pytest.approx(measured_us, rel=0.15)


def test_64_rows_take_taller_row_tiles_as_the_kv_grows():
    """From 16 to 64 rows; tiles of 32 rows lie between."""
    rows = [choose(64, 1, kv_len, H200).config.rows for kv_len in (1024, 2048, 4096, 8192, 16_384, 24_576, 32_768)]
    assert rows == [16, 16, 16, 32, 32, 32, 64]


def test_64_rows_over_few_tiles_a_block_take_the_kernel_that_starts_sooner():
    assert choose(64, 1, 16_384, H200).config is NARROW_32_DEEP
    assert choose(64, 1, 16_384, apply_budget(H200, "sm_120")).config is NARROW_32


@pytest.mark.parametrize(("batch", "kv_len"), [(1, 65_536), (1, 200_000), (8, 32_768), (32, 8192)])
def test_64_rows_over_many_tiles_a_block_take_the_kernel_whose_tiles_are_shorter(batch, kv_len):
    assert choose(64, batch, kv_len, H200).config is ROWS_64_ROLES


@pytest.mark.parametrize("name", list(candidates.DEVICES))
def test_choices_and_times_are_near_what_was_measured(name):
    """Of the problems of both suites: the choice at most 5 % slower than the best, times 3 % off in the median."""
    device = candidates.DEVICES[name]
    regrets, errors = [], []
    for batch, rows, kv_len, _, times in candidates.read(name):
        chosen = choose(rows, batch, kv_len, device)
        index = [c.config for c in ROW_CLASSES].index(chosen.config)
        regrets.append(times[index, chosen.num_splits] / min(times.values()) - 1)
        for (index, splits), us in times.items():
            config = ROW_CLASSES[index].config
            known = choice_of(config, splits, rows, batch, kv_len, device)
            errors.append(abs(known.predicted_us / us - 1))
    assert len(regrets) == 141
    assert max(regrets) < 0.05
    assert median(regrets) < 0.005
    assert median(errors) < 0.03


def test_the_verify_suite_takes_the_best_within_limits_of_sm_120():
    for batch, rows, kv_len, _, times in candidates.read("h200_sm120")[:21]:
        chosen = choose(rows, batch, kv_len, candidates.DEVICES["h200_sm120"])
        index = [c.config for c in ROW_CLASSES].index(chosen.config)
        # Which of two kernels is ahead by 4 % over one request of 64 rows differs from one measurement to another.
        assert times[index, chosen.num_splits] < 1.05 * min(times.values())


@pytest.mark.parametrize(("device", "tall"), [(H200, ROWS_64_ROLES), (PRO_6000, ROWS_64)], ids=["sm_90", "sm_120"])
def test_full_batches_take_the_smallest_tile_that_holds_the_rows(device, tall):
    """On an sm_120 the tensor cores are the limit, whichever kernel feeds them."""
    limited = apply_budget(device, "sm_120")
    chosen = [choose(rows, 32, 32_768, limited).config for rows in (8, 16, 32, 64, 512)]
    assert chosen == [NARROW, NARROW, NARROW_32, tall, tall]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_64_rows_take_mma_wide_on_older_gpus(arch):
    assert choose(64, 32, 32_768, Device.for_arch(arch)).config is ROWS_64


def test_64_rows_take_mma_wide_where_mma_roles_does_not_fit():
    tight = replace(PRO_6000, shared_per_block=ROWS_64_ROLES.shared_bytes() - 1)
    assert choose(64, 32, 32_768, tight).config is ROWS_64


def test_32_rows_take_four_tiles_a_ring_where_they_fit():
    assert choose(32, 32, 8192, H200).config is NARROW_32_DEEP
    assert choose(32, 32, 8192, apply_budget(H200, "sm_120")).config is NARROW_32
    assert NARROW_32_DEEP.shared_bytes() > PRO_6000.shared_per_block


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_32_rows_and_lists_take_mma_wide_where_two_row_tiles_do_not_fit_registers(arch):
    assert choose(32, 32, 8192, Device.for_arch(arch)).config.kernel == "mma_wide"
    assert choose(32, 32, 8192, H200, is_sparse=True).config not in (NARROW_32, NARROW_32_DEEP)


def test_splits_fill_the_gpu_once():
    assert choose(8, 32, 8192, H200).num_splits == 4
    assert choose(16, 1, 65_536, H200).num_splits == 128


@pytest.mark.parametrize("batch", [132, 400, 5000])
def test_a_grid_that_fills_the_gpu_is_not_split(batch):
    assert choose(8, batch, 2048, H200).num_splits == 1


def test_one_tile_is_not_split():
    assert choose(8, 1, 16, H200).num_splits == 1
    assert choose(8, 1, 0, H200).num_splits == 1


@given(rows=counts, batch=counts, kv_len=lengths, device=st.sampled_from(DEVICES), cap=st.integers(1, 1024))
def test_splits_stay_within_their_bounds(rows, batch, kv_len, device, cap):
    choice = choose(rows, batch, kv_len, device, max_splits=cap)
    assert 1 <= choice.num_splits <= min(cap, combine.MAX_SPLITS)
    assert choice.num_splits == 1 or kv_len >= choice.num_splits * TOKENS_PER_SPLIT - 15


@given(rows=counts, batch=st.integers(1, 64), kv_len=lengths, device=st.sampled_from(DEVICES))
def test_no_split_is_empty(rows, batch, kv_len, device):
    splits = choose(rows, batch, kv_len, device).num_splits
    tiles = max(1, -(-kv_len // 16))
    assert (splits - 1) * -(-tiles // splits) < tiles


@given(rows=counts, batch=st.integers(1, 64), kv_len=lengths, device=st.sampled_from(DEVICES))
def test_more_work_never_looks_much_cheaper(rows, batch, kv_len, device):
    """Waves and splits come in whole numbers, so a little is allowed."""
    time = choose(rows, batch, kv_len, device).predicted_us
    for more in (
        choose(rows + 16, batch, kv_len, device),
        choose(rows, batch + 1, kv_len, device),
        choose(rows, batch, kv_len + 1024, device),
    ):
        assert more.predicted_us >= 0.85 * time


@given(rows=counts, batch=st.integers(1, 64), kv_len=lengths)
def test_a_faster_gpu_is_never_predicted_slower(rows, batch, kv_len):
    slow = choose(rows, batch, kv_len, PRO_6000)
    speed = speed_of(PRO_6000)
    fast = Speed(2 * speed.dram_gbps, 2 * speed.l2_gbps, 1.5 * speed.sm_ghz, speed.mma_clocks / 2)
    assert choose(rows, batch, kv_len, PRO_6000, speed=fast).predicted_us <= slow.predicted_us


@given(rows=counts, batch=counts, kv_len=lengths, device=st.sampled_from(DEVICES))
def test_no_prediction_beats_the_memory(rows, batch, kv_len, device):
    floor = batch * kv_len * 1152 / speed_of(device).dram_gbps / 1e3
    assert choose(rows, batch, kv_len, device).predicted_us > floor


FP8_DEVICES = [H200, PRO_6000, apply_budget(H200, "sm_120"), Device.for_arch("sm_89")]


@given(
    rows=counts,
    batch=counts,
    kv_len=lengths,
    device=st.sampled_from(FP8_DEVICES),
    kv_dtype=st.sampled_from(list(FP8_ROW_CLASSES)),
)
def test_caches_of_8_bits_are_bound_by_their_own_bytes(rows, batch, kv_len, device, kv_dtype):
    choice = choose(rows, batch, kv_len, device, kv_dtype=kv_dtype)
    assert choice.config in [c.config for c in FP8_ROW_CLASSES[kv_dtype]]
    assert choice.config.shared_bytes(kv_dtype) <= device.shared_per_block
    assert choice.predicted_us > batch * kv_len * row_bytes(kv_dtype) / speed_of(device).dram_gbps / 1e3


@pytest.mark.parametrize("kv_dtype", FP8_ROW_CLASSES)
def test_few_rows_over_8_bits_are_predicted_to_take_less_time(kv_dtype):
    for rows in (8, 16):
        for batch, kv_len in ((1, 65_536), (32, 8192), (32, 65_536)):
            short, long = (choose(rows, batch, kv_len, PRO_6000, kv_dtype=name) for name in (kv_dtype, "bfloat16"))
            assert short.predicted_us < long.predicted_us


def test_lists_of_slots_of_8_bits_take_the_kernel_that_reads_them():
    for kv_dtype in FP8_ROW_CLASSES:
        assert choose(512, 64, 2048, PRO_6000, is_sparse=True, kv_dtype=kv_dtype).config.kernel == "mma_narrow"


@pytest.mark.parametrize("kv_dtype", FP8_ROW_CLASSES)
def test_as_many_blocks_share_an_sm_as_are_counted_on(kv_dtype):
    for device in FP8_DEVICES:
        for row_class in FP8_ROW_CLASSES[kv_dtype]:
            assert blocks_per_sm(row_class.config, device, kv_dtype) == row_class.blocks_per_sm


def test_memory_is_the_limit_of_8_to_64_rows_on_sm_120():
    for rows in (8, 16, 32, 64):
        assert "limit: memory" in choose(rows, 32, 32_768, PRO_6000).reasons[2]


def test_tensor_cores_are_counted():
    """Half the rate doubles the time of a tile where they are the limit."""
    full = choose(1024, 8, 65_536, PRO_6000)
    half = choose(1024, 8, 65_536, PRO_6000, speed=replace(speed_of(PRO_6000), mma_clocks=8))
    assert half.predicted_us == pytest.approx(2 * full.predicted_us, rel=0.1)


def test_reasons_name_rows_splits_and_limit():
    rows, splits, limit = choose(16, 32, 8192, H200).reasons
    assert "16 rows" in rows
    assert "4 splits of 2048 tokens: 128 blocks on 132 SMs" in splits
    assert "memory" in limit


def test_speed_comes_from_the_name_then_the_architecture():
    assert speed_of(H200).dram_gbps == 4800
    assert speed_of(Device.for_arch("sm_90")).dram_gbps == 3350
    assert speed_of(replace(PRO_6000, name="NVIDIA GeForce RTX 5090")).mma_clocks == 8
    assert speed_of(PRO_6000).mma_clocks == 4


def test_configurations_that_do_not_fit_are_not_chosen():
    least = min(c.config.shared_bytes() for c in ROW_CLASSES if c.blocks_per_sm == 1)
    with pytest.raises(TileError, match=f"at least {least} bytes") as caught:
        choose(8, 1, 4096, replace(PRO_6000, shared_per_block=least - 1))
    assert (caught.value.shared_bytes, caught.value.shared_limit) == (least, least - 1)
    assert choose(64, 1, 65_536, replace(PRO_6000, shared_per_block=least)).config.shared_bytes() == least


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_counts_must_make_sense(wrong):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        choose(*wrong, H200)
