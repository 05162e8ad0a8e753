"""What a tensor-core kernel does for one KV tile, counted twice: as the emulator runs it, and in its machine code."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mlaflash import emulator
from mlaflash.cost import TileCounts
from mlaflash.emulator import Report
from mlaflash.jit import compile_cached
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.inspection import disassemble
from mlaflash.mma_tiles import TILE, MmaKernelConfig, MmaNarrowConfig, MmaRolesConfig, feature_defines
from mlaflash.tiles import dtype_defines

_HEADS = 8
_FEWER, _MORE = 24, 40  # KV tiles: enough that each pipeline is full in between
_BUDGET = "sm_90"
_DTYPE: Final = "bfloat16"


def emulated(config: MmaKernelConfig, kv_dtype: str | None = None) -> TileCounts:
    """Count what a block does for a KV tile on the emulator: of two lengths, the difference.

    Parameters
    ----------
    config : MmaKernelConfig
    kv_dtype : str or None
        What a cache of 8 bits holds.

    Raises
    ------
    MissingDependencyError
        There is no C++ compiler.
    """
    few, many = (_report(config, tiles, kv_dtype) for tiles in (_FEWER, _MORE))

    def per_tile(count: str) -> int:
        difference: int = getattr(many, count) - getattr(few, count)
        return round(difference / (_MORE - _FEWER))

    copied = sum(many.async_bytes.values()) - sum(few.async_bytes.values())
    return TileCounts(
        mma=per_tile("mma"),
        ldmatrix=per_tile("ldmatrix"),
        shared_bytes=per_tile("shared_load_bytes") + per_tile("shared_store_bytes"),
        copied_bytes=round(copied / (_MORE - _FEWER)),
        barriers=per_tile("named_barriers"),
        arrivals=per_tile("mbarrier_arrivals"),
    )


def _report(config: MmaKernelConfig, tiles: int, kv_dtype: str | None) -> Report:
    case = Case(
        name="counts",
        q_lens=(config.rows // _HEADS,),
        kv_lens=(tiles * TILE,),
        heads=_HEADS,
        sm_scale=0.1,
        page_size=TILE,
        dtype=_DTYPE,
        kv_dtype=kv_dtype,
        mask="none",
    )
    reports: list[Report] = []
    emulator.mla_verify(**build(case, 0), tiles=replace(config, nsplit=1), reports=reports, budget=_BUDGET)
    return reports[0]


def compiled(config: MmaKernelConfig, arch: str) -> tuple[int, int]:
    """Count the ``mma`` and ``ldmatrix`` of a KV tile in the loops of the machine code, times the warps that run them.

    Parameters
    ----------
    config : MmaKernelConfig
    arch : str

    Returns
    -------
    mma, ldmatrix : int

    Raises
    ------
    MissingDependencyError
        NVRTC or the disassembler is not installed.
    """
    types = dtype_defines(_DTYPE, _DTYPE, _DTYPE)
    defines = types | config.defines() | feature_defines(0.0, False, False)
    loops = disassemble(compile_cached(config.kernel, defines, arch).cubin).loops
    # The loop with more products is the score warps': 72 of them against 32.
    warps = _warps(config)
    ordered = sorted(loops, key=lambda loop: -loop.opcodes["HMMA"])
    pairs = list(zip(ordered, warps, strict=True))
    return (
        sum(loop.opcodes["HMMA"] * count for loop, count in pairs),
        sum(loop.opcodes.get("LDSM", 0) * count for loop, count in pairs),
    )


def _warps(config: MmaKernelConfig) -> tuple[int, ...]:
    """Return the warps that work on one tile, for each loop."""
    if isinstance(config, MmaRolesConfig):
        return 4, 8
    groups = config.kv_groups if isinstance(config, MmaNarrowConfig) else 1
    return (config.threads // 32 // groups,)
