"""What is read of the KV, counted by the emulator: the reason why `tile` exists, as an equality."""

from dataclasses import replace
from typing import Any

import pytest
from verify_cases import BASE

from mlaflash.emulator import mla_verify
from mlaflash.lab.inputs import Case, build
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_bytes(case: Case, config: KernelConfig) -> int:
    reports: list[Any] = []
    mla_verify(**build(case, 1), kernel=config.kernel, tiles=config, reports=reports)
    return sum(n for report in reports for name, n in report.bytes_read.items() if name.startswith("kv_cache"))


def pairs(case: Case) -> int:
    """Query token x KV token pairs of mask none."""
    return sum(q * kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [5, 8])
def test_naive_reads_576_and_512_for_each_head_and_pair(heads: int, dtype: str) -> None:
    case = replace(BASE, mask="none", heads=heads, dtype=dtype)
    assert kv_bytes(case, NaiveConfig()) == pairs(case) * heads * (576 + 512) * SIZES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "ht"), [(8, 8), (8, 4), (5, 8), (12, 8), (20, 16)])
@pytest.mark.parametrize("nsplit", [1, 4])
def test_tile_reads_576_for_each_head_tile_and_pair(heads: int, ht: int, nsplit: int, dtype: str) -> None:
    case = replace(BASE, mask="none", heads=heads, dtype=dtype)
    head_tiles = -(-heads // ht)
    assert kv_bytes(case, TileConfig(ht, 16, nsplit)) == pairs(case) * head_tiles * 576 * SIZES[dtype]


def test_tile_reads_9_of_17_ht_of_what_naive_reads() -> None:
    case = replace(BASE, mask="none", heads=8)
    naive, tile = kv_bytes(case, NaiveConfig()), kv_bytes(case, TileConfig(ht=8))
    assert tile * 17 * 8 == naive * 9  # 15.1 times fewer
    assert round(naive / tile, 1) == 15.1


def test_the_latent_alone_is_read_16_times_less() -> None:
    # As two arrays, so that the emulator counts latent and rope columns apart.
    case = replace(BASE, mask="none", heads=8)

    def latent_bytes(config: KernelConfig) -> int:
        arguments = build(case, 1)
        cache = arguments["kv_cache"]
        arguments["kv_cache"] = (cache[..., :512].copy(), cache[..., 512:].copy())
        reports: list[Any] = []
        mla_verify(**arguments, kernel=config.kernel, tiles=config, reports=reports)
        return int(reports[0].bytes_read["kv_cache[0]"])

    assert latent_bytes(NaiveConfig()) == 16 * latent_bytes(TileConfig(ht=8))


def test_causal_tiles_read_nothing_past_what_a_token_sees() -> None:
    case = replace(BASE, mask="causal", q_lens=(4,), kv_lens=(50,))
    seen = 47 + 48 + 49 + 50
    assert kv_bytes(case, TileConfig(nsplit=3)) == seen * 576 * 4
