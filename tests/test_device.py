import builtins
import sys

import pytest

from mlaflash import device as device_module
from mlaflash.device import (
    Device,
    apply_budget,
    check_runs_on,
    compile_arch,
    gpu_available,
    occupancy_blocks,
    padded_shared_bytes,
)
from mlaflash.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    NoDeviceError,
    UnsupportedError,
)

NVRTC_12_9 = [75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121]


@pytest.mark.parametrize(
    ("arch", "num_sms", "shared_per_block", "shared_per_sm"),
    [
        ("sm_80", 108, 166_912, 167_936),
        ("sm_86", 84, 101_376, 102_400),
        ("sm_89", 142, 101_376, 102_400),
        ("sm_90", 132, 232_448, 233_472),
        ("sm_90a", 132, 232_448, 233_472),
        ("sm_100", 148, 232_448, 233_472),
        ("sm_120", 188, 101_376, 102_400),
    ],
)
def test_datasheet(arch, num_sms, shared_per_block, shared_per_sm):
    device = Device.for_arch(arch)
    assert device.arch == arch
    assert not device.is_present
    assert device.num_sms == num_sms
    assert device.shared_per_block == shared_per_block
    assert device.shared_per_sm == shared_per_sm
    # A block may have what a multiprocessor has, less what the driver keeps.
    assert shared_per_sm - shared_per_block == device.reserved_shared_per_block == 1024


@pytest.mark.parametrize("arch", ["sm_75", "sm_70", "sm_52"])
def test_an_architecture_below_sm_80_is_refused_by_name(arch):
    with pytest.raises(UnsupportedError, match=rf"{arch}.*sm_80 is the least"):
        Device.for_arch(arch)


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedError, match=r"sm_199.*sm_80, .*sm_120"):
        Device.for_arch("sm_199")


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_90x", "compute_90", ""])
def test_what_is_no_architecture_is_an_invalid_argument(arch):
    with pytest.raises(InvalidArgumentError, match="such as sm_90"):
        Device.for_arch(arch)


@pytest.mark.parametrize(
    ("capability", "supported", "arch"),
    [
        ((9, 0), NVRTC_12_9, "sm_90"),
        ((12, 0), NVRTC_12_9, "sm_120"),
        ((12, 1), NVRTC_12_9, "sm_121"),
        ((12, 1), [90, 100, 120], "sm_120"),
        ((8, 6), [80, 90], "sm_80"),
        ((8, 7), [80, 86, 89], "sm_86"),
        ((10, 3), [100, 120], "sm_100"),
    ],
)
def test_the_architecture_is_the_own_one_or_the_nearest_that_runs(capability, supported, arch):
    assert compile_arch(capability, supported) == arch


def test_a_newer_architecture_of_the_same_major_version_is_not_chosen():
    with pytest.raises(UnsupportedError, match=r"12\.0.*sm_121.*newer NVRTC"):
        compile_arch((12, 0), [90, 121])


def test_a_device_below_sm_80_is_refused():
    with pytest.raises(UnsupportedError, match="sm_80 is the least"):
        compile_arch((7, 5), NVRTC_12_9)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_120", (12, 1), True),
        ("sm_120f", (12, 1), True),
        ("sm_90a", (9, 0), True),
        ("sm_120a", (12, 1), False),
        ("sm_89", (8, 6), False),
        ("sm_90", (12, 0), False),
        ("sm_120", (9, 0), False),
    ],
)
def test_a_kernel_for_another_architecture_is_refused_by_name(arch, capability, runs):
    if runs:
        check_runs_on(arch, capability)
        return
    with pytest.raises(UnsupportedError) as caught:
        check_runs_on(arch, capability)
    assert arch in str(caught.value)
    assert f"sm_{capability[0]}{capability[1]}" in str(caught.value)


def test_the_budget_replaces_the_shared_memory_and_nothing_else():
    hopper = Device.for_arch("sm_90")
    budgeted = apply_budget(hopper, "sm_120")
    assert (budgeted.shared_per_block, budgeted.shared_per_sm) == (101_376, 102_400)
    assert (budgeted.name, budgeted.arch, budgeted.num_sms, budgeted.l2_bytes) == (
        hopper.name,
        hopper.arch,
        hopper.num_sms,
        hopper.l2_bytes,
    )


def test_the_budget_never_gives_more_than_the_device_has():
    ada = Device.for_arch("sm_89")
    assert apply_budget(ada, "sm_90") == ada


@pytest.mark.parametrize(
    ("shared_bytes", "blocks"),
    [(101_376, 1), (101_377, 0), (50_176, 2), (50_177, 1), (33_109, 3), (33_110, 2), (0, 100)],
)
def test_occupancy_counts_the_reserved_bytes_of_each_block(shared_bytes, blocks):
    assert occupancy_blocks(shared_bytes, Device.for_arch("sm_120")) == blocks


@pytest.fixture
def no_cupy(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in {"cupy", "cupy_backends"}]:
        monkeypatch.delitem(sys.modules, name)
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] in {"cupy", "cupy_backends"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy_there_is_no_gpu_and_the_extra_is_named():
    assert not gpu_available()
    with pytest.raises(MissingDependencyError, match=r"mlaflash\[cuda12\]"):
        Device.current()


class _CUDARuntimeError(RuntimeError):
    """Stands for CuPy's class of the same name."""


class _FakeRuntime:
    """CuPy's runtime module on a machine whose GPUs the test makes up."""

    CUDARuntimeError = _CUDARuntimeError

    def __init__(self, capabilities, *, capturing=False):
        self.capabilities = capabilities
        self.capturing = capturing

    def getDeviceCount(self):
        if not self.capabilities:
            raise _CUDARuntimeError("cudaErrorInsufficientDriver")
        return len(self.capabilities)

    def getDevice(self):
        self.getDeviceCount()
        return 0

    def getDeviceProperties(self, ordinal):
        return {"name": b"Made up %d" % ordinal}

    def deviceGetAttribute(self, number, ordinal):
        if ordinal >= len(self.capabilities):
            raise _CUDARuntimeError("cudaErrorInvalidDevice")
        major, minor = self.capabilities[ordinal]
        return {
            16: 46,
            38: 1 << 25,
            75: major,
            76: minor,
            81: 102_400,
            97: 101_376,
            111: 1024,
        }[number]

    def streamIsCapturing(self, pointer):
        if self.capturing is None:
            raise _CUDARuntimeError("cudaErrorStreamCaptureImplicit")
        return self.capturing


@pytest.fixture
def machine(monkeypatch):
    def make(*capabilities, **kwargs):
        runtime = _FakeRuntime(capabilities, **kwargs)
        monkeypatch.setattr(device_module, "_runtime", lambda: runtime)
        monkeypatch.setattr(device_module, "_compiler_archs", lambda capability: NVRTC_12_9)
        device_module.compute_capability.cache_clear()
        device_module._probe.cache_clear()

    yield make
    device_module.compute_capability.cache_clear()
    device_module._probe.cache_clear()


def test_a_machine_without_a_driver(machine):
    machine()
    assert not gpu_available()
    with pytest.raises(NoDeviceError, match=r"cudaErrorInsufficientDriver.*mlaflash\.emulator"):
        Device.current()


def test_the_current_device_and_another_one(machine):
    machine((12, 0), (8, 6))
    assert gpu_available()
    assert Device.current() == Device(
        name="Made up 0",
        arch="sm_120",
        num_sms=46,
        shared_per_block=101_376,
        shared_per_sm=102_400,
        l2_bytes=1 << 25,
        is_present=True,
    )
    assert Device.current(1).arch == "sm_86"
    with pytest.raises(NoDeviceError, match="no GPU number 2"):
        Device.current(2)


def test_the_variable_overrides_the_architecture(machine, monkeypatch):
    machine((12, 1))
    monkeypatch.setenv("MLAFLASH_ARCH", "sm_120")
    assert Device.current().arch == "sm_120"
    monkeypatch.setenv("MLAFLASH_ARCH", "sm_90")
    with pytest.raises(UnsupportedError, match=r"'sm_90'.*12\.1"):
        Device.current()


@pytest.mark.parametrize(("answer", "expected"), [(False, False), (True, True), (None, True)])
def test_a_stream_that_cuda_will_not_talk_about_counts_as_capturing(machine, answer, expected):
    machine((9, 0), capturing=answer)

    class Stream:
        ptr = 0

    assert device_module.stream_is_capturing(Stream()) is expected


@pytest.mark.gpu
def test_the_real_device_is_consistent():
    device = Device.current()
    assert device.is_present
    assert device.num_sms > 0
    assert device.shared_per_block + device.reserved_shared_per_block == device.shared_per_sm


@pytest.mark.parametrize("shared_bytes", [0, 4_160, 6_208, 41_472, 57_184, 91_336, 95_840, 101_376])
def test_padding_holds_a_budgets_blocks_on_a_larger_gpu(shared_bytes):
    hopper = Device.for_arch("sm_90")
    budget = apply_budget(hopper, "sm_120")
    padded = padded_shared_bytes(shared_bytes, hopper, budget)
    assert shared_bytes <= padded <= hopper.shared_per_block
    assert occupancy_blocks(padded, hopper) == occupancy_blocks(shared_bytes, budget)


def test_padding_is_none_without_a_budget():
    hopper = Device.for_arch("sm_90")
    assert padded_shared_bytes(6_208, hopper, hopper) == 6_208
