"""Every kernel, tile and architecture compiles without spills and fits its shared memory; no GPU is needed."""

from collections.abc import Iterator

import pytest

from mlaflash import Device, combine
from mlaflash.jit import compile_kernel
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig, dtype_defines, tile_candidates

ARCHS = ["sm_80", "sm_89", "sm_90", "sm_120"]
DTYPES = ["float32", "bfloat16", "float16"]


def assert_clean(kernel: str, defines: dict[str, int], arch: str, shared_bytes: int) -> None:
    compiled = compile_kernel(kernel, defines, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log
    assert compiled.static_shared_bytes + shared_bytes <= Device.for_arch(arch).shared_per_block


def fitting(arch: str) -> Iterator[KernelConfig]:
    yield NaiveConfig()
    limit = Device.for_arch(arch).shared_per_block
    yield from (config for config in tile_candidates() if config.shared_bytes() <= limit)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", [NaiveConfig(), TileConfig(), TileConfig(8, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shipped_tiles_compile_without_spills(arch: str, config: KernelConfig, dtype: str) -> None:
    defines = dtype_defines(dtype, dtype, "float32") | config.defines()
    assert_clean(config.kernel, defines, arch, config.shared_bytes(dtype))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_splits", [2, 20, 64, 1024])
def test_combine_compiles_without_spills(arch: str, num_splits: int) -> None:
    defines = dtype_defines("bfloat16", "bfloat16", "float32") | combine.defines(num_splits)
    assert_clean("combine", defines, arch, combine.shared_bytes(num_splits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "config"),
    [(arch, config) for arch in ARCHS for config in fitting(arch)],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_valid_tile_compiles_without_spills(arch: str, config: KernelConfig, dtype: str) -> None:
    defines = dtype_defines(dtype, dtype, "float32") | config.defines()
    assert_clean(config.kernel, defines, arch, config.shared_bytes(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("partial_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_combine_compiles_without_spills(arch: str, partial_dtype: str, out_dtype: str) -> None:
    for num_splits in (2, 20, 64, 1024):
        defines = dtype_defines(out_dtype, out_dtype, partial_dtype)
        defines |= combine.defines(num_splits)
        assert_clean("combine", defines, arch, combine.shared_bytes(num_splits))
