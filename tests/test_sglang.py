"""The plugin for SGLang on the emulator: what its Triton backend hands over, what is left to it, and its sources."""

import inspect
import json
import logging
import re
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sglang_cases import EmulatorRuntime, assert_right, backend, expected, seam_of, step, trees

from mlaflash import MissingDependencyError, NoDeviceError, UnsupportedError
from mlaflash.commands.main import main
from mlaflash.integrations import sglang, signatures
from mlaflash.integrations.sglang_check import Outcome

PARENTS = [[-1, 0, 0, 1, 1, 2, 3, 4], [-1, 0, 1, 2, 0, 4, 5, 6], [-1, 0, 0, 0, 1, 2, 3, 6]]
PREFIXES = [130, 1, 67]


def test_a_chain_is_what_the_oracle_says() -> None:
    seam, call = seam_of(backend()), step(PREFIXES, 8)
    assert seam.verify(**call)
    assert_right(seam, call, "causal")


def test_a_tree_is_what_the_oracle_says() -> None:
    dense, mask = trees(PARENTS)
    seam, call = seam_of(backend(topk=4)), step(PREFIXES, 8, tree=dense)
    assert seam.verify(**call | {"custom_mask": call["custom_mask"].view(np.uint8)})
    assert_right(seam, call, mask)
    assert np.abs(expected(call, mask)[0] - expected(call, "causal")[0]).max() > 0.1


@pytest.mark.parametrize("stale", [0, 1])
def test_f9_a_chain_is_causal_whatever_a_mask_buffer_holds(stale: int) -> None:
    call = step(PREFIXES, 5, tree=np.full((3, 5, 5), bool(stale)))
    seam = seam_of(backend(topk=1))
    assert seam.verify(**call)
    assert_right(seam, call, "causal")


def test_without_causality_all_draft_tokens_are_visible() -> None:
    call = step(PREFIXES, 4) | {"is_causal": False, "logit_cap": 20.0}
    seam = seam_of(backend())
    assert seam.verify(**call)
    assert_right(seam, call, "none")


def test_queries_of_two_pieces() -> None:
    call = step(PREFIXES, 4)
    q = call["q_extend"]
    # As the absorbed product leaves them: heads first.
    latent = np.ascontiguousarray(q[..., :512].transpose(1, 0, 2)).transpose(1, 0, 2)
    seam = seam_of(backend())
    assert seam.verify(**call | {"q_extend": (latent, q[..., 512:].copy())})
    assert_right(seam, call, "causal")


@pytest.mark.parametrize("split_q", [False, True])
def test_a_pool_of_8_bits_has_a_scale_and_new_tokens_have_none(split_q: bool) -> None:
    dense, mask = trees(PARENTS)
    call = step(PREFIXES, 8, tree=dense, fp8_scale=0.5)
    q = call["q_extend"]
    pieces = {"q_extend": (q[..., :512].copy(), q[..., 512:].copy())} if split_q else {}
    seam = seam_of(backend(topk=4))
    assert seam.verify(**call | pieces)
    assert_right(seam, call, mask)
    assert seam.runtime.plans[0].capacity.kv_dtype == "float8_e4m3"
    right = call["o_extend"].astype(np.float32)
    # Another layer of the step, whose scale is its own.
    other = call | {"k_scale": 0.25, "v_scale": 0.25, "k_buffer": call["k_buffer"].copy()}
    other["v_buffer"] = other["k_buffer"][..., :512]
    assert seam.verify(**other | pieces)
    assert_right(seam, other, mask)
    assert len(seam.runtime.plans) == 1
    assert np.abs(other["o_extend"].astype(np.float32) - right).max() > 0.1


def test_layers_share_an_update_and_steps_do_not() -> None:
    owner = backend()
    seam = seam_of(owner)
    updates: list[Any] = []

    def make_plan(**capacity: Any) -> Any:
        plan = EmulatorRuntime().make_plan(**capacity)
        update = plan.update
        plan.update = lambda **given: (updates.append(plan), update(**given))
        return plan

    seam.runtime.make_plan = make_plan
    layers = [step([20, 33], 2, seed=0) for _ in range(3)]
    for times in (1, 2):  # the same metadata again, as in a warm-up before a capture
        for call in layers:
            assert seam.verify(**call)
            assert len(updates) == times
            assert_right(seam, call, "causal")
    seam.runtime.capturing = True
    seam.verify(**layers[0])
    assert len(updates) == 3
    owner.forward_metadata = object()
    seam.verify(**layers[1])
    assert len(updates) == 4
    assert len({id(plan) for plan in updates}) == 1


def test_a_step_of_other_lengths_needs_no_new_memory() -> None:
    owner = backend()
    seam = seam_of(owner)
    for prefixes in ([7], [300, 1, 12, 45], [64, 64]):
        owner.forward_metadata = object()
        call = step(prefixes, 3, seed=len(prefixes))
        assert seam.verify(**call)
        assert_right(seam, call, "causal")
    assert len(seam.runtime.plans) == 1
    assert seam.runtime.plans[0].capacity.max_batch == 8
    assert seam.verify(**step([5] * 9, 3, seed=9) | {"max_bs": None})
    assert len(seam.runtime.plans) == 2


def test_a_first_step_that_is_captured_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    seam, call = seam_of(backend()), step([9], 2)
    seam.runtime.capturing = True
    with caplog.at_level(logging.INFO, "sglang"):
        assert not seam.verify(**call)
    assert "is being captured" in caplog.text
    seam.runtime.capturing = False
    assert seam.verify(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sinks": 1}, "attention sinks"),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"xai_temperature_len": 5}, "temperature by length"),
        ({"skip_prefix_custom_mask": False}, "a mask over the prefix"),
        ({"is_causal": False, "custom_mask": 1}, "without causality"),
        ({"sm_scale": None}, "a softmax scale of None"),
        ({"sm_scale": 0.0}, "a softmax scale of 0.0"),
        ({"v_scale": 2.0}, "scales 1.0 and 2.0"),
        ({"k_scale": 2.0, "v_scale": 2.0}, "a scale of 2.0 on a pool of bfloat16"),
        ({"k_scale": np.float32(1)}, "have one scale"),
        ({"max_len_extend": 3}, "4 tokens of 2 requests with 3 each"),
        ({"v_buffer": np.zeros((3, 1, 512))}, "lie apart"),
        ({"k_buffer": np.zeros((3, 2, 576))}, "one head of 576"),
        ({"k_extend": np.zeros((4, 1, 576), np.float32)}, "keys of float32"),
        ({"q_extend": np.zeros((4, 2, 192))}, r"queries of shape \(4, 2, 192\)"),
    ],
)
def test_what_is_not_served_is_left_to_sglang(change: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    seam, call = seam_of(backend()), step([5, 6], 2)
    with caplog.at_level(logging.INFO, "sglang"):
        assert not seam.verify(**call | change)
        assert not seam.verify(**call | change)
    assert len(caplog.records) == 1  # once
    assert caplog.records[0].getMessage().startswith("mlaflash leaves a verify step to SGLang's Triton kernels: ")
    assert re.search(words, caplog.records[0].getMessage())
    assert np.isnan(call["o_extend"]).all()


def test_a_plan_that_cannot_be_made_is_tried_once() -> None:
    seam, call = seam_of(backend()), step([5], 2)
    attempts: list[Any] = []

    def refuse(**capacity: Any) -> Any:
        attempts.append(capacity)
        raise UnsupportedError("planted")

    seam.runtime.make_plan = refuse
    assert not seam.verify(**call)
    assert not seam.verify(**call)
    assert len(attempts) == 1


def test_attach_says_which_path_is_active(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("mlaflash.device.Device.current", lambda: None)
    with caplog.at_level(logging.INFO, "sglang"):
        owner = backend()
        assert sglang.attach(owner, seam_of(owner)) == ""
        assert owner.use_verify_splitkv
        call = step([40], 4)
        assert owner.verify_splitkv_fwd(**call)
        assert "mlaflash serves the verify steps of MLA layers (chains)" in caplog.text
        for change, words in (
            ({"use_mla": False}, "is not MLA"),
            ({"dcp_size": 4}, "shared by 4 GPUs"),
            ({"enable_deterministic": True}, "never asks"),
            ({"use_verify_shared_kv": True}, "another kernel"),
            ({"device": "cpu"}, "the device is cpu"),
        ):
            owner = backend(**change)
            assert words in sglang.attach(owner)
            assert not owner.use_verify_splitkv
            assert words in caplog.records[-1].getMessage()
        owner = backend()
        del owner.verify_splitkv_fwd, owner.topk
        assert "has no verify_splitkv_fwd, topk" in sglang.attach(owner)


# --- the sources -----------------------------------------------------------------------------------------------------


@pytest.fixture
def record() -> signatures.Record:
    return signatures.load("sglang", "0.5.23")


def test_the_seam_takes_what_sglang_hands_over(record: signatures.Record) -> None:
    (wanted,) = (names for place, names in record["functions"].items() if place.endswith(":verify_splitkv_fwd"))
    assert list(inspect.signature(sglang.VerifySeam(None, EmulatorRuntime()).verify).parameters) == wanted
    (call,) = record["calls"].values()
    bound = inspect.signature(sglang.VerifySeam.verify).bind("self", *call["positional"], **call["keywords"])
    assert bound.arguments["custom_mask"] == "self.forward_metadata.custom_mask"
    assert bound.arguments["kv_indptr"] == "kv_indptr"
    assert bound.arguments["k_extend"] == "k.contiguous()"
    assert bound.arguments["v_buffer"].startswith("self.token_to_kv_pool.get_value_buffer(")
    assert bound.arguments["max_len_extend"] == "self.forward_metadata.max_extend_len"
    assert bound.arguments["sm_scale"] == "layer.scaling"


def test_the_entry_point_is_the_one_that_sglang_looks_for(record: signatures.Record) -> None:
    (group,) = (value for place, value in record["constants"].items() if place.endswith("GENERAL_PLUGINS_GROUP"))
    text = (Path(sglang.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{group}"]\nmlaflash = "mlaflash.integrations.sglang:register"' in text
    for point in entry_points(group=group):
        if point.name == "mlaflash":
            assert point.load() is sglang.register


SOURCES = {
    "engine/a.py": """
GROUP = "x.plugins"
class Backend:
    KIND = Kind.ONE
    size: int
    def __init__(self, runner, *, flag=False):
        self.first = self.second = 1
        self.third: int = 2
    def run(self, q, *rest, **more):
        return call(q, self.x, scale=2 * q)
"""
}


def describe(tmp_path: Path, text: str) -> tuple[signatures.Record, Path]:
    path = tmp_path / "engine" / "a.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    names: signatures.Record = {
        "package": "engine",
        "version": "1",
        "functions": ["engine/a.py:Backend.__init__", "engine/a.py:Backend.run"],
        "calls": ["engine/a.py:Backend.run:call"],
        "attributes": {"engine/a.py:Backend.__init__": ["first", "second", "third"]},
        "constants": ["engine/a.py:GROUP", "engine/a.py:Backend.KIND", "engine/a.py:Backend.size"],
    }
    return signatures.read(names, tmp_path), tmp_path


def test_sources_are_read_and_compared(tmp_path: Path) -> None:
    text = SOURCES["engine/a.py"]
    record, root = describe(tmp_path, text)
    assert record["functions"] == {
        "engine/a.py:Backend.__init__": ["self", "runner", "flag"],
        "engine/a.py:Backend.run": ["self", "q", "*rest", "**more"],
    }
    assert record["calls"] == {
        "engine/a.py:Backend.run:call": {"positional": ["q", "self.x"], "keywords": {"scale": "2 * q"}}
    }
    assert record["attributes"] == {"engine/a.py:Backend.__init__": ["first", "second", "third"]}
    assert list(record["constants"].values()) == ["x.plugins", "Kind.ONE", "int"]
    assert json.loads(json.dumps(record)) == record
    assert signatures.differences(record, signatures.read(record, root)) == []
    for old, new, words in (
        ("self.third", "self.fourth", "attributes"),
        ("self.x", "self.y", "calls"),
        ("runner", "model", "functions"),
        ("x.plugins", "y.plugins", "constants"),
        ("class Backend", "class Other", "functions"),
    ):
        (tmp_path / "engine" / "a.py").write_text(text.replace(old, new))
        found = signatures.differences(record, signatures.read(record, root))
        assert found
        assert any(words in line for line in found)
    (tmp_path / "engine" / "a.py").unlink()
    assert len(signatures.differences(record, signatures.read(record, root))) == 7


def test_versions_that_are_not_known_are_refused_by_name() -> None:
    assert "0.5.23" in signatures.known_versions("sglang")
    with pytest.raises(UnsupportedError, match=r"sglang 9\.9\.9 is installed.*it knows 0\.5\.23"):
        signatures.load("sglang", "9.9.9")
    with pytest.raises(MissingDependencyError, match="nosuchengine is not installed"):
        signatures.installed("nosuchengine")


def test_register_logs_one_line_where_it_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sglang, "installed", lambda package: ("9.9.9", tmp_path))
    sglang.register()
    monkeypatch.setattr(sglang, "installed", lambda package: ("0.5.23", tmp_path))
    sglang.register()
    assert [record.name for record in caplog.records] == ["sglang.mlaflash"] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "sglang 9.9.9 is installed" in first
    assert "is not the recorded one" in second


def test_register_hooks_the_backend(monkeypatch: pytest.MonkeyPatch, record: signatures.Record, tmp_path: Path) -> None:
    hooks: list[Any] = []
    registry = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=lambda *given: hooks.append(given)),
        HookType=SimpleNamespace(AFTER="after"),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr(sglang, "installed", lambda package: ("0.5.23", tmp_path))
    monkeypatch.setattr(sglang, "read", lambda record, root: record)
    sglang.register()
    ((target, hook, kind),) = hooks
    assert (target, kind) == ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__", "after")
    owner = backend(use_mla=False)
    hook(None, owner, "runner", skip_prefill=True)
    assert not owner.use_verify_splitkv


def test_the_command_compares_sources(
    monkeypatch: pytest.MonkeyPatch, record: signatures.Record, tmp_path: Path
) -> None:
    monkeypatch.setattr(signatures, "installed", lambda package: ("0.5.23", tmp_path))
    result = CliRunner().invoke(main, ["sglang-check", "--sources", "--json"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["version"], document["passed"], document["results"]) == ("0.5.23", False, [])
    assert any("verify_splitkv_fwd" in line for line in document["differences"])

    monkeypatch.setattr(signatures, "read", lambda record, root: record)
    result = CliRunner().invoke(main, ["sglang-check", "--sources"])
    assert result.exit_code == 0
    assert "SGLang 0.5.23: its sources are those recorded" in result.stdout

    def no_gpu() -> None:
        raise NoDeviceError("CUDA finds no GPU (planted).")

    monkeypatch.setattr("mlaflash.device.Device.current", no_gpu)
    assert CliRunner().invoke(main, ["sglang-check"]).exit_code == 3

    monkeypatch.setattr(signatures, "installed", lambda package: ("9.9", tmp_path))
    result = CliRunner().invoke(main, ["sglang-check"])
    assert result.exit_code == 2
    assert "sglang 9.9 is installed" in result.stderr


def test_the_command_shows_what_the_backend_gave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = Outcome("chain", "bfloat16", 1, 4096, 8, 8, True, 0.004, 0.002, 0.006, 0.003, "", 5.0, 20.0, 800.0)
    outcomes = [right]
    monkeypatch.setattr(signatures, "installed", lambda package: ("0.5.23", tmp_path))
    monkeypatch.setattr(signatures, "read", lambda record, root: record)
    monkeypatch.setattr("mlaflash.device.Device.current", lambda: SimpleNamespace(name="a GPU", arch="sm_90"))
    monkeypatch.setattr("mlaflash.commands.sglang_check.load_engine", lambda: None)
    monkeypatch.setattr("mlaflash.commands.sglang_check.check_engine", lambda engine, **_: outcomes)
    result = CliRunner().invoke(main, ["sglang-check"], env={"COLUMNS": "150"})
    assert result.exit_code == 0
    assert "40.0x" in result.stdout
    for change, words in (
        ({"served": False}, "left to SGLang"),
        ({"wrong": "from the oracle: planted"}, "from the oracle: planted"),
    ):
        outcomes[0] = replace(right, **change)
        result = CliRunner().invoke(main, ["sglang-check", "--json"])
        assert result.exit_code == 1
        assert words in result.stderr
        assert not json.loads(result.stdout)["passed"]
