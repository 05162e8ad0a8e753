"""A CUDA context that is lost, as the runtime and the driver tell of it: one error, which says so, from every call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlaflash import device as device_module
from mlaflash.device import HERE, context_loss, current_ordinal, on_device, stream_is_capturing
from mlaflash.errors import ContextLostError, LaunchError, MlaFlashError, NoDeviceError
from mlaflash.jit import launch as launch_module
from mlaflash.jit.kernel import Kernel
from mlaflash.jit.launch import PreparedLaunch

LOST = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721)


class CUDARuntimeError(RuntimeError):
    """CuPy's, as far as it is looked at."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


def fail(status: int) -> Any:
    def call(*given: Any) -> Any:
        raise CUDARuntimeError(status)

    return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a runtime of this test's in the place of CuPy's."""
    fake = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDevice=lambda: 0)
    monkeypatch.setattr(device_module, "_runtime", lambda: fake)
    return fake


def test_what_ends_a_context_and_what_does_not() -> None:
    assert tuple(status for status in range(1000) if context_loss(CUDARuntimeError(status))) == LOST
    assert context_loss(RuntimeError("719")) is None
    error = context_loss(CUDARuntimeError(719))
    assert isinstance(error, LaunchError)
    assert "CUDA says error 719" in str(error)
    assert "start the process again" in str(error)


@pytest.mark.parametrize("status", LOST)
def test_an_error_of_cupy_inside_a_call_is_ours(status: int, runtime: SimpleNamespace) -> None:
    for scope in (HERE, on_device(0)):
        with pytest.raises(ContextLostError) as caught, scope:
            fail(status)()
        assert isinstance(caught.value.__cause__, CUDARuntimeError)


@pytest.mark.parametrize("error", [CUDARuntimeError(2), MemoryError("of CuPy"), LaunchError("refused"), KeyError(1)])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, HERE:
        raise error
    assert caught.value is error


def test_another_device_is_left_again(runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("cupy").cuda
    told: list[str] = []

    class Device:
        def __init__(self, ordinal: int) -> None:
            told.append(f"device {ordinal}")

        def __enter__(self) -> None:
            told.append("in")

        def __exit__(self, *error: object) -> None:
            told.append("out")

    monkeypatch.setattr(cuda, "Device", Device)
    with pytest.raises(KeyError), on_device(1):
        raise KeyError(1)
    assert told == ["device 1", "in", "out"]
    with pytest.raises(ContextLostError), on_device(1):
        fail(700)()


@pytest.mark.parametrize(("status", "kind"), [(700, ContextLostError), (100, NoDeviceError)])
def test_the_question_for_the_device(status: int, kind: type[MlaFlashError], runtime: SimpleNamespace) -> None:
    runtime.getDevice = fail(status)
    with pytest.raises(kind):
        current_ordinal()


def test_a_lost_context_is_no_capture(runtime: SimpleNamespace) -> None:
    stream = SimpleNamespace(ptr=0)
    runtime.streamIsCapturing = fail(906)  # another stream of the process is captured
    assert stream_is_capturing(stream)
    runtime.streamIsCapturing = fail(719)
    with pytest.raises(ContextLostError):
        stream_is_capturing(stream)


@pytest.mark.parametrize(("status", "kind"), [(700, ContextLostError), (719, ContextLostError), (701, LaunchError)])
@pytest.mark.parametrize("way", ["prepared", "cupy"])
def test_a_launch_that_the_driver_refuses(
    way: str, status: int, kind: type[LaunchError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a lost context the driver refuses to tell of the function, too."""

    class Driver:
        CUDADriverError = CUDARuntimeError
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
        launched = False

        def funcGetAttribute(self, number: int, function: int) -> int:
            if self.launched and status != 701:
                raise CUDARuntimeError(status)
            return 49_152

        def cuLaunchKernelEx(self, *given: Any) -> int:
            self.launched = True
            return status

    class Function:
        ptr = 0xF00

        def __call__(self, *given: Any) -> None:
            driver.launched = True
            raise CUDARuntimeError(status)

    driver = Driver()

    class Bare(Kernel):
        def __init__(self) -> None:
            self.compiled: Any = SimpleNamespace(kernel="toy", arch="sm_90", static_shared_bytes=0)
            self.ordinal, self.shared_bytes, self.shared_limit = 0, 1024, 232_448
            self._driver, self._function, self._dynamic_limit = driver, Function(), 49_152

    monkeypatch.setattr(launch_module, "_driver", lambda: driver)
    params = np.zeros(1, np.dtype([("count", np.int32)]))
    launches = {
        "prepared": lambda: PreparedLaunch(Bare(), (1, 1, 1), 32, params).launch(0),
        "cupy": lambda: Bare().launch((1, 1, 1), 32, params),
    }
    with pytest.raises(LaunchError) as caught:
        launches[way]()
    assert type(caught.value) is kind
