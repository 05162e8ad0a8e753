"""Prepared launches: what the driver is asked for, and what it is not."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from mlaflash.errors import LaunchError
from mlaflash.jit import launch as launch_module
from mlaflash.jit.launch import PreparedLaunch

STREAM = 0x5EED


class FakeKernel:
    """What a launch asks of a kernel."""

    def __init__(self, arch):
        self.compiled = SimpleNamespace(arch=arch)
        self.function_ptr = 0xF00
        self.shared_bytes = 6208
        self.ordinal = 0

    def refusal(self, status, grid, block):
        return LaunchError(f"{status} {grid} {block}")

    def refused(self, reason, grid, block):
        return LaunchError(f"{reason} {grid} {block}")


class FakeDriver:
    """Records what cuLaunchKernelEx got, and answers `status`."""

    version = 13000
    status = 0

    def __init__(self):
        self.got = []

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        config = config._obj
        pointer = arguments.contents.value
        attribute = config.attributes[0] if config.num_attributes else None
        self.got.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "function": function.value,
                "attribute": attribute and (attribute.id, attribute.value.allowed),
                "params": ctypes.string_at(pointer, 16),
            }
        )
        return self.status


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(launch_module, "_driver", lambda: driver)
    launch_module._driver_version.cache_clear()
    yield driver
    launch_module._driver_version.cache_clear()


@pytest.fixture
def params():
    return np.array([(7, 3)], np.dtype([("pointer", np.uint64), ("count", np.int32)], align=True))


def test_structures_have_the_sizes_of_cuda_h():
    assert ctypes.sizeof(launch_module._Attribute) == 72
    assert ctypes.sizeof(launch_module._Config) == 56


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_120"])
def test_the_driver_gets_the_launch_and_the_attribute(driver, params, arch):
    PreparedLaunch(FakeKernel(arch), (5, 4, 1), 128, params, is_dependent=True).launch(STREAM)
    assert driver.got == [
        {
            "grid": (5, 4, 1),
            "block": (128, 1, 1),
            "shared": 6208,
            "stream": STREAM,
            "function": 0xF00,
            "attribute": (6, 1),
            "params": params.tobytes(),
        }
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_below_sm_90_there_is_no_attribute(driver, params, arch):
    PreparedLaunch(FakeKernel(arch), (5, 4, 1), 128, params, is_dependent=True).launch(STREAM)
    assert driver.got[0]["attribute"] is None


def test_an_older_driver_gets_no_attribute(driver, params):
    driver.version = 12020
    PreparedLaunch(FakeKernel("sm_120"), (1, 1, 1), 128, params, is_dependent=True).launch(STREAM)
    assert driver.got[0]["attribute"] is None


def test_other_launches_have_no_attribute(driver, params):
    PreparedLaunch(FakeKernel("sm_120"), (1, 1, 1), 128, params).launch(STREAM)
    assert driver.got[0]["attribute"] is None


def test_each_launch_has_its_own_stream_and_the_params_of_its_time(driver, params):
    launch = PreparedLaunch(FakeKernel("sm_90"), (1, 1, 1), 128, params)
    launch.launch(1)
    params["count"] = 11
    launch.launch(2)
    assert [got["stream"] for got in driver.got] == [1, 2]
    assert driver.got[1]["params"] == params.tobytes() != driver.got[0]["params"]


def test_an_empty_grid_is_refused(driver, params):
    with pytest.raises(LaunchError, match=r"at least 1 \(0, 1, 1\) 128"):
        PreparedLaunch(FakeKernel("sm_120"), (0, 1, 1), 128, params)
    assert not driver.got


def test_a_refusal_names_the_launch(driver, params):
    driver.status = 701
    with pytest.raises(LaunchError, match=r"701 \(5, 4, 1\) 128"):
        PreparedLaunch(FakeKernel("sm_90"), (5, 4, 1), 128, params).launch(STREAM)
