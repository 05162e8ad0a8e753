"""`VerifyPlan` on a GPU: right, in CUDA graphs that follow their arrays, on any stream, and without a byte more."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plan_cases import expect
from verify_cases import CASES, SCALE

import mlaflash
from mlaflash import Device, MaskSource, TreeMask, VerifyPlan, jit, oracle
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.mask_inputs import Batch, encode, widened
from mlaflash.lab.plan_inputs import BUILDS, TILES, Build, judge, plan_arguments, random_setup, random_step
from mlaflash.mma_tiles import NARROW, ROWS_64
from mlaflash.plan import plan_launch, run_launches

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

BASE = Case(name="plan", q_lens=(3, 0, 9, 2), kv_lens=(3001, 5, 470, 0), heads=8, sm_scale=SCALE, page_size=16)
REPLAYS = 1000
# About 50 ms: what does not wait for its stream comes before it.
LONG = 100_000_000


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# --- arrays --------------------------------------------------------------------------------------------------------


def to_gpu(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def to_torch(array: Any) -> Any:
    """Give the tensor of a NumPy array's values."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(array.copy()).cuda()


def as_torch(array: Any) -> Any:
    """Give the tensor of a CuPy array's memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16)
    return torch.as_tensor(array, device="cuda")


def bits(array: Any) -> Any:
    """View a CuPy array as integers: NaN is then equal to itself."""
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def spoil(*arrays: Any) -> None:
    """Fill CuPy arrays with NaN."""
    for array in arrays:
        bits(array).fill(np.iinfo(bits(array).dtype).max)


def differences(left: Any, right: Any) -> Any:
    """Count elements of two pairs of CuPy arrays that differ in a bit, on the device."""
    return sum((bits(a) != bits(b)).sum() for a, b in zip(left, right, strict=True))


def host(result: Any) -> tuple[Any, Any]:
    return result[0].get(), result[1].get()


def assert_same_bits(left: Any, right: Any) -> None:
    for a, b in zip(host(left), host(right), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def results(tokens: int, heads: int = 8, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """Give CuPy arrays for out and lse, full of NaN."""
    import cupy

    made = cupy.empty((tokens, heads, 512), dtype), cupy.empty((tokens, heads), "float32")
    spoil(*made)
    return made


def metadata(arguments: dict[str, Any], to: Any = to_gpu) -> dict[str, Any]:
    """Give the arguments of `update` that the arguments of a call contain, on the GPU."""
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table", "tail_lens")
    given = {name: to(arguments[name]) for name in names if name in arguments}
    if isinstance(arguments["mask"], TreeMask):
        given["mask"] = TreeMask(to_gpu(arguments["mask"].words), arguments["mask"].max_q)
    return given


def inputs(arguments: dict[str, Any], to: Any = to_gpu) -> dict[str, Any]:
    """Give the arguments of `run`, on the GPU."""
    return {
        name: tuple(map(to, arguments[name])) if isinstance(arguments[name], tuple) else to(arguments[name])
        for name in ("q", "kv_cache", "new_kv")
        if name in arguments
    }


def rows(rng: np.random.Generator, *shape: int) -> Any:
    """Give random rows around a common one, as those of a cache are: means of many of them are not all rounding."""
    common = 0.25 * rng.standard_normal(576, np.float32)
    return (0.5 * rng.standard_normal((*shape, 576), np.float32) + common).astype(ml_dtypes.bfloat16)


def make(case: Case, **extra: Any) -> VerifyPlan:
    return VerifyPlan(**plan_arguments(case, **extra))


def step(plan: VerifyPlan, arguments: dict[str, Any]) -> tuple[Any, Any]:
    plan.update(**metadata(arguments))
    return plan.run(**inputs(arguments))


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [NARROW, ROWS_64], ids=["narrow", "wide"])
@pytest.mark.parametrize("case", [c for c in CASES if c.addressing != "dense"], ids=lambda case: case.name)
def test_cases_from_the_field(case: Case, tiles: Any) -> None:
    case = replace(case, dtype="bfloat16" if case.dtype == "float32" else case.dtype)
    arguments = build(case, 1)
    plan = make(case, tiles=tiles)
    plan.update(**metadata(arguments), validate=True)
    expect(host(plan.run(**inputs(arguments))), arguments)


@pytest.mark.parametrize("mask", ["causal", "none", "tree"])
def test_long_and_short_requests_beside_each_other(mask: str) -> None:
    case = replace(BASE, kv_lens=(30_001, 5, 4700, 0), mask=mask)
    arguments = build(case, 2)
    expected = oracle.mla_verify(**arguments)
    for tiles in TILES.values():
        result = judge(host(step(make(case, tiles=tiles), arguments)), expected, "bfloat16")
        assert result.passed, (tiles, result)


def test_a_plan_equals_a_call_of_the_same_cuts() -> None:
    """One request in equal pieces is what splits make of it."""
    tiles_each = 24
    plan = make(replace(BASE, q_lens=(2,), kv_lens=(1,)), tiles=NARROW)
    case = replace(BASE, q_lens=(2,), kv_lens=(16 * tiles_each * plan.work.blocks,))
    arguments = build(case, 2)
    plan = make(case, tiles=NARROW)
    planned = step(plan, arguments)
    call = {name: array for name, array in arguments.items() if name not in ("mask", "q", "kv_cache")}
    call = {name: to_gpu(array) if isinstance(array, np.ndarray) else array for name, array in call.items()}
    splits = replace(NARROW, nsplit=plan.work.blocks)
    called = mlaflash.mla_verify(**inputs(arguments), **call, kernel="mma_narrow", tiles=splits)
    expected = oracle.mla_verify(**arguments)
    for result in (planned, called):
        comparison = judge(host(result), expected, "bfloat16")
        assert comparison.passed, comparison
    # The merges add up the parts in orders of their own.
    np.testing.assert_allclose(host(planned)[1], host(called)[1], rtol=1e-6)


# Two thousand in all. Groups share a plan; few constants are compiled.
@pytest.mark.parametrize("made", BUILDS, ids=lambda made: f"{made.tiles.kernel}-{made.tiles.rows}-{made.dtype}")
def test_random_problems(made: Build) -> None:
    rng = np.random.default_rng(BUILDS.index(made))
    for _ in range(8):
        setup = random_setup(rng, [made], longest=5000)
        plan = VerifyPlan(**setup.arguments())
        for number in range(32):
            problem = random_step(rng, setup, pairs=60_000)
            plan.update(**problem.update(to_gpu), validate=number == 0)
            given = problem.run(to_gpu)
            tokens = (given["q"][0] if isinstance(given["q"], tuple) else given["q"]).shape[0]
            out, lse = results(tokens, setup.heads, made.out_dtype)
            plan.run(**given, out=out, lse=lse)
            expect(host((out, lse)), problem.arguments)


def test_one_plan_for_steps_of_every_size() -> None:
    case = replace(BASE, mask="dense")
    capacity = {"max_batch": 5, "max_q_len": 9, "max_kv_len": 8192, "max_ids": 3000}
    plan = make(case, **capacity)
    lens = [((3, 0, 9, 2), (301, 5, 4700, 0)), ((1,), (40,)), ((9,) * 5, (8000, 400, 300, 200, 100)), ((0, 0), (0, 0))]
    for seed, (q_lens, kv_lens) in enumerate([*lens, ((1,) * 5, (8192, 1, 17, 16, 15))]):
        arguments = build(replace(case, q_lens=q_lens, kv_lens=kv_lens), seed)
        result = step(plan, arguments)
        assert_same_bits(result, step(make(case, **capacity), arguments))
        expect(host(result), arguments)


def test_e1_e2_a_pool_past_two_to_the_31_elements() -> None:
    import cupy

    pool = cupy.empty((3_800_000, 576), "bfloat16")
    slots = np.array([3_728_270, 3_728_271, 3_799_999, 5], np.int32)
    case = Case(name="rows", q_lens=(1,), kv_lens=(4,), heads=8, sm_scale=SCALE, addressing="dense")
    arguments = build(case, 7)
    latent = arguments["kv_cache"][0, :4]
    pool[cupy.asarray(slots)] = cupy.asarray(latent)
    lens = np.array([4], np.int32)
    call = {"q": arguments["q"], "kv_cache": latent, "sm_scale": SCALE, "kv_lens": lens}
    for tiles in TILES.values():
        for id_dtype in ("int32", "int64"):
            plan = make(replace(case, addressing="indices", id_dtype=id_dtype), tiles=tiles)
            plan.update(
                kv_lens=to_gpu(lens),
                kv_indptr=to_gpu(np.array([0, 4], np.int32)),
                kv_indices=to_gpu(slots.astype(id_dtype)),
            )
            expect(host(plan.run(to_gpu(arguments["q"]), pool)), call)


def test_e4_query_tokens_past_two_to_the_31_elements() -> None:
    import cupy

    arguments = build(replace(BASE, q_lens=(1, 2), kv_lens=(9, 20)), 8)
    step_bytes, far, rooms = 2**31, {}, {}
    for name, width in (("q", 576), ("out", 512)):
        rooms[name] = cupy.empty(step_bytes + 8 * width, "bfloat16")
        strides = (step_bytes, 2 * width, 2)
        far[name] = cupy.ndarray((3, 8, width), rooms[name].dtype, rooms[name].data, strides)
    for token in range(3):
        begin = token * step_bytes // 2
        rooms["q"][begin : begin + 8 * 576] = to_gpu(arguments["q"][token].ravel())
    plan = make(replace(BASE, q_lens=(1, 2), kv_lens=(9, 20)))
    plan.update(**metadata(arguments))
    _, lse = plan.run(far["q"], to_gpu(arguments["kv_cache"]), out=far["out"])
    begins = [token * step_bytes // 2 for token in range(3)]
    out = np.stack([rooms["out"][begin : begin + 8 * 512].get().reshape(8, 512) for begin in begins])
    expect((out, lse.get()), arguments)


def test_a9_memory_full_of_nan() -> None:
    import cupy

    case = replace(BASE, q_lens=(3, 2, 4), kv_lens=(900, 0, 2500), mask="tree")
    arguments = build(case, 9)
    arguments["q"] = np.concatenate([arguments["q"], np.full((5, 8, 576), np.nan, arguments["q"].dtype)])
    arguments["mask"] = TreeMask(np.pad(arguments["mask"].words, ((0, 5), (0, 0))), arguments["mask"].max_q)
    size = make(case, max_tokens=14).workspace_bytes
    memory = cupy.full(size, 0xFF, np.uint8)
    plan = make(case, max_tokens=14, workspace=memory)
    out, lse = results(14)
    plan.update(**metadata(arguments))
    plan.run(**inputs(arguments), out=out, lse=lse)
    expect(host((out, lse)), arguments)
    padded = host((out, lse))[0].astype(np.float32)[[3, 4, *range(9, 14)]]
    assert (padded == 0).all()
    assert np.isfinite(np.abs(host((out, lse))[0].astype(np.float32)).max())


def read_only(memory: Any) -> Any:
    interface = dict(memory.__cuda_array_interface__)
    interface["data"] = (interface["data"][0], True)
    return SimpleNamespace(__cuda_array_interface__=interface, memory=memory)


def test_memory_that_does_not_do_is_refused() -> None:
    import cupy

    size = make(BASE).workspace_bytes
    memory = cupy.empty(2 * size + 256, np.uint8)
    for wrong, message in (
        (memory[: size - 1], f"workspace has {size - 1} bytes; the plan needs {size}"),
        (memory[16 : size + 16], "begin on 256 bytes"),
        (memory[: 2 * size : 2], "one contiguous axis"),
        (memory[:size][None], "one contiguous axis"),
        (read_only(memory[:size]), "workspace is read-only"),
        (memory[:size].get(), "workspace is a numpy"),
    ):
        with pytest.raises(mlaflash.ShapeError, match=message):
            make(BASE, workspace=wrong)
    assert make(BASE, workspace=memory[:size]).workspace_bytes == size


def test_values_are_validated_on_the_device() -> None:
    arguments = build(BASE, 10)
    plan = make(BASE)
    plan.update(**metadata(arguments), validate=True)
    with pytest.raises(mlaflash.InvalidArgumentError, match="kv_len of request 0 is 3002"):
        plan.update(**(metadata(arguments) | {"kv_lens": to_gpu(np.array([3002, 5, 470, 0], np.int32))}), validate=True)
    with pytest.raises(mlaflash.ShapeError, match=r"kv_lens is a numpy\.ndarray"):
        plan.update(**(metadata(arguments) | {"kv_lens": arguments["kv_lens"]}))


# --- graphs --------------------------------------------------------------------------------------------------------


class Engine:
    """Arrays at fixed addresses, as a serving engine has them, and variants of what they hold.

    A block table of any page ids serves any lengths, so that lengths, ids and masks vary apart from each other.
    """

    BATCH, MAX_Q, HEADS, PAGE, MAX_KV, PAGES, VARIANTS = 8, 8, 4, 16, 8192, 3000, 32

    def __init__(self, seed: int) -> None:
        import cupy

        rng = self.rng = np.random.default_rng(seed)
        pages = -(-self.MAX_KV // self.PAGE)
        shape = (self.VARIANTS, self.BATCH)
        lens = np.exp(rng.uniform(0, np.log(self.MAX_KV), shape)).astype(np.int32)
        q_lens = rng.integers(0, self.MAX_Q + 1, shape)
        for variant, live in enumerate(rng.integers(0, self.BATCH + 1, self.VARIANTS)):
            q_lens[variant, live:] = 0
            lens[variant, live:] = variant % 2  # pads of either kind
        bounds = np.zeros((self.VARIANTS, self.BATCH + 1), np.int32)
        bounds[:, 1:] = np.cumsum(q_lens, axis=1)
        self.host = {
            "lens": (lens, bounds),
            "ids": (rng.integers(0, self.PAGES, (*shape, pages), np.int32),),
            "mask": (rng.integers(0, 2, (*shape, self.MAX_Q, self.MAX_Q), np.uint8),),
            "q": (rows(rng, self.VARIANTS // 8, self.BATCH * self.MAX_Q, self.HEADS),),
        }
        self.variants = {name: tuple(map(to_gpu, arrays)) for name, arrays in self.host.items()}
        self.now = dict.fromkeys(self.host, 0)
        self.arrays = {name: tuple(array[0].copy() for array in arrays) for name, arrays in self.variants.items()}
        self.cache = to_gpu(rows(rng, self.PAGES, self.PAGE))
        self.results = results(self.BATCH * self.MAX_Q, self.HEADS)
        cupy.cuda.Device().synchronize()

    def plan(self, **extra: Any) -> VerifyPlan:
        return VerifyPlan(
            num_heads=self.HEADS, max_batch=self.BATCH, max_q_len=self.MAX_Q, max_kv_len=self.MAX_KV,
            sm_scale=SCALE, page_size=self.PAGE, mask="tree", block_table=True, **extra,
        )  # fmt: skip

    def change(self) -> None:
        """Write another variant of each array over it."""
        for name, arrays in self.arrays.items():
            self.now[name] = variant = int(self.rng.integers(len(self.variants[name][0])))
            for array, variants in zip(arrays, self.variants[name], strict=True):
                bits(array)[...] = bits(variants[variant])
        spoil(*self.results)

    def update(self, as_library: Any = lambda array: array) -> dict[str, Any]:
        lens, bounds = map(as_library, self.arrays["lens"])
        (ids,), (mask,) = (map(as_library, self.arrays[name]) for name in ("ids", "mask"))
        return {"kv_lens": lens, "qo_indptr": bounds, "block_table": ids, "mask": MaskSource.from_dense(mask)}

    def run(self, as_library: Any = lambda array: array) -> dict[str, Any]:
        out, lse = map(as_library, self.results)
        return {"q": as_library(self.arrays["q"][0]), "kv_cache": as_library(self.cache), "out": out, "lse": lse}

    def check(self) -> None:
        """Hold the results against the oracle's for what the arrays hold."""
        lens, bounds = (array[self.now["lens"]] for array in self.host["lens"])
        dense = self.host["mask"][0][self.now["mask"]] != 0
        mask = TreeMask.from_dense([own[:n, :n] for own, n in zip(dense, np.diff(bounds), strict=True)])
        words = widened(mask, self.BATCH * self.MAX_Q, self.MAX_Q)
        arguments = {
            "q": self.host["q"][0][self.now["q"]],
            "kv_cache": self.cache.get(),
            "sm_scale": SCALE,
            "kv_lens": lens,
            "qo_indptr": bounds,
            "block_table": self.host["ids"][0][self.now["ids"]],
            "mask": TreeMask(words, self.MAX_Q),
        }
        expect(host(self.results), arguments)


@pytest.mark.parametrize("captured", ["update and run", "run"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_f1_f5_a_graph_follows_what_the_arrays_hold(library: str, captured: str, request: Any) -> None:
    """Lengths, ids, masks, q and the number of live requests change in place; captured in the global mode."""
    import cupy

    torch = request.getfixturevalue("torch") if library == "torch" else None
    engine = Engine(20)
    plan, eager = engine.plan(), engine.plan()
    own = results(engine.BATCH * engine.MAX_Q, engine.HEADS)
    as_library = (lambda array: array) if library == "cupy" else as_torch
    updated, given = engine.update(as_library), engine.run(as_library)

    def launches() -> None:
        if captured == "update and run":
            plan.update(**updated)
        plan.run(**given)

    cupy.cuda.Device().synchronize()
    # torch's graphs run on its current stream, which is the legacy one, as CuPy's null stream is.
    stream = cupy.cuda.Stream(non_blocking=True) if library == "cupy" else cupy.cuda.Stream.null
    with stream:
        plan.update(**updated)
        plan.run(**given)
        stream.synchronize()
        if library == "cupy":
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            launches()
            graph = stream.end_capture()
            replay = partial(graph.launch, stream)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                launches()
            replay = graph.replay
        wrong = cupy.zeros((), np.int64)
        for number in range(REPLAYS):
            engine.change()
            if captured == "run":
                plan.update(**updated)
            replay()
            eager.update(**engine.update())
            eager.run(**(engine.run() | {"out": own[0], "lse": own[1]}))
            wrong += differences(engine.results, own)
            if number % 250 == 0:
                stream.synchronize()
                engine.check()
        stream.synchronize()
        engine.check()
        assert int(wrong) == 0


@pytest.mark.parametrize("q_len", [1, 8])
def test_b6_captured_at_one_token_and_replayed_at_128_k(q_len: int) -> None:
    import cupy

    batch, kv_len = 2, 131_072
    rng = np.random.default_rng(21)
    pool, q = rows(rng, 4096, 16), rows(rng, batch * q_len, 4)
    table = rng.integers(0, 4096, (batch, kv_len // 16), np.int32)
    made: dict[str, Any] = {
        "num_heads": 4, "max_batch": batch, "max_q_len": q_len, "max_kv_len": kv_len, "page_size": 16,
        "sm_scale": SCALE, "block_table": True,
    }  # fmt: skip
    plan, eager = VerifyPlan(**made), VerifyPlan(**made)
    lens, ids, given = cupy.ones(batch, np.int32), to_gpu(table), {"q": to_gpu(q), "kv_cache": to_gpu(pool)}
    out, lse = results(batch * q_len, 4)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        plan.update(kv_lens=lens, block_table=ids)
        plan.run(**given, out=out, lse=lse)
        graph = stream.end_capture()
        for longest in (1, kv_len, 17, 100_000):
            now = np.array([longest, longest // 3 + 1], np.int32)
            lens[...] = to_gpu(now)
            spoil(out, lse)
            graph.launch(stream)
            eager.update(kv_lens=lens, block_table=ids)
            expected = eager.run(**given)
            stream.synchronize()
            assert_same_bits((out, lse), expected)
            if longest in (1, kv_len):
                call = {"q": q, "kv_cache": pool, "sm_scale": SCALE, "kv_lens": now, "block_table": table}
                expect(host((out, lse)), call)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("fill", [0, 1])
def test_a10_a11_e13_a_bucket_of_eight_with_five_live_requests(fill: int, tiles: str) -> None:
    """Captured as eight; the pads have garbage q and masks, and point to slot 0, which holds NaN."""
    import cupy

    case = replace(BASE, q_lens=(3,) * 5, kv_lens=(40, 3000, 3, 77, 1600), addressing="block_table", mask="tree")
    arguments = build(case, 22)
    alone = step(make(case, tiles=TILES[tiles], max_batch=8), arguments)
    expect(host(alone), arguments)

    table = np.zeros((8, arguments["block_table"].shape[1]), np.int32)
    q, lens = cupy.empty((24, 8, 576), "bfloat16"), cupy.ones(8, np.int32)
    spoil(q)
    words, ids = cupy.full((24, 1), 0xFFFFFFFF, np.uint32), to_gpu(table)
    cache = to_gpu(arguments["kv_cache"])
    plan = make(case, tiles=TILES[tiles], max_batch=8)
    out, lse = results(24)

    def launches() -> None:
        plan.update(kv_lens=lens, block_table=ids, mask=TreeMask(words, 3))
        plan.run(q, cache, out=out, lse=lse)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        launches()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        launches()
        graph = stream.end_capture()
        bits(q)[:15] = bits(to_gpu(arguments["q"]))
        words[:15] = to_gpu(arguments["mask"].words)
        lens[...] = to_gpu(np.array([*case.kv_lens, fill, fill, fill], np.int32))
        ids[:5] = to_gpu(arguments["block_table"])
        spoil(out, lse)
        graph.launch(stream)
        stream.synchronize()
    expect(host((out[:15], lse[:15])), arguments)
    if fill == 0:
        padded, empty = host((out[15:], lse[15:]))
        assert (padded.astype(np.float32) == 0).all()
        assert np.isneginf(empty).all()


def test_f2_arrays_that_were_allocated_again() -> None:
    """A graph of run() alone reads the plan's own memory: those that update() took over may go."""
    import cupy

    case = replace(BASE, mask="tree")
    capacity = {"max_batch": 4, "max_q_len": 9, "max_kv_len": 8192, "max_ids": 3000}
    plan = make(case, **capacity)
    first = build(case, 23)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = inputs(first)
        out, lse = results(14)
        plan.update(**metadata(first))
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        plan.run(**given, out=out, lse=lse)
        graph = stream.end_capture()
        # The arrays of the update above are gone; what lies in their place is not their values.
        cupy.get_default_memory_pool().free_all_blocks()
        garbage = [cupy.full(1 << 16, -1, np.int32) for _ in range(64)]
        graph.launch(stream)
        stream.synchronize()
        expect(host((out, lse)), first)
        # Other requests on the full pages of the first one.
        other = build(replace(case, q_lens=(9, 1, 0, 4), kv_lens=(700, 3001, 9, 90)), 23)
        pages = np.random.default_rng(23).choice(first["kv_indices"][:187], len(other["kv_indices"]))
        names = ("kv_lens", "qo_indptr", "kv_indptr", "mask")
        second = first | {name: other[name] for name in names} | {"kv_indices": pages}
        plan.update(**metadata(second))
        spoil(out, lse)
        graph.launch(stream)
        stream.synchronize()
    expect(host((out, lse)), second)
    assert len(garbage) == 64


def test_f3_the_first_run_of_a_plan_may_be_captured() -> None:
    import cupy

    arguments = build(BASE, 24)
    plan = make(BASE)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        updated, given, (out, lse) = metadata(arguments), inputs(arguments), results(14)
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        plan.update(**updated)
        plan.run(**given, out=out, lse=lse)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    expect(host((out, lse)), arguments)


def test_f3_kernels_that_are_not_loaded_are_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from mlaflash.jit import kernel

    case = replace(BASE, mask="tree")
    arguments = build(case, 25)
    plan = make(case)
    size = plan.workspace_bytes
    updated = metadata(arguments)
    memory = cupy.empty(size, np.uint8)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_functions", {})
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(mlaflash.CaptureError, match="once before capturing"):
            make(case, workspace=memory)
        with pytest.raises(mlaflash.CaptureError, match=r"kernel 'mask' .*once before capturing"):
            plan.update(**updated)
        stream.end_capture()


class ByDlpack:
    """An array that only DLPack leads to, and that tells what it was asked for."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, array.shape
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream: Any = None, **others: Any) -> Any:
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream, **others)


def test_f4_dlpack_puts_nothing_into_a_capture(torch: Any) -> None:
    case = replace(BASE, mask="tree")
    arguments = build(case, 26)
    plan = make(case)
    updated = metadata(arguments, to_torch)
    given = {name: ByDlpack(to_torch(arguments[name])) for name in ("q", "kv_cache")}
    hidden = updated | {name: ByDlpack(updated[name]) for name in ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices")}
    out = torch.full((14, 8, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    lse = torch.full((14, 8), float("nan"), device="cuda")
    plan.update(**updated)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        stream = torch.cuda.current_stream()
        plan.update(**hidden, stream=stream)
        plan.run(**given, out=out, lse=lse, stream=stream)
    graph.replay()
    torch.cuda.synchronize()
    expect((out.float().cpu().numpy().astype(ml_dtypes.bfloat16), lse.cpu().numpy()), arguments)
    assert set(given["q"].asked) == set(hidden["kv_lens"].asked) == {-1}


# --- streams and memory --------------------------------------------------------------------------------------------


def test_g7_tensors_in_tensors_out(torch: Any) -> None:
    case = replace(BASE, mask="tree")
    arguments = build(case, 27)
    expected = step(make(case), arguments)
    plan = make(case)
    plan.update(**metadata(arguments, to_torch), validate=True)
    out, lse = plan.run(**inputs(arguments, to_torch))
    assert (type(out), out.dtype, tuple(out.shape)) == (torch.Tensor, torch.bfloat16, (14, 8, 512))
    assert (type(lse), lse.dtype, tuple(lse.shape)) == (torch.Tensor, torch.float32, (14, 8))
    torch.cuda.synchronize()
    wanted = host(expected)
    np.testing.assert_array_equal(out.view(torch.int16).cpu().numpy(), wanted[0].view(np.int16))
    np.testing.assert_array_equal(lse.cpu().numpy(), wanted[1])
    with pytest.raises(mlaflash.ShapeError, match=r"q is a torch.Tensor on cpu"):
        plan.run(**(inputs(arguments, to_torch) | {"q": to_torch(arguments["q"]).cpu()}))


def test_work_is_ordered_by_the_callers_stream(torch: Any) -> None:
    case = replace(BASE, mask="tree")
    arguments = build(case, 28)
    expected = step(make(case), arguments)
    plan = make(case)
    updated, given = metadata(arguments, to_torch), inputs(arguments, to_torch)
    plan.update(**updated)
    out, lse = plan.run(**given)
    late, lens = torch.zeros_like(given["q"]), torch.zeros_like(updated["kv_lens"])
    out.zero_()
    lse.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # A step on any other stream would see zeros.
        torch.cuda._sleep(LONG)
        late.copy_(given["q"])
        lens.copy_(updated["kv_lens"])
    plan.update(**(updated | {"kv_lens": lens}), stream=side)
    plan.run(**(given | {"q": late}), out=out, lse=lse, stream=side)
    ended = side.record_event()
    # Nor did the step wait for its stream.
    assert not ended.query()
    side.synchronize()
    wanted = host(expected)
    np.testing.assert_array_equal(out.view(torch.int16).cpu().numpy(), wanted[0].view(np.int16))
    np.testing.assert_array_equal(lse.cpu().numpy(), wanted[1])


@pytest.mark.parametrize("tiles", TILES)
def test_steps_one_right_behind_the_other(tiles: str) -> None:
    """A merge may start before the kernel before it has ended, but no kernel before the merge of the step before."""
    import cupy

    case = replace(BASE, q_lens=(8, 8), kv_lens=(6000, 3000))
    steps = [build(replace(case, kv_lens=kv_lens), 29) for kv_lens in ((6000, 3000), (90, 5000), (6000, 10))]
    plan = make(case, tiles=TILES[tiles], max_ids=2000)
    prepared = [(metadata(arguments), inputs(arguments)) for arguments in steps]
    wanted = []
    for updated, given in prepared:
        plan.update(**updated)
        wanted.append(plan.run(**given))
        cupy.cuda.Device().synchronize()
    for result, arguments in zip(wanted, steps, strict=True):
        expect(host(result), arguments)
    again = [[results(16) for _ in steps] for _ in range(100)]
    cupy.cuda.Device().synchronize()
    for row in again:
        for (updated, given), (out, lse) in zip(prepared, row, strict=True):
            plan.update(**updated)
            plan.run(**given, out=out, lse=lse)
    wrong = sum(differences(a, b) for row in again for a, b in zip(row, wanted, strict=True))
    assert int(wrong) == 0


@pytest.mark.parametrize("given_results", [False, True], ids=["new-out", "given-out"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_memory_does_not_grow(library: str, given_results: bool, request: Any) -> None:
    import cupy

    case = replace(BASE, mask="tree", addressing="block_table")
    arguments = build(case, 30)
    to = to_gpu if library == "cupy" else to_torch
    torch = request.getfixturevalue("torch") if library == "torch" else None
    plan = make(case)
    updated, given = metadata(arguments, to), inputs(arguments, to)
    if given_results:
        out, lse = results(14)
        given |= {"out": out if torch is None else as_torch(out), "lse": lse if torch is None else as_torch(lse)}

    def used() -> tuple[int, ...]:
        cupy.cuda.Device().synchronize()
        pool = cupy.get_default_memory_pool()
        own = (pool.used_bytes(), pool.total_bytes(), cupy.cuda.runtime.memGetInfo()[0])
        return own if torch is None else (*own, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def steps(count: int) -> None:
        for _ in range(count):
            plan.update(**updated)
            plan.run(**given)

    steps(5)
    before = used()
    steps(200)
    assert used() == before


def test_a_plan_serves_layers_of_a_model() -> None:
    """One update, and a run for each layer's cache."""
    case = replace(BASE, mask="tree", paired=True)
    first = build(case, 31)
    layers = [
        first | {"kv_cache": tuple((array * factor).astype(array.dtype) for array in first["kv_cache"])}
        for factor in (1, -1, 0.5, 2)
    ]
    plan = make(case)
    plan.update(**metadata(layers[0]))
    made = [plan.run(**inputs(layer)) for layer in layers]
    for result, layer in zip(made, layers, strict=True):
        expect(host(result), layer)


@pytest.mark.parametrize("name", ["parents_table", "retrieve", "sglang_full", "flashinfer_little", "sglang_qlen_only"])
def test_a_mask_as_an_engine_holds_it(name: str) -> None:
    case = replace(BASE, q_lens=(3, 0, 9, 2), kv_lens=(3001, 5, 470, 12), mask="tree")
    arguments = build(case, 32)
    batch = Batch(case.q_lens, tuple(kv - q for q, kv in zip(case.q_lens, case.kv_lens, strict=True)))
    source = encode(name, batch, 9)
    arguments["mask"] = source.expected
    plan = make(case)
    mask = source.make(**{key: to_gpu(array) for key, array in source.arrays.items()})
    plan.update(**(metadata(arguments) | {"mask": mask}))
    expect(host(plan.run(**inputs(arguments))), arguments)


def test_loaded_kernels_use_no_local_memory() -> None:
    device = Device.current()
    for tiles in (NARROW, ROWS_64):
        plan = make(BASE, tiles=tiles)
        for launch in (plan_launch(plan.work), *run_launches(plan.capacity, plan.work)):
            kernel = jit.load(launch.kernel, launch.defines, device, launch.shared_bytes)
            assert kernel.attributes()["local_bytes"] == 0


def test_one_row_of_a_long_context() -> None:
    """131,072 tokens over all blocks: in the merge all warps of a block share an item."""
    case = replace(BASE, q_lens=(1,), kv_lens=(131_072,), heads=2, page_size=64)
    arguments = build(case, 33)
    expected = oracle.mla_verify(**arguments)
    for tiles in TILES.values():
        result = judge(host(step(make(case, tiles=tiles), arguments)), expected, "bfloat16")
        assert result.passed, (tiles, result)
