"""Dependent launches: what the driver is asked for, and when it is not asked."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from mlaflash.errors import LaunchError
from mlaflash.jit import pdl

PARAMS = np.array([(7, 3)], np.dtype([("pointer", np.uint64), ("count", np.int32)], align=True))
STREAM = SimpleNamespace(ptr=0x5EED)


class FakeKernel:
    """Records plain launches."""

    def __init__(self, arch):
        self.compiled = SimpleNamespace(arch=arch)
        self.function_ptr = 0xF00
        self.shared_bytes = 6208
        self.plain = []

    def launch(self, *arguments):
        self.plain.append(arguments)

    def refusal(self, status, grid, block):
        return LaunchError(f"{status} {grid} {block}")


@pytest.fixture
def driver(monkeypatch):
    """Stand in for the driver: records what cuLaunchKernelEx got, and answers `status`."""
    calls = SimpleNamespace(status=0, got=[])

    def launch(config, function, arguments, extra):
        config = ctypes.cast(config, ctypes.POINTER(pdl._Config)).contents
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)).contents.value
        attribute = config.attributes[0]
        calls.got.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "function": function,
                "attribute": (config.num_attributes, attribute.id, attribute.value.allowed),
                "params": ctypes.string_at(pointer, PARAMS.nbytes),
            }
        )
        return calls.status

    monkeypatch.setattr(pdl, "_driver_launch", lambda: launch)
    return calls


def test_structures_have_the_sizes_of_cuda_h():
    assert ctypes.sizeof(pdl._Attribute) == 72
    assert ctypes.sizeof(pdl._Config) == 56


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_120"])
def test_the_driver_gets_the_launch_and_the_attribute(driver, arch):
    kernel = FakeKernel(arch)
    pdl.launch_dependent(kernel, (5, 4, 1), 128, PARAMS, STREAM)
    assert not kernel.plain
    assert driver.got == [
        {
            "grid": (5, 4, 1),
            "block": (128, 1, 1),
            "shared": 6208,
            "stream": 0x5EED,
            "function": 0xF00,
            "attribute": (1, 6, 1),
            "params": PARAMS.tobytes(),
        }
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_below_sm_90_it_is_a_plain_launch(driver, arch):
    kernel = FakeKernel(arch)
    pdl.launch_dependent(kernel, (5, 4, 1), 128, PARAMS, STREAM)
    assert kernel.plain == [((5, 4, 1), 128, PARAMS, STREAM)]
    assert not driver.got


def test_without_a_driver_that_knows_it_it_is_a_plain_launch(monkeypatch):
    monkeypatch.setattr(pdl, "_driver_launch", lambda: None)
    kernel = FakeKernel("sm_120")
    pdl.launch_dependent(kernel, (1, 1, 1), 128, PARAMS, STREAM)
    assert len(kernel.plain) == 1


def test_an_empty_grid_is_left_to_the_plain_launch_to_refuse(driver):
    kernel = FakeKernel("sm_120")
    pdl.launch_dependent(kernel, (0, 1, 1), 128, PARAMS, STREAM)
    assert len(kernel.plain) == 1
    assert not driver.got


def test_a_refusal_names_the_launch(driver):
    driver.status = 701
    with pytest.raises(LaunchError, match=r"701 \(5, 4, 1\) 128"):
        pdl.launch_dependent(FakeKernel("sm_90"), (5, 4, 1), 128, PARAMS, STREAM)
