"""Sweeps and timing on a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlaflash.commands.main import main
from mlaflash.device import Device
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.target import GpuTarget
from mlaflash.lab.timing import measure
from mlaflash.tiles import TileConfig

pytestmark = pytest.mark.gpu

CASE = Case(name="gpu", q_lens=(8,), kv_lens=(4096,), heads=8, sm_scale=0.14468, page_size=64)


def test_a_sweep_times_what_it_checked_and_ranks_it(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    arguments = ["sweep", "--kv-len", "2048", "--ht", "8", "--tk", "16", "--nsplit", "1,16", "--samples", "10"]
    result = CliRunner().invoke(main, [*arguments, "--device", "gpu", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["status"] for record in records] == ["ok", "ok"]
    for record in records:
        assert record["gpu"] == Device.current().name
        assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"]
        assert record["registers"] > 0
        assert record["kv_bytes"] == sum(2048 - 7 + i for i in range(8)) * 576 * 2
    assert out.read_text() == result.stdout


def test_check_runs_on_the_gpu() -> None:
    result = CliRunner().invoke(main, ["check", "--preset", "quick", "--device", "gpu", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["device"] == Device.current().name
    assert {row["kernel"] for row in found["results"]} >= {"naive", "tile", "combine"}


def test_the_sweep_gives_the_same_result_as_the_timed_calls() -> None:
    target = GpuTarget()
    loaded = target.load(build(CASE, 0))
    config = TileConfig(8, 16, 4)
    before = target.verify(loaded, "tile", config, 0)
    timing = target.time(loaded, "tile", config, 5)
    assert len(timing.samples_us) == 5
    after = target.verify(loaded, "tile", config, 0)
    np.testing.assert_array_equal(before.out.view(np.uint16), after.out.view(np.uint16))
    np.testing.assert_array_equal(before.lse, after.lse)


def test_measure_encloses_the_work_that_is_enqueued() -> None:
    import cupy

    device = Device.current()
    source, target = (cupy.empty(1 << 28, "uint8") for _ in range(2))

    def copy(times: int) -> None:
        for _ in range(times):
            cupy.cuda.runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, source.nbytes, 3, cupy.cuda.get_current_stream().ptr
            )

    once, thrice = (measure(lambda n=n: copy(n), device, samples=9).median_us for n in (1, 3))
    # Not a matter of speed: three copies of 256 MiB are three times one, whatever the GPU.
    assert 2 < thrice / once < 4


def test_measure_runs_on_the_stream_that_it_is_given() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    buffer = cupy.empty(1 << 20, "uint8")
    timing = measure(
        lambda: cupy.cuda.runtime.memsetAsync(buffer.data.ptr, 1, buffer.nbytes, stream.ptr),
        Device.current(),
        stream=stream,
        samples=3,
    )
    assert all(sample > 0 for sample in timing.samples_us)
