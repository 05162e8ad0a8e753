"""Constants of the kernels: refusals, and shared memory on which Python and CUDA agree."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlaflash import Device, InvalidArgumentError, TileError, combine
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import read
from mlaflash.tiles import NaiveConfig, TileConfig, check_shared, dtype_defines, tile_candidates


@pytest.mark.parametrize("value", [0, -8, 3, 12, 128, 8.0, "8", None, True])
@pytest.mark.parametrize("name", ["ht", "tk"])
def test_only_powers_of_two_are_tiles(name: str, value: object) -> None:
    with pytest.raises(TileError, match=rf"{name} is .*power of two"):
        TileConfig(**{name: value})


@pytest.mark.parametrize("nsplit", [0, -1, 1.5, "2", True])
def test_nsplit_counts_from_one(nsplit: object) -> None:
    with pytest.raises(InvalidArgumentError, match="nsplit is"):
        TileConfig(nsplit=nsplit)  # type: ignore[arg-type]


def test_numpys_integers_become_pythons() -> None:
    assert json.dumps(TileConfig(np.int64(4), np.int32(8), np.int8(2)).as_dict()) == '{"ht": 4, "tk": 8, "nsplit": 2}'


def test_g8_a_tile_over_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(TileError, match="101376") as info:
        check_shared(TileConfig(32, 16), Device.for_arch("sm_120"), "float32")
    assert info.value.shared_limit == 101_376
    assert info.value.shared_bytes == TileConfig(32, 16).shared_bytes()
    assert str(info.value.shared_bytes) in str(info.value)
    check_shared(TileConfig(32, 16), Device.for_arch("sm_90"), "float32")


def agrees(kernel: str, defines: dict[str, int], shared_bytes: int) -> None:
    """Compile the kernel with one more line, which fails unless its own sum is `shared_bytes`."""
    sources = read(kernel)
    line = f'\nstatic_assert(Smem::BYTES == {shared_bytes}, "mlaflash.tiles says {shared_bytes}");\n'
    compile_sources(replace(sources, source=sources.source + line), defines, "sm_90", lineinfo=False)


@pytest.mark.parametrize("tile", [(8, 16), (8, 32), (1, 4), (16, 64), (4, 8), (32, 16)])
def test_shared_bytes_agree_with_the_tile_kernel(tile: tuple[int, int]) -> None:
    config = TileConfig(*tile)
    agrees("tile", dtype_defines("float32", "float32", "float32") | config.defines(), config.shared_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("config", list(tile_candidates()), ids=str)
def test_shared_bytes_agree_for_every_tile(config: TileConfig) -> None:
    agrees("tile", dtype_defines("bfloat16", "float32", "float32") | config.defines(), config.shared_bytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_bytes_agree_with_naive(dtype: str) -> None:
    agrees("naive", dtype_defines(dtype, dtype, "float32"), NaiveConfig().shared_bytes(dtype))


@pytest.mark.parametrize("num_splits", [2, 20, 64, 1024])
def test_shared_bytes_agree_with_combine(num_splits: int) -> None:
    defines = dtype_defines("float32", "float32", "float32") | combine.defines(num_splits)
    agrees("combine", defines, combine.shared_bytes(num_splits))


def test_a_wrong_number_does_not_agree() -> None:
    with pytest.raises(Exception, match=r"mlaflash\.tiles says 1"):
        agrees("naive", dtype_defines("float32", "float32", "float32"), 1)


def test_the_table_of_bytes_in_the_kernels_readme_is_this_sum() -> None:
    text = (Path(__file__).parents[1] / "kernels" / "README.md").read_text()
    table = text.split("<!-- tile-bytes -->")[1].split("<!-- /tile-bytes -->")[0]
    header, _, *rows = (line.strip("| ").split(" | ") for line in table.strip().splitlines())
    found = {(int(row[0].strip("*")), int(tk)): n for row in rows for tk, n in zip(header[1:], row[1:], strict=True)}
    assert found == {(c.ht, c.tk): f"{c.shared_bytes():,}" for c in tile_candidates()}
