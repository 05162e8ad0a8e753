"""`mlaflash plan` and `mlaflash compile --plan`, without a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import mlaflash
from mlaflash import Device, VerifyShape, cost, emulator
from mlaflash.commands.main import main
from mlaflash.device import apply_budget
from mlaflash.emulator.plan import pieces
from mlaflash.errors import InvalidArgumentError, MissingDependencyError
from mlaflash.jit import cached, compile_cached
from mlaflash.lab.explain import explain
from mlaflash.lab.inputs import Case, build
from mlaflash.mma_tiles import NARROW, NARROW_32, NARROW_32_DEEP
from mlaflash.plan import choose_work
from mlaflash.shape import mask_launches, plan_launches

ROW_BYTES = 576 * 2
SM_120 = Device.for_arch("sm_120")
RAGGED = ("--kv-len", "128,4096,200000", "--q-len", "16")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let asking for the current GPU fail, so that these tests do the same everywhere."""

    def refuse(index: int | None = None) -> None:
        raise mlaflash.NoDeviceError("CUDA finds no GPU (planted).")

    monkeypatch.setattr("mlaflash.device.Device.current", refuse)


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kernel be compiled, as without NVRTC: for what does not ask for registers, quickly."""

    def missing(*_: Any, **__: Any) -> None:
        raise MissingDependencyError("compiling a kernel needs NVRTC; pip install 'mlaflash[cuda12]'")

    monkeypatch.setattr("mlaflash.lab.variants.compile_cached", missing)


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env=environment, prog_name="mlaflash")


def document(*arguments: str) -> Any:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_explanation_fits_the_terminal(columns: str) -> None:
    result = run("plan", *RAGGED, COLUMNS=columns)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    for word in ("memory", "tensor cores", "bound by", "predicted", "balance", "workspace", "why", "combine_planned"):
        assert word in result.stdout
    text = " ".join(result.stdout.split())
    assert "3 requests of 16 query tokens x 8 heads, 128 .. 200,000 KV tokens, 204,224 in all" in text
    assert "RTX PRO 6000 Blackwell (sm_120), by the data sheet" in text
    assert "nothing is measured" in text


def test_json_is_what_the_library_chooses() -> None:
    found = document(*RAGGED)
    assert found.keys() == {"problem", "device", "floors", "mla_verify", "verify_plan"}
    assert found["problem"]["kv_lens"] == [128, 4096, 200_000]
    choice = cost.choose(16 * 8, 3, 200_000, SM_120)
    call = found["mla_verify"]
    assert (call["row_tile"], call["num_splits"]) == (choice.config.rows, choice.num_splits)
    assert call["predicted_us"] == choice.predicted_us
    assert call["reasons"] == list(choice.reasons)
    assert call["workspace_bytes"] == choice.num_splits * 3 * 128 * (512 * 2 + 4)
    assert [kernel["kernel"] for kernel in call["kernels"]] == [choice.config.kernel, "combine"]
    plan = found["verify_plan"]
    made = emulator.VerifyPlan(num_heads=8, max_batch=3, max_q_len=16, max_kv_len=200_000, page_size=64, sm_scale=1.0)
    assert plan["workspace_bytes"] == made.workspace_bytes
    assert (plan["blocks"], plan["row_tile"]) == (made.work.blocks, made.work.config.rows)
    assert [kernel["kernel"] for kernel in plan["kernels"]] == ["plan", made.work.config.kernel, "combine_planned"]
    for kernel in (*call["kernels"], *plan["kernels"]):
        assert 0 < kernel["registers"] <= 255
        assert kernel["arch"] == "sm_120"


@pytest.mark.usefixtures("no_nvrtc")
def test_floors_are_those_of_a_hand_calculation() -> None:
    floors = document("--batch", "2", "--kv-len", "1000", "--q-len", "2", "--heads", "4")["floors"]
    assert floors["kv_bytes"] == 2 * 1000 * ROW_BYTES
    assert floors["other_bytes"] == 2 * 2 * 4 * (ROW_BYTES + 512 * 2 + 4)
    assert floors["flop"] == 2 * 4 * (999 + 1000) * 2 * (576 + 512)
    assert floors["memory_us"] == pytest.approx((floors["kv_bytes"] + floors["other_bytes"]) / 1792e9 * 1e6)
    # Four clocks for an mma of 16 x 8 x 16 on each of 188 SMs at 2.2 GHz.
    assert floors["mma_us"] == pytest.approx(floors["flop"] / (188 * 2.2e9 * 4096 / 4) * 1e6)
    assert floors["limit"] == "memory"
    assert document("--kv-len", "9000", "--q-len", "64")["floors"]["limit"] == "tensor cores"


def test_a_tree_is_counted_as_seen_and_a_causal_mask_as_it_is() -> None:
    causal, tree = (
        mlaflash.roofline(VerifyShape(num_heads=1, q_len=4, kv_len=10, mask=mask), SM_120, kv_lens=[10])
        for mask in ("causal", "tree")
    )
    assert (causal.flop, tree.flop) == (34 * 2 * 1088, 40 * 2 * 1088)
    assert causal.kv_bytes == tree.kv_bytes == 10 * ROW_BYTES
    short = mlaflash.roofline(VerifyShape(num_heads=1, q_len=4, kv_len=10), SM_120, kv_lens=[2])
    assert short.flop == (1 + 2) * 2 * 1088  # two query tokens see nothing


def test_a_roofline_of_lengths_that_the_shape_does_not_hold_is_refused() -> None:
    shape = VerifyShape(num_heads=1, q_len=4, kv_len=10, batch=2)
    for lens in ([11], [1, 1, 1], [-1]):
        with pytest.raises(InvalidArgumentError, match="kv_lens"):
            mlaflash.roofline(shape, SM_120, kv_lens=lens)
    with pytest.raises(mlaflash.NoDeviceError, match="planted"):
        mlaflash.roofline(shape)


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize(("heads", "q_len"), [(8, 1), (3, 7), (8, 16)])
def test_the_reads_of_kv_that_it_tells_are_those_that_the_emulator_counts(heads: int, q_len: int, mask: Any) -> None:
    kv_lens = (40, 3, 21)
    case = Case(name="reads", q_lens=(q_len,) * 3, kv_lens=kv_lens, heads=heads, sm_scale=0.1, mask=mask, page_size=4)
    case = replace(case, dtype="bfloat16", addressing="block_table")
    reports: list[Any] = []
    emulator.mla_verify(**build(case, 0), max_kv_len=40, reports=reports)
    counted = sum(report.bytes_read.get("kv_cache", 0) for report in reports)
    shape = VerifyShape(num_heads=heads, q_len=q_len, kv_len=40, batch=3, page_size=4, mask=mask)
    assert explain(shape, SM_120, kv_lens).call.kv_bytes == counted


@pytest.mark.parametrize("lens", [(100,), (128, 4096, 200_000), (8192,) * 48, (300, 0) * 150])
def test_the_balance_is_that_of_the_schedule(lens: tuple[int, ...]) -> None:
    shape = VerifyShape(num_heads=8, q_len=16, kv_len=max(lens), batch=len(lens))
    found = explain(shape, SM_120, lens).plan
    assert found is not None
    assert found.balance is not None
    work = choose_work(shape.capacity(), SM_120)
    blocks = pieces(shape.capacity(), work, lens)
    # Every KV tile of every row tile that sees a token is there once.
    tiles = [(p.request, p.row_tile, tile) for block in blocks for p in block for tile in range(p.begin, p.end)]
    assert len(set(tiles)) == len(tiles) == found.kv_tiles
    busiest = max(sum(p.end - p.begin for p in block) for block in blocks)
    assert found.balance.busiest_tiles == busiest
    assert found.balance.mean_tiles == pytest.approx(len(tiles) / work.blocks)
    assert found.balance.num_pieces == sum(map(len, blocks))
    row_tiles = {(p.request, p.row_tile) for block in blocks for p in block}
    holders = [sum(any((p.request, p.row_tile) == one for p in block) for block in blocks) for one in row_tiles]
    assert found.balance.merged == sum(count > 1 for count in holders)
    assert found.balance.idle_blocks == sum(all(p.begin == p.end for p in block) for block in blocks)


@pytest.mark.usefixtures("no_nvrtc")
def test_lengths_go_round_the_batch_and_may_come_in_several_options() -> None:
    found = document("--kv-len", "10,20", "--kv-len", "10", "--batch", "5", "--max-kv-len", "4000")
    assert found["problem"]["kv_lens"] == [10, 20, 10, 10, 20]
    assert (found["problem"]["batch"], found["problem"]["kv_len"]) == (5, 4000)
    text = " ".join(run("plan", "--kv-len", "10", "--max-kv-len", "4000").stdout.split())
    assert "10 KV tokens (made for 4,000)" in text
    assert "as if each request had 4,000 tokens" in text


@pytest.mark.usefixtures("no_nvrtc")
def test_a_budget_changes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(Device.for_arch("sm_90"), name="NVIDIA H200", is_present=True)
    monkeypatch.setattr("mlaflash.device.Device.current", lambda index=None: device)
    arguments = ("--heads", "32", "--q-len", "1", "--batch", "32", "--kv-len", "8192")
    free, kept = (document(*arguments, *budget)["mla_verify"] for budget in ((), ("--budget", "sm_120")))
    assert free["config"] == without_splits(NARROW_32_DEEP)
    assert kept["config"] == without_splits(NARROW_32)
    assert kept["kernels"][0]["shared_limit"] == apply_budget(Device.for_arch("sm_90"), "sm_120").shared_per_block


def without_splits(config: Any) -> dict[str, int]:
    return {name: value for name, value in config.as_dict().items() if name != "nsplit"}


def test_features_reach_the_kernels_and_the_text() -> None:
    arguments = ("--q-len", "2", "--new-kv", "--split-kv", "--soft-cap", "--out-dtype", "float32", "--mask", "tree")
    found = document(*arguments)
    assert found["mla_verify"]["config"] == without_splits(NARROW)
    for part in ("mla_verify", "verify_plan"):
        (config,) = (k["config"] for k in found[part]["kernels"] if k["kernel"] == "mma_narrow")
        assert (config["new_kv"], config["split_kv"], config["soft_cap"], config["out_dtype"]) == (1, 1, 1, "float32")
    text = " ".join(run("plan", *arguments).stdout.split())
    assert "mask tree, bfloat16, out float32, pages of 64, new-kv, split-kv, soft-cap" in text


def test_float32_has_no_plan_and_no_time() -> None:
    found = document("--dtype", "float32")
    assert found["mla_verify"]["kernel"] == "tile"
    assert found["mla_verify"]["predicted_us"] is None
    assert found["floors"]["mma_us"] is None
    assert "float32" in found["verify_plan"]["refusal"]
    assert found["verify_plan"]["kernels"] == []
    text = run("plan", "--dtype", "float32").stdout
    assert re.search(r"^VerifyPlan +none: q_dtype is 'float32'", text, re.MULTILINE)
    assert "predicted from data sheets" in text
    assert "bound by" not in text


@pytest.mark.usefixtures("no_nvrtc")
def test_the_gpu_that_is_there_counts_and_the_variable_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(Device.for_arch("sm_90"), name="NVIDIA H200", is_present=True)
    monkeypatch.setattr("mlaflash.device.Device.current", lambda index=None: device)
    assert document()["floors"]["read_gb_s"] == 4800
    assert "NVIDIA H200 (sm_90), this machine's GPU: 132 SMs" in " ".join(run("plan").stdout.split())
    assert document("--arch", "sm_80")["device"]["name"] == "A100"
    monkeypatch.setenv("MLAFLASH_ARCH", "sm_89")
    assert document()["device"]["name"] == "L40S"


@pytest.mark.usefixtures("no_nvrtc")
def test_without_nvrtc_it_says_so() -> None:
    result = run("plan")
    assert result.exit_code == 0
    assert "registers and spills are not known: compiling a kernel needs NVRTC" in " ".join(result.stdout.split())
    as_json = run("plan", "--json")
    assert as_json.exit_code == 0
    assert "mlaflash[cuda12]" in as_json.stderr
    kernels = json.loads(as_json.stdout)["mla_verify"]["kernels"]
    assert [(kernel["registers"], kernel["shared_bytes"] > 0) for kernel in kernels] == [(None, True)] * 2


def test_without_a_host_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/none/such/c++")
    text = " ".join(run("plan").stdout.split())
    assert "KV tiles a block on average; of the busiest one is not known: CXX is '/none/such/c++'" in text
    found = document()["verify_plan"]
    assert found["balance"] is None
    assert found["kv_tiles"] == 64 // found["row_tile"] * 1024


def test_a_kernel_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernel: str, defines: Any, arch: str, **_: Any) -> Any:
        if kernel == "combine_planned":
            raise mlaflash.CompileError("planted", kernel=kernel, defines={}, arch=arch, options=(), log="")
        return compile_cached(kernel, defines, arch)

    monkeypatch.setattr("mlaflash.lab.variants.compile_cached", refuse)
    result = run("plan")
    assert result.exit_code == 1
    assert "FAIL combine_planned: planted" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--kv-len", "10,20", "--batch", "1"], ["2 lengths", "--batch is 1"]),
        (["plan", "--kv-len", "10,x"], ["'10,x'", "128,4096"]),
        (["plan", "--kv-len", "10,"], ["'10,'"]),
        (["plan", "--kv-len", "0"], ["kv_len is 0", "at least 1"]),
        (["plan", "--kv-len", "-3,5"], ["kv_lens is -3", "at least 0"]),
        (["plan", "--kv-len", "3000000000"], ["3000000000", "2147483647"]),
        (["plan", "--kv-len", "300", "--max-kv-len", "200"], ["300", "--max-kv-len is 200"]),
        (["plan", "--heads", "0"], ["0", "x>=1"]),
        (["plan", "--mask", "chain"], ["chain", "causal"]),
        (["plan", "--dtype", "float8"], ["float8", "bfloat16"]),
        (["plan", "--arch", "sm_75"], ["sm_75", "sm_80"]),
        (["plan", "--budget", "sm_7x"], ["sm_7x", "sm_120"]),
        (["compile", "--heads", "8"], ["--heads", "--plan"]),
        (["compile", "--new-kv"], ["--new-kv", "--plan"]),
        (["compile", "--plan", "--kernel", "tile"], ["--kernel", "--plan"]),
        (["compile", "--plan", "--tiles", "all"], ["--tiles", "--plan"]),
        (["compile", "--plan", "--dtype", "float32"], ["float32", "mla_verify"]),
        (["compile", "--plan", "--mask", "tree", "--q-len", "2000"], ["2000", "1024"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in main.commands else "",
)
def test_a_wrong_argument_is_named_and_ends_with_status_2(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("error: ") + result.stderr.count("Error: ") == 1
    for word in words:
        assert word in result.stderr


def test_compile_fills_the_cache_with_the_kernels_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cached, "_compiled", {})
    arguments = ("--heads", "8", "--q-len", "2", "--batch", "4", "--kv-len", "9000", "--mask", "tree", "--new-kv")
    result = run("compile", "--plan", *arguments, "--arch", "sm_90", "--budget", "sm_120", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["kernel"] for row in rows] == ["plan", "mma_narrow", "combine_planned", *["mask"] * 6]
    assert all(row["arch"] == "sm_90" and row["shared_limit"] == 101_376 and not row["cached"] for row in rows)
    assert "a VerifyPlan of 8 heads, at most 4 requests, 2 query tokens and 9000 KV tokens" in result.stderr
    monkeypatch.setattr(cached, "_compiled", {})
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    shape = VerifyShape(num_heads=8, q_len=2, batch=4, kv_len=9000, page_size=64, mask="tree", new_kv=True)
    limits = apply_budget(Device.for_arch("sm_90"), "sm_120")
    for launch in (*plan_launches(shape, limits), *mask_launches(shape)):
        assert compile_cached(launch.kernel, launch.defines, "sm_90").cached
    other = plan_launches(replace(shape, new_kv=False), limits)[1]
    with pytest.raises(mlaflash.CacheMissError):
        compile_cached(other.kernel, other.defines, "sm_90")


def test_compile_of_a_plan_takes_several_types_and_names_each_kernel_once() -> None:
    arguments = ("--dtype", "bfloat16", "--dtype", "float16", "--arch", "sm_90", "--arch", "sm_120", "--q-len", "1")
    rows = json.loads(run("compile", "--plan", *arguments, "--json").stdout)
    kernels = [(row["arch"], row["kernel"], json.dumps(row["config"])) for row in rows]
    assert len(set(kernels)) == len(kernels) == 2 * (1 + 2 + 2)
    table = run("compile", "--plan", *arguments, COLUMNS="120").stdout
    assert len(re.findall(r"^combine_planned +sm_120 +planned_rows=16 float16 .* ok *$", table, re.MULTILINE)) == 1


def test_lengths_beyond_a_plan_are_refused_by_the_shape() -> None:
    shape = VerifyShape(num_heads=8, q_len=2, batch=2, kv_len=100)
    assert shape.check_lens(None) == (100, 100)
    assert shape.check_lens(np.array([5])) == (5,)
    with pytest.raises(InvalidArgumentError, match=r"3 of at most 7 tokens.*batch of 2"):
        shape.check_lens([7, 7, 7])
