"""Inspecting compiled kernels: what the disassembler prints, maps of shared memory, and counts that agree."""

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlaflash.commands.main import main
from mlaflash.cost import FP8_ROW_CLASSES, ROW_CLASSES, RowClass
from mlaflash.errors import MissingDependencyError
from mlaflash.lab import counts, inspection
from mlaflash.lab.inspection import disassemble, find_nvdisasm, grouped, parse, shared_map
from mlaflash.mma_tiles import NARROW, ROWS_64_ROLES, MmaKernelConfig, feature_defines
from mlaflash.tiles import NaiveConfig, TileConfig, dtype_defines

LISTING = """\
.text.mlaflash_toy:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   FADD.FTZ R3, R3, R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/               @P2 BRA P3, `(.L_x_0) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
        /*00a0*/                   BRA `(.L_x_0) ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_4);
"""


def needs_nvdisasm() -> None:
    try:
        find_nvdisasm()
    except MissingDependencyError as error:
        pytest.skip(str(error))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200"}, prog_name="mlaflash")


def defines(config: MmaKernelConfig) -> dict[str, int]:
    return dtype_defines("bfloat16", "bfloat16", "bfloat16") | config.defines() | feature_defines(0.0, False, False)


def test_a_listing_gives_instructions_and_the_loop_over_tiles() -> None:
    machine = parse(LISTING)
    assert sum(machine.opcodes.values()) == 12
    assert machine.opcodes["BRA"] == 6
    # The retry behind the code jumps into the loop, and the loop without products is none over tiles.
    (loop,) = machine.loops
    assert (loop.begin, loop.end) == (0x10, 0x60)
    assert loop.opcodes == {"LDSM": 1, "HMMA": 1, "BRA": 3, "FADD": 1}
    assert grouped(loop.opcodes) == {"control": 3, "ldmatrix": 1, "tensor cores": 1, "float32 and conversions": 1}


def test_the_disassembler_of_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_nvdisasm() == program
    assert disassemble(b"cubin") == parse(LISTING)
    program.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    with pytest.raises(MissingDependencyError, match="too old"):
        disassemble(b"cubin")


def test_without_a_disassembler_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection.shutil, "which", lambda name: None)
    monkeypatch.setattr(inspection, "WHEELS", ("no-such-wheel",))
    result = run("inspect", "--kernel", "combine", "--arch", "sm_120", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert {row["kernel"] for row in found} == {"combine"}
    assert all(row["registers"] > 0 and row["instructions"] is None for row in found)
    assert "mlaflash[inspect]" in result.stderr


@pytest.mark.parametrize("config", [NARROW, ROWS_64_ROLES], ids=lambda config: config.kernel)
def test_the_map_of_shared_memory_is_all_of_it(config: MmaKernelConfig) -> None:
    regions = shared_map(config.kernel, defines(config))
    assert regions[0].offset == 0
    assert [r.offset + r.num_bytes for r in regions[:-1]] == [r.offset for r in regions[1:]]
    assert sum(region.num_bytes for region in regions) == config.shared_bytes()
    assert all(region.holds for region in regions)
    names = {region.name for region in regions}
    assert names >= {"exchange"}
    assert not names & {"full", "empty", "ids", "factors"}


def test_the_maps_of_the_float32_kernels() -> None:
    types = dtype_defines("float32", "float32", "float32")
    tile = shared_map("tile", types | TileConfig(8, 16).defines())
    assert [region.name for region in tile] == ["q", "kv", "partial", "weight", "rows", "alpha", "maximum", "sum"]
    assert tile[1].num_bytes == 16 * 576 * 4
    naive = shared_map("naive", types)
    assert sum(region.num_bytes for region in naive) == NaiveConfig().shared_bytes("float32")
    assert [region.name for region in naive] == ["reduce", "merge"]
    assert shared_map("move", {}) == ()


def test_one_kernel_is_shown_in_detail() -> None:
    needs_nvdisasm()
    result = run("inspect", "--kernel", "mma_narrow", "--arch", "sm_120")
    assert result.exit_code == 0, result.stderr
    assert "exchange" in result.stdout
    assert "loop over tiles" in result.stdout
    row, *_ = json.loads(run("inspect", "--kernel", "mma_narrow", "--arch", "sm_120", "--json").stdout)
    assert row["spill_bytes"] == 0
    assert sum(region["bytes"] for region in row["shared_map"]) == row["shared_bytes"]
    assert row["tile_loops"][0]["instructions"]["HMMA"] == 34
    assert sum(row["groups"].values()) == sum(row["instructions"].values())


@pytest.mark.parametrize(
    "arguments",
    [("--nsplit", "4"), ("--kernel", "naive", "--ht", "8"), ("--kernel", "tile", "--ht", "7")],
)
def test_constants_that_no_form_has_are_refused(arguments: tuple[str, ...]) -> None:
    assert run("inspect", *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("row_class", "kv_dtype"),
    [(c, None) for c in ROW_CLASSES] + [(c, kv_dtype) for kv_dtype, found in FP8_ROW_CLASSES.items() for c in found],
    ids=lambda x: (
        f"{x.config.kernel}-{x.config.rows}-{x.blocks_per_sm}" if isinstance(x, RowClass) else x or "bfloat16"
    ),
)
def test_the_cost_model_counts_what_the_emulator_does(row_class: RowClass, kv_dtype: str | None) -> None:
    known, found = row_class.counts, counts.emulated(row_class.config, kv_dtype)
    assert (found.mma, found.ldmatrix, found.copied_bytes) == (known.mma, known.ldmatrix, known.copied_bytes)
    assert (found.barriers, found.arrivals) == (known.barriers, known.arrivals)
    # Rows whose maximum rises have their factors read: how many these are is the data's.
    assert found.shared_bytes == pytest.approx(known.shared_bytes, rel=0.02)


@pytest.mark.parametrize("row_class", ROW_CLASSES, ids=lambda c: f"{c.config.kernel}-{c.config.rows}-{c.blocks_per_sm}")
def test_the_cost_model_counts_what_is_in_the_machine_code(row_class: RowClass) -> None:
    needs_nvdisasm()
    # Two blocks of 32 rows fit no SM of an sm_120.
    arch = "sm_120" if row_class.blocks_per_sm == 1 else "sm_90"
    assert counts.compiled(row_class.config, arch) == (row_class.counts.mma, row_class.counts.ldmatrix)
