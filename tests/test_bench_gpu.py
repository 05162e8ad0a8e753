"""Bench and tuning on a GPU: its inputs, results that are held against float64, and its clocks."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mlaflash.commands.main import main
from mlaflash.device import Device
from mlaflash.lab.runner import GpuRunner, Step
from mlaflash.lab.tune import tune
from mlaflash.shape import VerifyShape

pytestmark = pytest.mark.gpu

SHAPE = VerifyShape(num_heads=8, q_len=8, kv_len=2048, batch=2, page_size=16, mask="tree")


@pytest.mark.parametrize(
    "options",
    [
        ("--mask", "tree"),
        ("--new-kv", "--split-kv", "--soft-cap"),
        ("--page-size", "1", "--dtype", "float16", "--budget", "sm_120"),
        ("--dtype", "float32", "--out-dtype", "bfloat16"),
        ("--kernel", "mma_wide", "--nsplit", "5"),
    ],
    ids=lambda options: options[0][2:] + options[1].replace("--", "-"),
)
def test_a_step_is_right_and_timed(options: tuple[str, ...]) -> None:
    arguments = ["bench", "--kv-len", "2048,1500", "--samples", "5", "--json", *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    (record,) = json.loads(result.stdout)["records"]
    assert (record["status"], record["gpu"]) == ("ok", Device.current().name)
    assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"]
    assert record["graph_us"] > 0
    assert record["host_us"] > 0
    assert 0 < record["of_read"] < 1
    assert record["ceilings"]["read_gb_s"] > 0


def test_tuning_tries_and_finds_the_best() -> None:
    runner = GpuRunner("sm_120")
    steps = [Step(shape, shape.check_lens(None)) for shape in (SHAPE, replace(SHAPE, kv_len=4096, page_size=1))]
    found = list(tune(runner, steps, seed=0, samples=5))
    assert len(found) == 2
    for each in found:
        assert all(candidate.median_us for candidate in each.candidates)
        assert each.regret is not None
        assert each.regret >= 0
        assert each.entry() is not None
