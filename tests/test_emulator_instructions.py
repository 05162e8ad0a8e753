"""Every function of the instruction header against a plain loop, on the emulator and, where there is one, on a GPU."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlaflash import jit
from mlaflash.device import Device
from mlaflash.emulator import Report, run_kernel
from mlaflash.jit.sources import kernel_root

KERNEL = Path(__file__).parent / "kernels" / "instructions.cu"
PARAMS = np.dtype(
    [("a", "u8"), ("b", "u8"), ("out", "u8"), ("counter", "u8"), ("op", "i4"), ("variant", "i4"), ("threads", "i4")],
    align=True,
)
OPS = [
    *("indices", "global_copies", "shared_copies", "ldmatrix", "matrix_transpose", "mma", "conversions"),
    *("arithmetic", "async_groups", "async_fill", "async_ring", "bulk_ring", "named_barriers", "shared_atomics"),
    *("global_atomics", "shuffles", "hints", "async_words", "rings_in_turn"),
]
SEEDS = range(4)

Run = Callable[..., np.ndarray]


def on_emulator(
    op: str,
    a: np.ndarray,
    out: np.ndarray,
    *,
    b: np.ndarray | None = None,
    variant: int = 0,
    grid: tuple[int, ...] = (1,),
    block: int = 32,
    shared_bytes: int = 4096,
    **keywords: Any,
) -> tuple[np.ndarray, Report]:
    out = out.copy()
    b = np.zeros(4, np.uint32) if b is None else b.copy()
    counter = np.zeros(1, np.uint32)
    arrays = {"a": a, "b": b, "out": out, "counter": counter}
    params = np.zeros(1, PARAMS)
    for name, array in arrays.items():
        params[name] = array.ctypes.data
    params["op"], params["variant"], params["threads"] = OPS.index(op), variant, block
    report = run_kernel(KERNEL, {}, grid, block, shared_bytes, params, arrays, **keywords)
    return out, report


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what an instruction's case writes, for every seed the same."""

    def emulate(op: str, a: np.ndarray, out: np.ndarray, **keywords: Any) -> np.ndarray:
        results = [on_emulator(op, a, out, seed=seed, **keywords)[0] for seed in SEEDS]
        for result in results[1:]:
            assert result.tobytes() == results[0].tobytes()
        return results[0]

    def launch(op: str, a: np.ndarray, out: np.ndarray, **keywords: Any) -> np.ndarray:
        import cupy

        root = tmp_path / "kernels"
        shutil.copytree(kernel_root() / "include", root / "include", dirs_exist_ok=True)
        shutil.copy(KERNEL, root)
        monkeypatch.setattr("mlaflash.jit.sources.kernel_root", lambda: root)
        block, shared_bytes = keywords.get("block", 32), keywords.get("shared_bytes", 4096)
        b = keywords.get("b")
        arrays = {
            "a": cupy.asarray(a.view(np.uint8)),
            "b": cupy.asarray((np.zeros(4, np.uint32) if b is None else b).view(np.uint8)),
            "out": cupy.asarray(out.view(np.uint8)),
            "counter": cupy.zeros(1, np.uint32),
        }
        params = np.zeros(1, PARAMS)
        for name, array in arrays.items():
            params[name] = array.data.ptr
        params["op"], params["variant"], params["threads"] = OPS.index(op), keywords.get("variant", 0), block
        kernel = jit.load("instructions", {}, Device.current(), shared_bytes)
        kernel.launch((*keywords.get("grid", (1,)), 1, 1)[:3], block, params)
        return cupy.asnumpy(arrays["out"]).view(out.dtype).reshape(out.shape)

    return emulate if request.param == "emulator" else launch


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def test_both_headers_have_the_same_functions_and_each_has_a_case() -> None:
    def functions(path: Path) -> set[str]:
        return set(re.findall(r"^DEVICE\s+\w+[\s*]+(\w+)\(", path.read_text(), re.MULTILINE))

    device = functions(kernel_root() / "include" / "ptx.cuh")
    assert len(device) > 80
    assert functions(kernel_root() / "host" / "ptx.h") == device
    cases = KERNEL.read_text()
    assert [name for name in sorted(device) if not re.search(rf"\b{name}\b", cases)] == []


def test_indices(run: Run) -> None:
    grid, block = (3, 2, 4), 64
    out = run("indices", np.zeros(4, np.uint32), np.zeros((24, 64, 8), np.uint32), grid=grid, block=block)
    for z in range(4):
        for y in range(2):
            for x in range(3):
                for t in range(block):
                    assert out[(z * 2 + y) * 3 + x, t].tolist() == [t, x, y, z, 3, 2, 4, t % 32]


GLOBAL_BYTES = [2, 4, 8, 4, 8, 16, 8, 16, 4, 4, 8, 16, 16, 4, 4, 2, 1, 8, 4, 8, 16]


@pytest.mark.parametrize("variant", range(len(GLOBAL_BYTES)))
def test_global_loads_and_stores(run: Run, rng: np.random.Generator, variant: int) -> None:
    a = rng.integers(0, 256, 64 * GLOBAL_BYTES[variant], dtype=np.uint8)
    assert run("global_copies", a, np.zeros_like(a), variant=variant, block=64).tolist() == a.tolist()


@pytest.mark.parametrize(("variant", "width"), list(enumerate([4, 8, 16, 4, 8, 16])))
def test_shared_loads_and_stores(run: Run, rng: np.random.Generator, variant: int, width: int) -> None:
    a = rng.integers(0, 256, (256, width), dtype=np.uint8)
    out = run("shared_copies", a, np.zeros_like(a), variant=variant, block=256)
    for t in range(256):
        assert out[t].tolist() == a[255 - t].tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(run: Run, rng: np.random.Generator, transposed: bool) -> None:
    a = rng.integers(0, 2**16, 2048, dtype=np.uint16)
    offsets = rng.integers(0, 256, 32).astype(np.uint32) * 16
    out = run("ldmatrix", a, np.zeros((32, 4, 2), np.uint16), b=offsets, variant=int(transposed))
    for lane in range(32):
        for matrix in range(4):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if transposed:
                    row, column = column, row
                assert out[lane, matrix, half] == a[offsets[matrix * 8 + row] // 2 + column]


def test_movmatrix(run: Run, rng: np.random.Generator) -> None:
    a = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    assert run("matrix_transpose", a, np.zeros((8, 8), np.uint16)).tolist() == a.T.tolist()


def mma_matrices(a: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gather A, B and C from the lanes' registers as the PTX manual draws them."""
    matrix_a, matrix_b, matrix_c = np.zeros((16, 16), a.dtype), np.zeros((16, 8), a.dtype), np.zeros((16, 8))
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(8):
            row = group if i % 4 < 2 else group + 8
            column = thread * 2 + (i & 1) + (0 if i < 4 else 8)
            matrix_a[row, column] = a[lane, i]
        for i in range(4):
            matrix_b[thread * 2 + (i & 1) + (0 if i < 2 else 8), group] = a[lane, 8 + i]
        for i in range(4):
            matrix_c[group if i < 2 else group + 8, thread * 2 + (i & 1)] = c[lane, i]
    return matrix_a, matrix_b, matrix_c


@pytest.mark.parametrize("values", ["normal", "special", "subnormal"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_mma(run: Run, rng: np.random.Generator, dtype: Any, values: str) -> None:
    a = rng.standard_normal((32, 16)).astype(dtype)
    c = rng.standard_normal((32, 4)).astype(np.float32)
    if values == "special":
        a[3, 1], a[7, 9], a[20, 4] = np.inf, -np.inf, np.nan
        c[30, 2] = np.inf
    elif values == "subnormal":
        # Products of the least float16 values, and bfloat16 values below float32's normal range, are not flushed.
        least = ml_dtypes.finfo(dtype).smallest_subnormal
        a[:, :8] = (a[:, :8].astype(np.float64) * 8).round() * float(least)
        c[:] = 0
    out = run("mma", a, np.zeros((32, 4), np.float32), b=c, variant=int(dtype is np.float16))
    matrix_a, matrix_b, matrix_c = (m.astype(np.float64) for m in mma_matrices(a, c))
    got = mma_matrices(a, out)[2]
    for row in range(16):
        for column in range(8):
            products = [matrix_a[row, k] * matrix_b[k, column] for k in range(16)]
            with np.errstate(invalid="ignore"):
                expected = sum(products, matrix_c[row, column])
            scale = sum(abs(x) for x in products) + abs(matrix_c[row, column])
            if np.isfinite(expected):
                # A tensor core truncates what it aligns to the largest product.
                assert abs(got[row, column] - expected) <= scale * 2.0**-20
                assert got[row, column] != 0 or abs(expected) <= scale * 2.0**-20
            else:
                assert repr(float(got[row, column])) == repr(float(expected))
    if values == "special":
        assert np.isnan(got).any()
        assert np.isinf(got).any()
    assert np.isfinite(got).any()


def float_samples(rng: np.random.Generator) -> np.ndarray:
    """Return random bit patterns, and every kind of rounding tie and edge of both 16-bit formats."""
    exact = np.arange(0, 2**16, 7, dtype=np.uint16)
    f16, bf16 = exact.view(np.float16).astype(np.float32), (exact.astype(np.uint32) << 16).view(np.float32)
    finite = f16[np.isfinite(f16)]
    ties = [finite[:-1] / 2 + finite[1:] / 2, ((exact.astype(np.uint32) << 16) | 0x8000).view(np.float32)]
    near = [np.nextafter(ties[0], np.float32(0)), np.nextafter(ties[0], np.float32(np.inf))]
    f16_edges = [65504, 65519.996, 65520, -65520, 65536, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0000001, 2.0**-26, 2.0**-14]
    bf16_edges = [3.4e38, 3.3895e38, 3.396e38, 1e-45, -1e-45, 2.0**-14 - 2.0**-26, 2.0**-126, 2.0**-133]
    edges = np.array([0, -0.0, np.inf, -np.inf, *f16_edges, *bf16_edges], np.float32)
    parts = [f16, bf16, *ties, *near, edges, words(rng, 20000).view(np.float32)]
    samples = np.concatenate([part.ravel() for part in parts])
    return samples[: samples.size // 512 * 512]


@pytest.mark.parametrize("variant", [0, 1])
def test_packing(run: Run, rng: np.random.Generator, variant: int) -> None:
    dtype: Any = (ml_dtypes.bfloat16, np.float16)[variant]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = float_samples(rng)
        expected = values.astype(dtype).view(np.uint16)
    # The instruction has one NaN.
    expected[np.isnan(values)] = 0x7FFF
    out = run(
        "conversions", values, np.zeros(values.size, np.uint16), variant=variant, grid=(values.size // 512,), block=256
    )
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("variant", [2, 3])
def test_unpacking(run: Run, variant: int) -> None:
    dtype: Any = (np.float16, ml_dtypes.bfloat16)[variant - 2]
    bits = np.arange(2**16, dtype=np.uint16)
    out = run("conversions", bits, np.zeros(2**16, np.float32), variant=variant, grid=(256,), block=256)
    expected = bits.view(dtype).astype(np.float32)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(np.signbit(out[expected == 0]), np.signbit(expected[expected == 0]))


def test_every_e4m3_number(run: Run) -> None:
    codes = np.arange(1024, dtype=np.uint32).astype(np.uint8)
    out = run("conversions", codes, np.zeros(1024, np.float16), variant=4, block=256)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    np.testing.assert_array_equal(out, expected)
    assert np.array_equal(np.signbit(out[expected == 0]), np.signbit(expected[expected == 0]))
    assert np.isnan(out).sum() == 8


def arithmetic(run: Run, variant: int, a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    padding = -a.size % 256
    a = np.concatenate([a, np.ones(padding, a.dtype)])
    b = np.ones_like(a) if b is None else np.concatenate([b, np.ones(padding, a.dtype)])
    out = run("arithmetic", a, np.zeros_like(a), b=b, variant=variant, grid=(a.size // 256,), block=256)
    return out[: a.size - padding]


def test_ex2(run: Run, rng: np.random.Generator) -> None:
    x = rng.uniform(-140, 140, 2000).astype(np.float32)
    got = arithmetic(run, 0, x)
    for i in range(x.size):
        expected = 2.0 ** float(x[i])
        if expected < 2.0**-126:
            assert got[i] in (0.0, 2.0**-126)
            assert got[i] == 0 or expected > 2.0**-126 * (1 - 1e-6)
        elif expected > 3.40283e38:
            assert got[i] == np.inf or expected < 3.4029e38
        else:
            assert abs(got[i] - expected) <= 2.0**-21 * expected
    special = np.array([-np.inf, np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-40, -126, -127, -200], np.float32)
    expected_special = np.array([0, np.inf, np.nan, 1, 1, 1, 1, 2.0**-126, 0, 0], np.float32)
    assert np.array_equal(arithmetic(run, 0, special), expected_special, equal_nan=True)


def test_lg2(run: Run, rng: np.random.Generator) -> None:
    x = (2.0 ** rng.uniform(-126, 127, 2000)).astype(np.float32)
    got = arithmetic(run, 1, x)
    for i in range(x.size):
        assert abs(got[i] - np.log2(np.float64(x[i]))) <= 2.0**-20 * max(1.0, abs(np.log2(np.float64(x[i]))))
    special = np.array([0.0, -0.0, 1e-45, 1e-38, -1e-40, np.inf, np.nan, -1.0, 1.0, 2.0**-126], np.float32)
    expected = np.array([-np.inf] * 5 + [np.inf, np.nan, np.nan, 0, -126], np.float32)
    # The instruction is an approximation: on a GPU the logarithm of 2**-126 is one unit off.
    np.testing.assert_allclose(arithmetic(run, 1, special), expected, rtol=2.0**-22)


def test_the_maximum_of_two_zeros_is_the_positive_one(run: Run) -> None:
    zeros = np.array([0.0, -0.0, 0.0, -0.0, -1.0, -0.0], np.float32)
    others = np.array([-0.0, 0.0, 0.0, -0.0, -0.0, np.nan], np.float32)
    assert np.signbit(arithmetic(run, 4, zeros, others)).tolist() == [False, False, False, True, True, True]


def test_tanh(run: Run, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.standard_normal(500) * 3, [0, 100, -100, np.inf, -np.inf, np.nan]]).astype(np.float32)
    got = arithmetic(run, 2, x)
    assert np.allclose(got, np.tanh(x.astype(np.float64)), rtol=1e-6, atol=1e-7, equal_nan=True)


def test_fma_rounds_once(run: Run) -> None:
    # (1 + e)(1 - e) - ... : the product alone would round to 1, and the sum with 1 to 2.
    a = np.array([1 + 2.0**-12, 3.0, np.inf, 1 + 2.0**-23], np.float32)
    b = np.array([-(1 + 2.0**-12), 4.0, 0.0, -(1 - 2.0**-23)], np.float32)
    with np.errstate(invalid="ignore"):
        expected = (a.astype(np.float64) * b.astype(np.float64) + 1.0).astype(np.float32)
    assert np.array_equal(arithmetic(run, 3, a, b), expected, equal_nan=True)


def test_max_prefers_numbers(run: Run) -> None:
    a = np.array([1, np.nan, 2, -np.inf, np.nan], np.float32)
    b = np.array([3, 4, np.nan, -5, np.nan], np.float32)
    assert np.array_equal(arithmetic(run, 4, a, b), np.float32([3, 4, 2, -5, np.nan]), equal_nan=True)


def test_ceil(run: Run, rng: np.random.Generator) -> None:
    special = np.array([2.0, 2.25, -2.25, -0.5, 0.0, 1e-45, 2.0**23, -np.inf, np.inf, np.nan], np.float32)
    a = np.concatenate([special, rng.uniform(-300, 300, 500).astype(np.float32)])
    assert np.array_equal(arithmetic(run, 8, a), np.ceil(a), equal_nan=True)


def test_mul_hi(run: Run, rng: np.random.Generator) -> None:
    a, b = words(rng, 512), words(rng, 512)
    a[:2], b[:2] = 0xFFFFFFFF, (0xFFFFFFFF, 1)
    got = arithmetic(run, 5, a.view(np.float32), b.view(np.float32)).view(np.uint32)
    assert got.tolist() == [int(x) * int(y) >> 32 for x, y in zip(a, b, strict=True)]


def test_permute_bytes(run: Run, rng: np.random.Generator) -> None:
    a, b = words(rng, 512), words(rng, 512)
    got = arithmetic(run, 9, a.view(np.float32), b.view(np.float32)).view(np.uint8).reshape(-1, 4)
    low, high = a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)
    even, odd = np.concatenate([low, high], 1)[:, ::2], np.concatenate([high, low], 1)[:, 1::2]
    assert got.tolist() == (even ^ odd).tolist()


def test_max_of_halves(run: Run, rng: np.random.Generator) -> None:
    a, b = words(rng, 512), words(rng, 512)
    got = arithmetic(run, 10, a.view(np.float32), b.view(np.float32)).view(np.uint16)
    assert got.tolist() == np.maximum(a.view(np.uint16), b.view(np.uint16)).tolist()


def test_mad_wide(run: Run, rng: np.random.Generator) -> None:
    a, b = words(rng, 512), words(rng, 512)
    a[:2], b[:2] = 0x80000000, (0x80000000, 0xFFFFFFFF)
    low, high = (arithmetic(run, variant, a.view(np.float32), b.view(np.float32)).view(np.uint32) for variant in (6, 7))
    for i in range(a.size):
        expected = int(a.view(np.int32)[i]) * int(b.view(np.int32)[i]) + (int(a[i]) << 20)
        assert int(high[i]) << 32 | int(low[i]) == expected % 2**64


def test_cp_async_groups(run: Run, rng: np.random.Generator) -> None:
    a = words(rng, 64, 16)
    assert run("async_groups", a, np.zeros_like(a), block=64).tolist() == a.tolist()


def test_cp_async_of_words(run: Run, rng: np.random.Generator) -> None:
    a = words(rng, 64)
    assert run("async_words", a, np.zeros_like(a), block=64).tolist() == a[::-1].tolist()


@pytest.mark.parametrize("width", [16, 4])
def test_cp_async_zero_fill(run: Run, rng: np.random.Generator, width: int) -> None:
    a = rng.integers(1, 256, (32, width), dtype=np.uint8)
    sizes = (np.arange(32) % (width + 1)).astype(np.uint32)
    out = run("async_fill", a, np.full_like(a, 9), b=sizes, variant=int(width == 4))
    for t in range(32):
        assert out[t].tolist() == a[t, : sizes[t]].tolist() + [0] * (width - sizes[t])


@pytest.mark.parametrize("tiles", [0, 1, 2, 7])
@pytest.mark.parametrize("op", ["async_ring", "bulk_ring", "rings_in_turn"])
def test_rings_of_asynchronous_copies(run: Run, rng: np.random.Generator, op: str, tiles: int) -> None:
    a = words(rng, max(tiles, 1), 64, 4)
    out = run(op, a, np.zeros_like(a), variant=tiles, block=128)
    assert out[:tiles].tolist() == a[:tiles, ::-1].tolist()


def test_named_barriers(run: Run, rng: np.random.Generator) -> None:
    a = words(rng, 9, 64)
    out = run("named_barriers", a, np.zeros_like(a), variant=9, block=128)
    assert out.tolist() == a[:, ::-1].tolist()


def test_shared_atomics(rng: np.random.Generator) -> None:
    a = rng.integers(0, 16, 256).astype(np.uint32)
    orders = set()
    for seed in SEEDS:
        out, report = on_emulator("shared_atomics", a, np.zeros(16 + 256, np.uint32), block=256, seed=seed)
        for value in range(16):
            assert out[value] == 3 * np.count_nonzero(a == value)
            # Each addition saw the ones before it.
            assert sorted(out[16:][a == value]) == [3 * i for i in range(np.count_nonzero(a == value))]
        orders.add(out[16:].tobytes())
        assert report.shared_atomics == 256
    assert len(orders) == len(SEEDS)


@pytest.mark.parametrize("blocks", [1, 37])
def test_global_atomics_between_blocks(run: Run, rng: np.random.Generator, blocks: int) -> None:
    a = rng.integers(0, 2**20, (blocks, 64)).astype(np.uint32)
    out = run("global_atomics", a, np.zeros(64, np.uint32), b=np.zeros_like(a), grid=(blocks,), block=64)
    assert out.tolist() == a.sum(axis=0).tolist()


@pytest.mark.parametrize("mask", [0, 1, 2, 4, 8, 16, 31])
@pytest.mark.parametrize("variant", [0, 1])
def test_xor_shuffles(run: Run, rng: np.random.Generator, variant: int, mask: int) -> None:
    a = words(rng, 64, 2) & 0x7F7FFFFF
    out = run("shuffles", a, np.zeros_like(a), b=np.full(64, mask, np.uint32), variant=variant, block=64)
    for t in range(64):
        assert out[t, 0] == a[t // 32 * 32 + (t % 32 ^ mask), 0]


@pytest.mark.parametrize("variant", [2, 3, 4])
def test_indexed_shuffles(run: Run, rng: np.random.Generator, variant: int) -> None:
    a = words(rng, 64, 2) & 0x7F7FFFFF
    source = rng.integers(0, 32, 64).astype(np.uint32)
    out = run("shuffles", a, np.zeros_like(a), b=source, variant=variant, block=64)
    for t in range(64):
        expected = a[t // 32 * 32 + source[t]]
        assert out[t].tolist() == [expected[0], expected[1] if variant == 4 else 0]


def test_uniform_value(run: Run, rng: np.random.Generator) -> None:
    value = np.repeat(words(rng, 2), 32)
    out = run("shuffles", np.zeros((64, 2), np.uint32), np.zeros((64, 2), np.uint32), b=value, variant=7, block=64)
    assert out[:, 0].tolist() == value.tolist()


@pytest.mark.parametrize("votes", ["some", "none", "one"])
def test_votes(run: Run, rng: np.random.Generator, votes: str) -> None:
    a = words(rng, 64, 2)
    if votes != "some":
        a[:, 0] &= 0xFFFFFFFE
    if votes == "one":
        a[17, 0] |= 1
    ballots = run("shuffles", a, np.zeros_like(a), variant=5, block=64, b=np.zeros(64, np.uint32))
    anys = run("shuffles", a, np.zeros_like(a), variant=6, block=64, b=np.zeros(64, np.uint32))
    for warp in range(2):
        expected = sum(int(a[warp * 32 + lane, 0] & 1) << lane for lane in range(32))
        assert ballots[warp * 32 : warp * 32 + 32].tolist() == [[expected, 0]] * 32
        assert anys[warp * 32 : warp * 32 + 32].tolist() == [[int(expected != 0), 0]] * 32


def test_hints_change_nothing(run: Run, rng: np.random.Generator) -> None:
    a = words(rng, 32)
    assert run("hints", a, np.zeros_like(a)).tolist() == a.tolist()


def test_counters_of_global_memory(rng: np.random.Generator) -> None:
    a = words(rng, 64, 16)
    report = on_emulator("async_groups", a, np.zeros_like(a), block=64)[1]
    assert report.bytes_read == {"a": 4096, "b": 0, "out": 0, "counter": 0}
    assert report.async_bytes["a"] == 4096
    assert report.loads["a"] == 256
    assert report.bytes_written == {"a": 0, "b": 0, "out": 4096, "counter": 0}
    assert report.stores["out"] == report.shared_loads == report.async_copies == 256
    assert report.blocks == 1
    assert report.races == 0


@pytest.mark.parametrize(("pitch", "extra"), [(16, 0), (128, 7), (144, 0), (64, 3), (256, 7), (0, 0)])
def test_bank_conflicts_of_ldmatrix(pitch: int, extra: int) -> None:
    # Eight rows of 16 bytes: 128 bytes are one wavefront if they fall into 32 different banks.
    offsets = np.array([lane % 8 * pitch + lane // 8 * 16 for lane in range(32)], np.uint32)
    a = np.zeros(2048, np.uint16)
    report = on_emulator("ldmatrix", a, np.zeros((32, 4), np.uint32), b=offsets)[1]
    assert report.bank["ldmatrix"] == (4, 4 * extra)
    assert report.ldmatrix == 1


def test_the_report_depends_on_the_seed_alone(rng: np.random.Generator) -> None:
    a = rng.integers(0, 16, 256).astype(np.uint32)
    runs = [
        on_emulator("shared_atomics", a, np.zeros(16 + 256, np.uint32), block=256, grid=(1, 1), seed=3, workers=workers)
        for workers in (1, 2, 5)
    ]
    for out, report in runs[1:]:
        assert out.tobytes() == runs[0][0].tobytes()
        assert report == runs[0][1]
    indexed = [
        on_emulator("indices", a, np.zeros((24, 64, 8), np.uint32), grid=(24,), block=64, workers=workers)[1]
        for workers in (1, 2, 5)
    ]
    assert indexed[0] == indexed[1] == indexed[2]
    assert indexed[0].blocks == 24
