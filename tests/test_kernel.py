"""Loading and launching: the refusals without a GPU, the rest on one."""

from dataclasses import replace

import numpy as np
import pytest

from mlaflash.device import Device
from mlaflash.errors import CaptureError, LaunchError, TileError, UnsupportedError
from mlaflash.jit import kernel as kernel_module
from mlaflash.jit import load, stats

TOY_PARAMS = np.dtype([("out_gmem", np.uint64), ("addend", np.int32)], align=True)
THREADS = 64
SHARED_BYTES = THREADS * 4
LARGE_SHARED_BYTES = 96 * 1024

pytestmark = pytest.mark.usefixtures("toy_kernels")


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch):
    monkeypatch.setattr(kernel_module, "_kernels", {})
    monkeypatch.setattr(kernel_module, "_functions", {})


@pytest.fixture
def fake_hopper(monkeypatch):
    """Pretend that a GPU is there, up to the point where something would be loaded on it."""
    monkeypatch.setattr(kernel_module, "current_ordinal", lambda: 0)
    monkeypatch.setattr(kernel_module, "compute_capability", lambda ordinal: (9, 0))
    monkeypatch.setattr(kernel_module, "stream_is_capturing", lambda stream: False)
    return replace(Device.for_arch("sm_90"), is_present=True)


def test_too_much_shared_memory_is_refused_with_both_numbers(fake_hopper):
    compiled_before = stats().compiled
    with pytest.raises(TileError, match=r"300000 bytes .* allows 232448") as caught:
        load("toy", {"FACTOR": 2}, fake_hopper, 300_000)
    assert (caught.value.shared_bytes, caught.value.shared_limit) == (300_000, 232_448)
    assert stats().compiled == compiled_before


def test_a_budget_counts_as_the_limit(fake_hopper):
    with pytest.raises(TileError, match=r"106496 bytes .* allows 101376"):
        load("toy", {"FACTOR": 2}, replace(fake_hopper, shared_per_block=101_376), 106_496)


def test_static_shared_memory_counts(fake_hopper, toy_kernels):
    (toy_kernels / "toy.cu").write_text(
        'extern "C" __global__ void mlaflash_toy(int* p_gmem) {\n'
        "    __shared__ int s_smem[256];\n"
        "    s_smem[threadIdx.x] = p_gmem[threadIdx.x];\n"
        "    __syncthreads();\n"
        "    p_gmem[threadIdx.x] = s_smem[255 - threadIdx.x];\n"
        "}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_module, "_load_function", lambda compiled, ordinal: None)
        with pytest.raises(TileError, match=r"232449 bytes .* allows 232448"):
            load("toy", {}, fake_hopper, 232_448 - 1023)


@pytest.mark.parametrize("arch", ["sm_120", "sm_80", "sm_120a"])
def test_g9_a_kernel_for_another_architecture_is_refused_before_anything_is_compiled(fake_hopper, arch):
    compiled_before = stats().compiled
    with pytest.raises(UnsupportedError, match=rf"'{arch}'.*9\.0.*sm_90"):
        load("toy", {"FACTOR": 2}, replace(fake_hopper, arch=arch), 0)
    assert stats().compiled == compiled_before


def test_nothing_is_compiled_inside_a_capture(fake_hopper, monkeypatch):
    monkeypatch.setattr(kernel_module, "stream_is_capturing", lambda stream: True)
    compiled_before = stats().compiled
    with pytest.raises(CaptureError, match="Run the same call once before capturing"):
        load("toy", {"FACTOR": 2}, fake_hopper, 0)
    assert stats().compiled == compiled_before


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def pack(out, addend):
    params = np.zeros(1, TOY_PARAMS)
    params["out_gmem"] = out.data.ptr
    params["addend"] = addend
    return params


def expected(factor, addend, blocks=1):
    return np.tile(factor * np.arange(THREADS) + addend, blocks)


@pytest.mark.gpu
def test_a_launch_computes_what_the_constants_and_the_argument_say(cupy):
    toy = load("toy", {"FACTOR": 3}, Device.current(), SHARED_BYTES)
    out = cupy.zeros(2 * THREADS, np.int32)
    toy.launch((2, 1, 1), THREADS, pack(out, 7))
    np.testing.assert_array_equal(out.get(), expected(3, 7, blocks=2))


@pytest.mark.gpu
def test_the_second_load_is_the_same_object(cupy):
    device = Device.current()
    toy = load("toy", {"FACTOR": 3}, device, SHARED_BYTES)
    before = stats().memory_hits
    assert load("toy", {"FACTOR": 3}, device, SHARED_BYTES) is toy
    assert stats().memory_hits == before + 1


@pytest.mark.gpu
def test_a_launch_uses_the_given_stream(cupy):
    toy = load("toy", {"FACTOR": 3}, Device.current(), SHARED_BYTES)
    out = cupy.zeros(THREADS, np.int32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        toy.launch((1, 1, 1), THREADS, pack(out, 1))
        graph = stream.end_capture()
    assert not out.get().any(), "a captured launch ran at once"
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), expected(3, 1))


@pytest.mark.gpu
def test_a_first_load_inside_a_real_capture_is_refused(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    device = Device.current()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(CaptureError, match="before capturing"):
                load("toy", {"FACTOR": 11}, device, SHARED_BYTES)
        finally:
            stream.end_capture()
    load("toy", {"FACTOR": 11}, device, SHARED_BYTES)


@pytest.mark.gpu
def test_more_than_48_kb_of_shared_memory_and_less_after_it(cupy):
    device = Device.current()
    out = cupy.zeros(THREADS, np.int32)
    large = load("toy", {"FACTOR": 3}, device, LARGE_SHARED_BYTES)
    small = load("toy", {"FACTOR": 3}, device, SHARED_BYTES)
    small.launch((1, 1, 1), THREADS, pack(out, 1))
    small.launch((1, 1, 1), THREADS, pack(out, 2), shared_bytes=LARGE_SHARED_BYTES // 2)
    large.launch((1, 1, 1), THREADS, pack(out, 3))
    np.testing.assert_array_equal(out.get(), expected(3, 3))
    assert large.attributes()["max_dynamic_shared_bytes"] == LARGE_SHARED_BYTES


@pytest.mark.gpu
def test_the_loaded_kernel_agrees_with_the_compilers_report(cupy):
    toy = load("toy", {"FACTOR": 3}, Device.current(), SHARED_BYTES)
    attributes = toy.attributes()
    assert attributes["registers"] == toy.compiled.registers
    assert attributes["local_bytes"] == toy.compiled.stack_bytes
    assert attributes["static_shared_bytes"] == toy.compiled.static_shared_bytes
    assert toy.active_blocks(THREADS) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 70_000)])
def test_a_bad_grid_is_a_launch_error_that_names_everything(cupy, grid):
    device = Device.current()
    toy = load("toy", {"FACTOR": 3}, device, SHARED_BYTES)
    out = cupy.zeros(THREADS, np.int32)
    with pytest.raises(LaunchError) as caught:
        toy.launch(grid, THREADS, pack(out, 1))
    for part in ("'toy'", str(grid), f"block {THREADS}", str(SHARED_BYTES)):
        assert part in str(caught.value)
    assert str(device.shared_per_block) in str(caught.value)
    assert not out.get().any()


@pytest.mark.gpu
def test_too_many_threads_or_bytes_are_launch_errors(cupy):
    toy = load("toy", {"FACTOR": 3}, Device.current(), SHARED_BYTES)
    out = cupy.zeros(THREADS, np.int32)
    with pytest.raises(LaunchError, match="block 2048"):
        toy.launch((1, 1, 1), 2048, pack(out, 1))
    with pytest.raises(LaunchError, match="1000000 bytes of dynamic"):
        toy.launch((1, 1, 1), THREADS, pack(out, 1), shared_bytes=1_000_000)
    toy.launch((1, 1, 1), THREADS, pack(out, 1))
    np.testing.assert_array_equal(out.get(), expected(3, 1))
