"""Warming up: what is compiled and loaded is what calls and plans look for, with the same shared memory."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mlaflash
from mlaflash import Device, TreeMask, VerifyShape, jit, mask_pack
from mlaflash.device import apply_budget
from mlaflash.emulator.plan import EmulatorBackend
from mlaflash.emulator.plan import VerifyPlan as EmulatedPlan
from mlaflash.errors import CacheMissError, InvalidArgumentError, NoDeviceError, UnsupportedError
from mlaflash.jit import cached
from mlaflash.jit import kernel as kernel_module
from mlaflash.lab.inputs import Case, build
from mlaflash.mask_source import MaskSource
from mlaflash.schedule import Launch, plan
from mlaflash.shape import call_launches, mask_launches, plan_launches

SHAPE = VerifyShape(num_heads=8, q_len=8, kv_len=40_000, batch=40, page_size=64)
DEVICES = {
    "sm_90": Device.for_arch("sm_90"),
    "sm_90 within sm_120": apply_budget(Device.for_arch("sm_90"), "sm_120"),
    "sm_120": Device.for_arch("sm_120"),
}
FEATURES = (
    {},
    {"dtype": "float32"},
    {"dtype": "float16", "out_dtype": "float32", "mask": "tree"},
    {"new_kv": True, "split_kv": True, "soft_cap": True},
)


def form(launch: Launch) -> tuple[Any, ...]:
    return launch.kernel, frozenset(launch.defines.items()), launch.shared_bytes


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_kernel_of_a_call_of_at_most_a_shape_is_there(device: Device, features: dict[str, Any]) -> None:
    shape = replace(SHAPE, **features)
    ready = {form(launch) for launch in call_launches(shape, device)}
    used = set()
    for batch, q_len, kv_len in itertools.product((1, 3, 40), (1, 2, 4, 8), (1, 70, 900, 5000, 40_000)):
        call = plan(replace(shape, batch=batch, q_len=q_len, kv_len=kv_len).problem(), device)
        used |= {form(launch) for launch in call.launches}
    assert len(used) >= 3
    assert used <= ready


def test_a_tree_that_no_tensor_core_kernel_takes_leaves_the_kernel_of_smaller_ones_too() -> None:
    shape = replace(SHAPE, q_len=2000, mask="tree")
    assert {launch.kernel for launch in call_launches(shape, DEVICES["sm_120"])} == {
        *("tile", "combine", "mma_narrow", "mma_wide", "mma_roles")
    }


@pytest.mark.parametrize("features", [f for f in FEATURES if f.get("dtype") != "float32"], ids=str)
@pytest.mark.parametrize("heads", [1, 8, 128])
def test_the_kernels_of_a_plan_are_those_that_it_loads(
    heads: int, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Launch] = []

    def load(self: EmulatorBackend, launch: Launch, *_: Any) -> Callable[..., None]:
        loaded.append(launch)
        return lambda *_: None

    monkeypatch.setattr(EmulatorBackend, "load", load)
    shape = replace(SHAPE, num_heads=heads, **features)
    made = EmulatedPlan(
        num_heads=heads,
        max_batch=shape.batch,
        max_q_len=shape.q_len,
        max_kv_len=shape.kv_len,
        sm_scale=0.1,
        page_size=shape.page_size,
        q_dtype=shape.dtype,
        out_dtype=shape.out_dtype,
        mask=shape.mask,
        new_kv=shape.new_kv,
        split_kv=shape.split_kv,
        logit_cap=20.0 if shape.soft_cap else 0.0,
        budget="sm_120",
    )
    assert list(plan_launches(shape, DEVICES["sm_120"])) == loaded
    assert made.capacity == replace(shape.capacity(), sm_scale=0.1, logit_cap=made.capacity.logit_cap)
    if shape.mask != "tree":
        assert mask_launches(shape) == ()
        return
    ready = {form(launch) for launch in mask_launches(shape)}
    words = np.zeros((1, 1), np.uint32)
    for source in sources():
        packing = mask_pack.build(made._backend.view, source, words, 1, 1, q_len=1, batch=1)
        assert form(packing.launch) in ready
        ready.discard(form(packing.launch))
    assert ready == set()


def sources() -> Iterator[MaskSource]:
    """One mask of one token in each format."""
    one, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    yield MaskSource.from_dense(np.ones((1, 1, 1), bool))
    yield MaskSource.from_dense(np.ones(1, bool))
    yield MaskSource.from_flashinfer(np.ones(1, np.uint8), lens, bitorder="little")
    yield MaskSource.from_parents(one)
    yield MaskSource.from_retrieve(one, one)
    yield MaskSource.from_packed(np.ones((1, 1), np.uint32))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 0}, "num_heads is 0.*at least 1"),
        ({"q_len": 1.5}, "q_len is 1.5"),
        ({"kv_len": 2**31}, "kv_len is 2147483648.*int32"),
        ({"mask": "chain"}, "mask is 'chain'.*'causal'"),
        ({"mask": None}, "mask is None"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_shape_refuses_what_is_not_allowed(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        replace(SHAPE, **wrong)


def test_a_shape_takes_element_types_of_numpy_and_refuses_others() -> None:
    assert replace(SHAPE, dtype=np.float16, out_dtype=np.dtype("float32")) == replace(
        SHAPE, dtype="float16", out_dtype="float32"
    )
    with pytest.raises(UnsupportedError, match=r"dtype is 'int8'.*bfloat16"):
        replace(SHAPE, dtype="int8")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Pretend that there is an H100, and record what is loaded on it."""
    device = replace(Device.for_arch("sm_90"), is_present=True)
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr("mlaflash.device.Device.current", lambda index=None: device)
    monkeypatch.setattr(
        jit,
        "load",
        lambda kernel, defines, device, shared_bytes: found.append(
            (kernel, frozenset(defines.items()), shared_bytes, device.shared_per_block)
        ),
    )
    return found


NARROW = VerifyShape(num_heads=8, q_len=2, kv_len=1000, page_size=64)


def test_a_plan_is_compiled_once_and_found_on_disk_by_the_next_process(
    loads: list[tuple[Any, ...]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    records = []
    for forget in (True, False, True):
        if forget:
            monkeypatch.setattr(cached, "_compiled", {})
        records.append(mlaflash.warmup(plans=NARROW))
    counts = [(record.kernels, record.compiled, record.disk_hits) for record in records]
    assert counts == [(3, 3, 0), (3, 0, 0), (3, 0, 3)]
    assert records[0].seconds > records[1].seconds > 0
    device = Device.for_arch("sm_90")
    expected = [(*form(launch), device.shared_per_block) for launch in plan_launches(NARROW, device)]
    assert loads == 3 * expected


def test_a_budget_pads_what_its_kernels_ask_for(loads: list[tuple[Any, ...]]) -> None:
    mlaflash.warmup(plans=[NARROW], budget="sm_120")
    limits = apply_budget(Device.for_arch("sm_90"), "sm_120")
    asked = {launch.kernel: launch.shared_bytes for launch in plan_launches(NARROW, limits)}
    for kernel, _, shared_bytes, shared_limit in loads:
        assert shared_bytes > asked[kernel]
        assert shared_limit == 232_448  # a padded block has more than the budget's
    assert {kernel for kernel, *_ in loads} == asked.keys()


def test_what_may_not_be_compiled_is_an_error_that_says_how(
    loads: list[tuple[Any, ...]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    monkeypatch.setattr(cached, "_compiled", {})
    with pytest.raises(CacheMissError, match="mlaflash compile --plan --arch sm_90 "):
        mlaflash.warmup(plans=[NARROW])
    assert loads == []


@pytest.mark.usefixtures("loads")
def test_warming_up_for_nothing_is_nothing() -> None:
    record = mlaflash.warmup()
    assert (record.kernels, record.compiled, record.disk_hits) == (0, 0, 0)


@pytest.mark.usefixtures("loads")
def test_what_is_no_shape_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"plans holds \{'num_heads': 8\}; allowed is"):
        mlaflash.warmup(plans=[{"num_heads": 8}])  # type: ignore[list-item]


@pytest.mark.usefixtures("loads")
def test_a_plan_for_float32_is_refused_before_anything_is_compiled() -> None:
    before = jit.stats()
    with pytest.raises(UnsupportedError, match="float32"):
        mlaflash.warmup([NARROW], plans=[replace(NARROW, dtype="float32")])
    assert jit.stats() == before


def test_without_a_gpu_there_is_nothing_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int | None = None) -> None:
        raise NoDeviceError("CUDA finds no GPU (planted).")

    monkeypatch.setattr("mlaflash.device.Device.current", refuse)
    with pytest.raises(NoDeviceError, match="planted"):
        mlaflash.warmup([NARROW])


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what is loaded; return what lets every load from then on be one inside a capture."""
    monkeypatch.setattr(kernel_module, "_kernels", {})
    monkeypatch.setattr(kernel_module, "_functions", {})

    def capture() -> None:
        monkeypatch.setattr(kernel_module, "stream_is_capturing", lambda stream: True)

    return capture


def to_gpu(value: Any) -> Any:
    import cupy

    if isinstance(value, TreeMask):
        return TreeMask(cupy.asarray(value.words), value.max_q)
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, "sm_120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_calls_in_a_capture_meet_no_kernel_that_is_not_loaded(
    nothing_loaded: Callable[[], None], dtype: str, budget: str | None
) -> None:
    shape = VerifyShape(num_heads=8, q_len=8, kv_len=20_000, batch=4, page_size=16, dtype=dtype, mask="tree")
    assert mlaflash.warmup([shape], budget=budget).kernels > 5
    nothing_loaded()
    for q_lens, kv_lens in (((1,), (50,)), ((8,), (20_000,)), ((4,) * 4, (3000,) * 4), ((8,) * 4, (700,) * 4)):
        case = Case(
            name="warm", q_lens=q_lens, kv_lens=kv_lens, heads=8, sm_scale=0.1, page_size=16, dtype=dtype, mask="tree"
        )
        arguments = {name: to_gpu(value) for name, value in build(case, 0).items()}
        out, _ = mlaflash.mla_verify(**arguments, budget=budget)
        assert bool((abs(out.astype("float32")) < 1e6).all())


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, "sm_120"])
def test_a_plan_in_a_capture_meets_no_kernel_that_is_not_loaded(
    nothing_loaded: Callable[[], None], budget: str | None
) -> None:
    import cupy

    shape = VerifyShape(num_heads=8, q_len=4, kv_len=1000, batch=2, page_size=16, mask="tree")
    assert mlaflash.warmup(plans=[shape], budget=budget).kernels == 9
    nothing_loaded()
    made = mlaflash.VerifyPlan(
        num_heads=8, max_batch=2, max_q_len=4, max_kv_len=1000, page_size=16, mask="tree", sm_scale=0.1, budget=budget
    )
    kv_cache = cupy.ones((130, 16, 576), "float32").astype("bfloat16")
    q = cupy.ones((8, 8, 576), "float32").astype("bfloat16")
    roots, all_seen = cupy.full((2, 4), -1, "int32"), cupy.ones((2, 4, 4), bool)
    for source in (MaskSource.from_parents(roots), MaskSource.from_dense(all_seen)):
        made.update(
            q_len=4,
            kv_lens=cupy.asarray([1000, 30], "int32"),
            kv_indptr=cupy.asarray([0, 63, 65], "int32"),
            kv_indices=cupy.arange(65, dtype="int32"),
            mask=source,
        )
        out, _ = made.run(q, kv_cache)
        assert bool((abs(out.astype("float32") - 1) < 1e-2).all())
