"""`lse_base`: every kernel that writes an lse writes it in the base that is asked for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verify_cases import BASE, LISTS, config_id, configs, mma_configs

from mlaflash import oracle
from mlaflash.emulator import mla_sparse, mla_verify
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.inputs import build
from mlaflash.tiles import KernelConfig

# The first token of the first request sees nothing.
CASE = replace(BASE, q_lens=(3, 2), kv_lens=(2, 40), dtype="bfloat16")


def check(**how: Any) -> None:
    arguments = build(CASE, 1)
    out, lse = mla_verify(**arguments, **how)
    same_out, lse_2 = mla_verify(**arguments, **how, lse_base="2")
    np.testing.assert_array_equal(same_out, out)
    assert np.isneginf(lse[0]).all()
    np.testing.assert_allclose(lse, lse_2 * np.float32(np.log(2)), rtol=2e-7)
    expected = oracle.mla_verify(**arguments, lse_base="2")[1]
    np.testing.assert_allclose(lse_2, expected, atol=2e-2)


@pytest.mark.parametrize("config", [*configs(), *mma_configs()], ids=config_id)
def test_kernels(config: KernelConfig) -> None:
    check(kernel=config.kernel, tiles=config)


def test_lists() -> None:
    arguments = build(LISTS, 3)
    for kernel in ("naive", "tile", "mma_narrow", "mma_wide"):
        out, lse = mla_sparse(**arguments, kernel=kernel)
        same_out, lse_2 = mla_sparse(**arguments, kernel=kernel, lse_base="2")
        np.testing.assert_array_equal(same_out, out)
        np.testing.assert_allclose(lse, lse_2 * np.float32(np.log(2)), rtol=2e-7)
        np.testing.assert_allclose(lse_2, oracle.mla_sparse(**arguments, lse_base="2")[1], atol=2e-2)
    for call in (mla_sparse, oracle.mla_sparse):
        with pytest.raises(InvalidArgumentError, match="lse_base is 10"):
            call(**arguments, lse_base=10)


def test_deterministic() -> None:
    check(deterministic=True)


def test_the_oracle() -> None:
    arguments = build(CASE, 2)
    out, lse = oracle.mla_verify(**arguments, lse_base="e")
    same_out, lse_2 = oracle.mla_verify(**arguments, lse_base="2")
    np.testing.assert_array_equal(same_out, out)
    np.testing.assert_allclose(np.exp2(lse_2), np.exp(lse), rtol=1e-12)
    for base in (2, "10", None):
        with pytest.raises(InvalidArgumentError, match=f"lse_base is {base!r}; it must be 'e' or '2'"):
            oracle.mla_verify(**arguments, lse_base=base)
