"""`deterministic=True` on the emulator: a row's bits depend on its own q and tokens alone."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deterministic_cases import (
    BASE,
    BATCH,
    DTYPES,
    assert_same_bits,
    decode,
    large_values,
    request,
    roomy,
    wide_scores,
)
from verify_cases import CASES

from mlaflash import combine, oracle, schedule
from mlaflash.emulator import mla_verify, run_kernel
from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.jit import compile_kernel, sources
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import NARROW, NARROW_PAIR, feature_defines
from mlaflash.params import new_params, numpy_dtype
from mlaflash.schedule import CHUNK_TOKENS
from mlaflash.tiles import TileConfig, dtype_defines


def verify(arguments: dict[str, Any], **extra: Any) -> tuple[np.ndarray, np.ndarray]:
    return mla_verify(**arguments, **extra, deterministic=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b8_a_row_is_the_same_alone_in_a_batch_and_as_a_decode_call(dtype: str) -> None:
    arguments = build(replace(BATCH, dtype=dtype), 1)
    out, lse = verify(arguments)
    for index, q_len in enumerate(BATCH.q_lens):
        if q_len == 0:
            continue
        alone = request(arguments, index)
        begin = arguments["qo_indptr"][index]
        assert_same_bits(verify(alone, seed=index), (out[begin : begin + q_len], lse[begin : begin + q_len]))
        for token in {0, q_len // 2, q_len - 1}:
            row = begin + token
            assert_same_bits(verify(decode(alone, token)), (out[row : row + 1], lse[row : row + 1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right(dtype: str) -> None:
    arguments = build(replace(BATCH, dtype=dtype), 1)
    result = compare(*verify(arguments), *oracle.mla_verify(**arguments), tolerance(dtype, dtype))
    assert result.passed, result.reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_right(case: Case) -> None:
    """Tensor cores where the case is float32 too: that kernel has the longer way to go."""
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    arguments = build(replace(case, dtype=dtype), 2)
    result = compare(*verify(arguments), *oracle.mla_verify(**arguments), tolerance(dtype, dtype))
    assert result.passed, result.reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 8, 12])
def test_a_row_is_the_same_beside_any_heads(dtype: str, heads: int) -> None:
    arguments = build(replace(BASE, heads=16, q_lens=(3,), kv_lens=(CHUNK_TOKENS + 1,), dtype=dtype), 2)
    out, lse = verify(arguments)
    fewer = verify(arguments | {"q": arguments["q"][:, :heads]})
    assert_same_bits(fewer, (out[:, :heads], lse[:, :heads]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_bounds_the_lengths(dtype: str) -> None:
    """One chunk with the bound of one, of many, and of the page table."""
    arguments = request(build(replace(BATCH, dtype=dtype), 4), 7)
    tight = verify(arguments, max_kv_len=90, max_q_len=2)
    assert_same_bits(verify(arguments), tight)
    for chunks in (2, 9, 100):
        assert_same_bits(verify(roomy(arguments, chunks)), tight)


@pytest.mark.parametrize("runs", [1, 2, 3, 7])
def test_a_row_is_the_same_however_blocks_share_the_chunks(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = build(BATCH, 5)
    expected = verify(arguments)
    monkeypatch.setattr(schedule, "_chunk_runs", lambda *_: runs)
    assert_same_bits(verify(arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_every_order_of_threads(dtype: str) -> None:
    arguments = build(replace(BASE, dtype=dtype), 6)
    first = verify(arguments, seed=1)
    for seed in (2, 3):
        assert_same_bits(verify(arguments, seed=seed), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 48, 64])
def test_a_row_is_the_same_wherever_its_tokens_lie(dtype: str, page_size: int) -> None:
    arguments = build(replace(BASE, dtype=dtype, q_lens=(3,), kv_lens=(300,), addressing="dense"), 7)
    expected = verify(arguments)
    rows = arguments["kv_cache"].reshape(-1, 576)[:300]
    pages = -(-300 // page_size)
    order = np.random.default_rng(page_size).permutation(pages + 1)[:pages]
    pool = np.full((pages + 1, page_size, 576), np.nan, rows.dtype)
    for token, row in enumerate(rows):
        pool[order[token // page_size], token % page_size] = row
    moved = {"kv_cache": pool, "page_size": page_size}
    for ids in ("int32", "int64"):
        assert_same_bits(verify(arguments | moved | {"block_table": order[None].astype(ids)}), expected)
    cache = (pool[..., :512].copy(), pool[..., 512:].copy())
    assert_same_bits(
        verify(arguments | moved | {"block_table": order[None].astype("int32"), "kv_cache": cache}), expected
    )
    new = arguments | moved | {"block_table": order[None].astype("int32"), "new_kv": rows[-3:].copy()}
    assert_same_bits(verify(new), expected)


def test_a_row_is_the_same_where_float32_rows_are_not_aligned() -> None:
    arguments = build(replace(BASE, dtype="float32", q_lens=(3,), kv_lens=(60,)), 17)
    room = np.zeros((3, 8, 577), np.float32)
    room[..., 1:] = arguments["q"]
    assert_same_bits(verify(arguments | {"q": room[..., 1:]}), verify(arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_under_every_mask_that_shows_it_the_same(dtype: str) -> None:
    arguments = build(replace(BASE, dtype=dtype, kv_lens=(CHUNK_TOKENS + 3,)), 8)
    out, lse = verify(arguments)
    assert_same_bits(verify(arguments | {"mask": TreeMask.causal([8])}), (out, lse))
    # Rows 2 and 7 see what they saw, the others something else.
    seen = np.random.default_rng(8).random((8, 8)) < 0.5
    seen[[2, 7]] = np.tril(np.ones((8, 8), bool))[[2, 7]]
    mixed = verify(arguments | {"mask": TreeMask.from_dense([seen])})
    assert_same_bits((mixed[0][[2, 7]], mixed[1][[2, 7]]), (out[[2, 7]], lse[[2, 7]]))
    # A token in the middle of a tree as a call of its own, with the same holes.
    alone = decode(arguments, 7) | {"q": arguments["q"][4:5], "mask": TreeMask.from_packed(_words(seen[4]), 8)}
    assert_same_bits(verify(alone | {"tail_lens": np.array([8], np.int32)}), (mixed[0][4:5], mixed[1][4:5]))


def _words(row: np.ndarray) -> np.ndarray:
    return np.array([[sum(1 << j for j, bit in enumerate(row) if bit)]], np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart(dtype: str) -> None:
    """Bases move at different tokens in different rows, and float16 weights become subnormal."""
    arguments = wide_scores(dtype)
    out, lse = verify(arguments)
    result = compare(out, lse, *oracle.mla_verify(**arguments), tolerance(dtype, dtype))
    assert result.passed, result.reason
    for token in range(8):
        row = slice(token, token + 1)
        assert_same_bits(verify(decode(arguments, token)), (out[row], lse[row]))
        few = decode(arguments, token)
        assert_same_bits(verify(few | {"q": few["q"][:, 3:5]}), (out[row, 3:5], lse[row, 3:5]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_values_that_other_rows_see(dtype: str) -> None:
    arguments, small = large_values(dtype)
    out, lse = verify(arguments, out_dtype="float32")
    assert np.abs(out[0]).max() < 10 * small < 0.1 < out[7].max()
    assert_same_bits(verify(decode(arguments, 0), out_dtype="float32"), (out[:1], lse[:1]))


def test_padding_and_rows_that_see_nothing_are_empty() -> None:
    arguments = build(replace(BASE, q_lens=(9, 0), kv_lens=(4, 0), heads=4), 10)
    padded = np.concatenate([arguments["q"], np.full((3, 4, 576), np.nan, arguments["q"].dtype)])
    out, lse = verify(roomy(arguments | {"q": padded}, 3))
    for rows in (slice(0, 5), slice(9, 12)):
        assert not out[rows].any()
        assert np.all(np.isneginf(lse[rows]))
    assert np.isfinite(lse[5:9]).all()


def test_a_batch_of_padding_alone() -> None:
    arguments = build(replace(BASE, q_lens=(), kv_lens=()), 11)
    out, lse = verify(arguments | {"q": np.zeros((2, 8, 576), numpy_dtype("bfloat16"))}, max_q_len=2)
    assert not out.any()
    assert np.all(np.isneginf(lse))


def test_chunks_without_tokens_are_neither_written_nor_read() -> None:
    reports: list[Any] = []
    arguments = build(replace(BASE, q_lens=(1, 1), kv_lens=(10, CHUNK_TOKENS + 1)), 12)
    verify(roomy(arguments, 20), max_kv_len=20 * CHUNK_TOKENS, reports=reports)
    partial_bytes = 3 * 8 * 512 * 2
    assert reports[0].bytes_written["partial_out"] == reports[1].bytes_read["partial_out"] == partial_bytes
    assert reports[0].bytes_written["partial_lse"] == 20 * 2 * 8 * 4


@pytest.mark.parametrize("chunks", [1, 5, 9, 33, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merge_knows_neither_the_number_of_chunks_nor_of_warps(chunks: int, dtype: str) -> None:
    rng = np.random.default_rng(chunks)
    values = rng.standard_normal((chunks, 16, 512)).astype(numpy_dtype(dtype))
    logs = (8 * rng.standard_normal((chunks, 16))).astype(np.float32)
    logs[rng.random(logs.shape) < 0.2] = -np.inf
    expected = merge(values, logs, chunks, 4)
    for total, warps in ((chunks, 1), (chunks + 1, 4), (2 * chunks + 30, 1), (4 * chunks, 4)):
        assert_same_bits(merge(values, logs, total, warps), expected)


def merge(values: np.ndarray, logs: np.ndarray, total: int, warps: int) -> tuple[np.ndarray, np.ndarray]:
    """Run `combine` on 2 tokens of 8 heads with empty chunks behind those given."""
    partial_out = np.full((total, 16, 512), np.nan, values.dtype)
    partial_lse = np.full((16, total), -np.inf, np.float32)
    partial_out[: len(values)], partial_lse[:, : len(logs)] = values, logs.T
    arrays = {
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "out": np.full((2, 8, 512), np.nan, np.float32),
        "lse": np.full((2, 8), np.nan, np.float32),
    }
    params = new_params(
        **{name: array.ctypes.data for name, array in arrays.items()},
        num_tokens=2,
        num_heads=8,
        num_splits=total,
        out_stride_t=8 * 512,
        out_stride_h=512,
        lse_stride_t=8,
        lse_stride_h=1,
    )
    defines = dtype_defines("bfloat16", "float32", values.dtype.name)
    defines |= {"SPLIT_WARPS": warps, "DETERMINISTIC": CHUNK_TOKENS}
    run_kernel("combine", defines, (16, warps, 1), 128, combine.chunk_shared_bytes(), params, arrays)
    return arrays["out"], arrays["lse"]


def check_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold rows of one problem against the same ones in calls of other heads, tokens, bounds and blocks."""
    arguments = wide_scores("float16")
    out, lse = verify(arguments, out_dtype="float32")
    fewer_heads = verify(arguments | {"q": arguments["q"][:, 3:4]}, out_dtype="float32")
    assert_same_bits(fewer_heads, (out[:, 3:4], lse[:, 3:4]))
    assert_same_bits(verify(decode(arguments, 0), out_dtype="float32"), (out[:1], lse[:1]))
    assert_same_bits(verify(roomy(arguments, 20), out_dtype="float32"), (out, lse))
    monkeypatch.setattr(schedule, "_chunk_runs", lambda *_: 1)
    assert_same_bits(verify(arguments, out_dtype="float32"), (out, lse))


OWN_BASE = "return maximum > base + RESCALE_ABOVE ? ceil_f32(maximum) : base;"


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("include/mma.cuh", OWN_BASE, "return max_f32(base, maximum);"),
        ("include/mma.cuh", OWN_BASE, "return max_f32(base, ceil_f32(maximum));"),
        ("include/work.cuh", "/ grid_dim_y() * CHUNK_TILES", "* CHUNK_TILES / grid_dim_y()"),
        ("mma_narrow.cu", "(tile + 1) % CHUNK_TILES != 0", "true"),
        ("combine.cu", "sums[i % CLASSES]", "sums[0]"),
    ],
)
def test_arithmetic_that_depends_on_the_call_is_noticed(
    file: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check_one_row(patch)
    folder = Path(shutil.copytree(sources.kernel_root(), tmp_path / "kernels"))
    text = (folder / file).read_text()
    assert text.count(right) == 1
    (folder / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr("mlaflash.jit.sources.kernel_root", lambda: folder)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_one_row(monkeypatch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_it_compiles_without_spills(arch: str) -> None:
    chunk = {"DETERMINISTIC": CHUNK_TOKENS}
    bfloat16 = dtype_defines("bfloat16", "bfloat16", "bfloat16") | chunk
    builds = [
        ("mma_narrow", bfloat16 | NARROW_PAIR.defines() | feature_defines(0.0, False, False)),
        ("mma_narrow", bfloat16 | NARROW_PAIR.defines() | feature_defines(30.0, True, True)),
        ("tile", dtype_defines("float32", "float32", "float32") | chunk | TileConfig(tk=32).defines()),
        *(("combine", bfloat16 | {"SPLIT_WARPS": warps}) for warps in (1, 4)),
    ]
    for kernel, defines in builds:
        compiled = compile_kernel(kernel, defines, arch)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": "mma_wide"},
        {"kernel": "tile"},
        {"kernel": "naive"},
        {"tiles": NARROW},
        {"tiles": replace(NARROW_PAIR, nsplit=3)},
        {"tiles": TileConfig()},
        {"kernel": "mma_narrow", "tiles": NARROW},
    ],
    ids=str,
)
def test_another_kernel_or_other_constants_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"deterministic is set.*Leave kernel and tiles out"):
        verify(build(BASE, 13), **wrong)


def test_its_own_kernel_and_constants_may_be_named() -> None:
    arguments = build(replace(BASE, q_lens=(1,), kv_lens=(20,)), 14)
    assert_same_bits(verify(arguments, kernel="mma_narrow", tiles=NARROW_PAIR), verify(arguments))


def test_rows_that_tensor_cores_do_not_take_are_refused() -> None:
    arguments = build(BASE, 15)
    q = np.zeros((8, 8, 577), arguments["q"].dtype)[..., 1:]
    with pytest.raises(UnsupportedError, match=r"deterministic is set, and mma_narrow.*16 bytes"):
        verify(arguments | {"q": q})


def test_more_chunks_than_the_merge_takes_are_refused() -> None:
    most = combine.MAX_CHUNKS * CHUNK_TOKENS
    arguments = roomy(build(BASE, 16), combine.MAX_CHUNKS + 1)
    with pytest.raises(UnsupportedError, match=rf"max_kv_len is {most + 1}.*{most}\. Give max_kv_len"):
        verify(arguments, max_kv_len=most + 1)
    assert_same_bits(verify(arguments, max_kv_len=most), verify(build(BASE, 16)))
