"""The kernels' one argument: both sides agree on its layout, and on how to divide by a page size."""

from pathlib import Path

import numpy as np
import pytest

from mlaflash.emulator import run_kernel
from mlaflash.params import PARAMS_DTYPE, new_params, page_divisor

DTYPES = {"Q_DTYPE": 1, "KV_DTYPE": 1, "OUT_DTYPE": 1, "PARTIAL_DTYPE": 0}


def test_layout_is_that_of_the_kernels(tmp_path: Path) -> None:
    names = PARAMS_DTYPE.names
    places = [f"u32x2{{__builtin_offsetof(VerifyParams, {name}), sizeof(p.{name})}}" for name in names]
    places.append("u32x2{sizeof(VerifyParams), alignof(VerifyParams)}")
    stores = "".join(f"  st_global_u32x2((u8*)p.out + {8 * i}, {place});\n" for i, place in enumerate(places))
    kernel = tmp_path / "layout.cu"
    kernel.write_text(
        '#include "params.cuh"\n#include "ptx.cuh"\n'
        "KERNEL(mlaflash_layout, 32, 1) {\n"
        "  if (thread_idx()) return;\n"
        f"{stores}"
        "}\n"
    )
    out = np.zeros((len(names) + 1, 2), np.uint32)
    run_kernel(kernel, DTYPES, (1,), 32, 0, new_params(out=out.ctypes.data), {"out": out})
    for i, name in enumerate(names):
        dtype, offset = PARAMS_DTYPE.fields[name][:2]
        assert (name, *out[i].tolist()) == (name, offset, dtype.itemsize)
    assert out[-1].tolist() == [PARAMS_DTYPE.itemsize, PARAMS_DTYPE.alignment]


@pytest.mark.parametrize(
    "page_size", [1, 2, 3, 5, 7, 16, 48, 64, 100, 127, 1000, 4096, 12345, 65537, 2**30 + 1, 2**31 - 1]
)
def test_page_divisor_is_integer_division(page_size: int) -> None:
    magic, shift = page_divisor(page_size)
    assert 0 <= magic < 2**32
    assert 0 <= shift < 32
    rng = np.random.default_rng(page_size)
    near = np.arange(-2, 3)[:, None] + page_size * rng.integers(0, 2**31 // page_size + 1, 2000)
    tokens = np.concatenate([near.ravel(), rng.integers(0, 2**31, 2000), [0, 1, 2**31 - 1]])
    for token in tokens[(tokens >= 0) & (tokens < 2**31)].tolist():
        quotient = (token * magic >> 32) >> shift if magic else token >> shift
        assert quotient == token // page_size
