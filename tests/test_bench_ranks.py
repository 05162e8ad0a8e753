"""Steps on several GPUs, timed and predicted, without a GPU: stand-ins for its clock and its memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mlaflash import VerifyShape, emulator
from mlaflash.commands.main import main
from mlaflash.device import Device
from mlaflash.errors import UnsupportedError
from mlaflash.lab import sharded
from mlaflash.lab.sharded import Measured, RankTimes, bench_ranks, fit_link, predict_ranks
from mlaflash.mma_tiles import NARROW
from mlaflash.scaling import NVLINK, predict_sharded

SHAPE = VerifyShape(num_heads=64, q_len=8, kv_len=32_768, page_size=64)
MEASURED = ("bench", "--ranks", "2", "--heads", "64", "--kv-len", "32768")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200"}, prog_name="mlaflash")


# --- one rank, with NumPy for CuPy -----------------------------------------------------------------------------------


class HostArray(np.ndarray):
    """Comes to the host as CuPy's arrays do."""

    def get(self) -> Any:
        return np.asarray(self)


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments).view(HostArray)


def plans(made: type, **options: Any) -> Callable[..., Any]:
    def make(*arguments: Any, **given: Any) -> Any:
        plan = made(*arguments, **given, **options, tiles=NARROW, num_sms=2)
        run_plan = plan.run
        plan.run = lambda *a, **k: tuple(array.view(HostArray) for array in run_plan(*a, **k))
        return plan

    return make


def test_a_rank_times_every_part_and_compares_with_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def generator(seed: int) -> Any:
        return SimpleNamespace(standard_normal=on_host(np.random.default_rng(seed).standard_normal))

    event, graph = SimpleNamespace(record=lambda stream: None), SimpleNamespace(launch=lambda stream: None)
    cupy = SimpleNamespace(
        **{name: on_host(getattr(np, name)) for name in ("asarray", "zeros", "empty_like", "ascontiguousarray")},
        random=SimpleNamespace(default_rng=generator),
        cuda=SimpleNamespace(Event=lambda: event, get_elapsed_time=lambda begin, end: 4.8),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )
    monkeypatch.setattr(sharded, "_cupy", lambda: cupy)
    monkeypatch.setattr(sharded, "VerifyPlan", plans(emulator.VerifyPlan))
    monkeypatch.setattr(sharded, "ShardedPlan", plans(emulator.ShardedPlan))
    monkeypatch.setattr(sharded, "_MOST_LAYERS", 2)
    monkeypatch.setattr(sharded, "_REPEATS", 2)
    communicator: Any = emulator.SharedMemory(1, 1 << 20).communicator(0)
    communicator.synchronize = lambda stream: None
    stream = SimpleNamespace(begin_capture=lambda: None, end_capture=lambda: graph)
    shape = VerifyShape(num_heads=2, q_len=2, kv_len=20, batch=2, page_size=4)
    work = sharded._Work(shape, (20, 17), communicator, stream)
    for times in work.steps((1, 2)):
        assert (times.passed, times.reason) == (True, "")
        assert times.us | {"host": 0} == dict.fromkeys(sharded.TIMES, 200.0) | {"host": 0}


# --- all ranks -------------------------------------------------------------------------------------------------------


def measured(us: float, reason: str = "") -> Measured:
    times = {name: [us, us, 9 * us] for name in sharded.TIMES} | {"one_gpu": [200.0]}
    messages = [(size, 8.0 + us + size / 400e3, 8.0 + size / 400e3) for size in sharded._MESSAGES]
    return Measured("H200", "sm_90", messages, [RankTimes(times, not reason, reason, 0.001 if not reason else np.nan)])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    found = [measured(100.0), measured(120.0)]
    monkeypatch.setattr(sharded, "device_count", lambda: 2)
    monkeypatch.setattr(sharded, "run_ranks", lambda *_: found)
    return found


def test_a_record_has_the_slowest_ranks_times(two_gpus: list[Measured]) -> None:
    (record,) = bench_ranks(SHAPE, (32_768,), 2)
    assert (record.status, record.us["step"], record.ratio) == ("ok", 120.0, 0.6)
    assert record.messages[0] == (2**16, *(pytest.approx(us + 2**16 / 400e3) for us in (128.0, 8.0)))
    assert [samples["step"] for samples in record.samples_us] == [[100.0, 100.0, 900.0], [120.0, 120.0, 1080.0]]


def test_the_command_prints_what_was_measured(two_gpus: list[Measured]) -> None:
    done = run(*MEASURED)
    assert done.exit_code == 0, done.output
    assert "2 x H200 (sm_90)" in done.stdout
    assert "0.600" in done.stdout
    assert "link fitted to messages of 65,536 to 67,108,864 bytes" in done.stdout
    (record,) = json.loads(run(*MEASURED, "--json").stdout)["records"]
    assert (record["us"]["step"], record["max_abs"]) == (120.0, 0.001)
    two_gpus[1] = measured(120.0, "out is NaN")
    done = run(*MEASURED)
    assert done.exit_code == 1
    assert "wrong, 1 head groups: rank 1: out is NaN" in done.stdout
    assert json.loads(run(*MEASURED, "--json").stdout)["records"][0]["max_abs"] is None


def test_a_link_is_fitted_to_its_messages() -> None:
    link = fit_link([(size, 7.0 + size / 250e3, 9.0 + size / 250e3) for size in sharded._MESSAGES])
    assert link.latency_us == pytest.approx(8.0, abs=0.4)
    assert link.gb_s == pytest.approx(250, rel=0.01)


def test_predictions_are_the_scaling_models() -> None:
    device = Device.for_card("h200")
    over_nvlink, over_pcie, replicated = predict_ranks(SHAPE, 4, device)
    assert over_nvlink.us["step"] == predict_sharded(SHAPE, 4, NVLINK, device).total_us
    assert replicated.ratio < over_nvlink.ratio < over_pcie.ratio
    done = run(*MEASURED, "--predict", "h200")
    assert done.exit_code == 0
    assert "PREDICTED for 2 x H200" in done.stdout
    assert "NVLink 4" in done.stdout
    records = json.loads(run(*MEASURED, "--predict", "rtx-pro-6000", "--json").stdout)["records"]
    assert [record["link"] for record in records] == ["PCIe 5 x16", "none"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((*MEASURED, "--suite", "verify"), 2, "--suite is given with --ranks"),
        ((*MEASURED, "--kv-groups", "2"), 2, "--kv-groups is given with --ranks"),
        ((*MEASURED, "--head-groups", "3"), 2, "2 ranks of 3 groups"),
        ((*MEASURED, "--mask", "tree"), 2, "mask 'tree' is given"),
        ((*MEASURED, "--dtype", "float32"), 2, "float32 is given"),
        ((*MEASURED, "--predict", "h200", "--kv-len", "5"), 2, "Give one length"),
        (("bench", "--ranks", "4", "--heads", "64"), 2, "ranks is 4 and this machine has 2 GPUs"),
        (("bench", "--head-groups", "2"), 2, "--head-groups is given without --ranks"),
    ],
)
def test_what_says_nothing_on_several_gpus_is_refused(
    arguments: tuple[str, ...], status: int, words: str, two_gpus: list[Measured]
) -> None:
    done = run(*arguments)
    assert done.exit_code == status
    assert words in " ".join(done.stderr.split())


def test_a_cache_of_8_bits_is_predicted_alone(two_gpus: list[Measured]) -> None:
    shape = replace(SHAPE, kv_dtype="float8_e4m3")
    assert predict_ranks(shape, 2, Device.for_card("h200"))[0].ratio < 1
    with pytest.raises(UnsupportedError, match="caches of q's type"):
        bench_ranks(shape, (32_768,), 2)


def test_without_a_gpu_it_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "device_count", lambda: 0)
    done = run(*MEASURED)
    assert done.exit_code == 3
    assert "bench --ranks --predict" in " ".join(done.stderr.split())
