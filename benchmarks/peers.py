"""Time mlaflash beside the MLA kernels that people would use instead, on one GPU, in one run.

Every candidate works on the same tensors: shuffled pages of 64 tokens, bfloat16. Results are held against a float64
reference first. Then all candidates of a shape take turns, each launch after a read of twice the level-2 cache, and the
medians of CUDA events are compared. mlaflash runs with a tree mask and inside the limits of `--budget`; the peers have
no tree mask (except SGLang's extend kernel) and run causal.

Needs torch and, for each peer that is not to be reported as missing, its package: flashinfer-python, sgl-flash-mla
(FlashMLA), and SGLang's Triton kernels below the folder that SGL_SRC names. FlashInfer picks its shared-memory tier by
the GPU; by default this program makes it take the one that an sm_120 card gets, in a patched temporary copy.

    python benchmarks/peers.py --out peers.json
    python benchmarks/peers.py --table peers.json   # rewrites the tables of the README, without a GPU
    python benchmarks/peers.py --sparse --out sparse.json   # mla_sparse beside SGLang's sparse kernel for CUDA GPUs
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from mlaflash import MaskSource, TreeMask, VerifyPlan, attention, mla_sparse
from mlaflash.device import Device
from mlaflash.lab.ceilings import measure_ceilings

try:
    import torch
except ModuleNotFoundError:
    torch = None

DL, DR = 512, 64
PAGE = 64
SCALE = 0.14468
# batch, q_len, heads, kv_len
SHAPES = [
    *((1, 1, 8, 65536), (32, 1, 8, 8192), (32, 2, 8, 8192)),
    *((1, 4, 8, 65536), (32, 4, 8, 8192)),
    *((1, 8, 8, 4096), (1, 8, 8, 16384), (1, 8, 8, 65536), (1, 1, 64, 65536), (1, 8, 8, 200000)),
    *((8, 8, 8, 32768), (32, 8, 8, 8192), (32, 1, 64, 8192)),
    *((1, 16, 8, 65536), (64, 1, 128, 4096), (1, 32, 8, 65536), (64, 2, 128, 4096)),
    *((1, 8, 64, 65536), (8, 8, 64, 16384), (1, 64, 8, 65536), (1, 16, 64, 65536)),
]

# query tokens, heads, topk: verify steps and prefills of DeepSeek-V3.2 (16 heads on eight GPUs) and GLM-5
SPARSE_SHAPES = [(8, 16, 2048), (64, 16, 2048), (8, 64, 2048), (64, 64, 2048), (1024, 16, 2048), (4096, 16, 2048)]
SPARSE_SLOTS = 131072
SPARSE = ("mlaflash sparse", "sglang sparse")

Launch = Callable[[], Any]  # returns out, a tensor


class Problem:
    """Tensors of one shape."""

    def __init__(self, batch: int, q_len: int, heads: int, kv_len: int) -> None:
        self.batch, self.q_len, self.heads, self.kv_len = batch, q_len, heads, kv_len
        generator = torch.Generator(device="cuda").manual_seed(batch * 7919 + q_len * 31 + heads + kv_len)
        self.pages = -(-kv_len // PAGE)
        num_pages = batch * self.pages
        shape = (num_pages * PAGE, DL + DR)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        order = torch.randperm(num_pages, device="cuda", generator=generator).to(torch.int32)
        self.table = order.view(batch, self.pages)
        q = torch.randn((batch * q_len, heads, DL + DR), device="cuda", dtype=torch.bfloat16, generator=generator)
        self.q = q / 2
        rng = np.random.default_rng(1)
        parents = [-1] + [int(rng.integers(max(i - 4, 0), i)) for i in range(1, q_len)]
        self.parents = np.tile(np.array(parents, np.int32), batch)

    def slots(self) -> torch.Tensor:
        """Slot of every token, (batch, kv_len)."""
        offsets = torch.arange(PAGE, device="cuda")
        slots = self.table.long()[:, :, None] * PAGE + offsets
        return slots.reshape(self.batch, -1)[:, : self.kv_len].to(torch.int32)

    def reference(self, visible: torch.Tensor) -> torch.Tensor:
        """Output of request 0 in float64 (eight heads at a time) under the mask (q_len, q_len) over its last tokens."""
        keys = self.cache[self.slots()[0].long()].double()
        full = torch.ones(self.q_len, self.kv_len, dtype=torch.bool, device="cuda")
        full[:, self.kv_len - self.q_len :] = visible
        parts = []
        for head in range(0, self.heads, 8):
            scores = torch.einsum("qhd,kd->hqk", self.q[: self.q_len, head : head + 8].double(), keys) * SCALE
            scores = scores.masked_fill(~full, float("-inf"))
            parts.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, :DL]))
        return torch.cat(parts, 1)


class CurrentStream:
    """Torch's current stream, under the protocol that CuPy asks for."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def to_cupy(tensor: torch.Tensor) -> Any:
    """The same memory as a CuPy array; 16-bit floats travel as integers, which every version of DLPack knows."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return cupy.from_dlpack(tensor)
    dtype = ml_dtypes.bfloat16 if tensor.dtype == torch.bfloat16 else np.float16
    return cupy.from_dlpack(tensor.view(torch.int16)).view(dtype)


def mlaflash_call(
    problem: Problem,
    budget: str | None,
    mask: str = "tree",
    page_size: int = PAGE,
    dtype: Any = None,
    deterministic: bool = False,
) -> Launch:
    dtype = dtype or torch.bfloat16
    words: TreeMask | str = mask
    cache, table = problem.cache.view(-1, PAGE, DL + DR).to(dtype), problem.table
    if page_size == 1:
        cache, table = problem.cache.to(dtype), problem.slots()
    q = problem.q.to(dtype)
    with cupy.cuda.Stream.from_external(CurrentStream()):
        if mask == "tree":
            packed = TreeMask.from_parents(problem.parents.reshape(problem.batch, problem.q_len))
            words = TreeMask(cupy.asarray(packed.words), packed.max_q)
        call = attention.prepare(
            to_cupy(q),
            to_cupy(cache),
            sm_scale=SCALE,
            kv_lens=cupy.full(problem.batch, problem.kv_len, "int32"),
            block_table=to_cupy(table),
            mask=words,
            max_kv_len=problem.kv_len,
            deterministic=deterministic,
            budget=budget,
        )
    out = torch.from_dlpack(call.out.view(np.int16)).view(dtype)

    def launch() -> torch.Tensor:
        call.launch()
        return out

    return launch


def mlaflash_plan(problem: Problem, budget: str | None) -> Launch:
    """Follow a schedule made on the device, which is not timed, as the peers' own plans are not."""
    plan = VerifyPlan(
        num_heads=problem.heads,
        max_batch=problem.batch,
        max_q_len=problem.q_len,
        max_kv_len=problem.kv_len,
        page_size=PAGE,
        mask="tree",
        sm_scale=SCALE,
        block_table=True,
        budget=budget,
    )
    plan.update(
        kv_lens=torch.full((problem.batch,), problem.kv_len, dtype=torch.int32, device="cuda"),
        q_len=problem.q_len,
        block_table=problem.table,
        mask=MaskSource.from_parents(torch.as_tensor(problem.parents, device="cuda")),
    )
    cache = problem.cache.view(-1, PAGE, DL + DR)
    out = torch.empty((*problem.q.shape[:2], DL), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(problem.q.shape[:2], device="cuda")

    def launch() -> torch.Tensor:
        plan.run(problem.q, cache, out=out, lse=lse)
        return out

    return launch


def use_sm120_tier() -> None:
    """Let FlashInfer import from a copy in which the larger shared-memory tiers are out of reach."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        return
    copy = Path(tempfile.mkdtemp(prefix="flashinfer_sm120tier_"))
    shutil.copytree(Path(found.origin).parent, copy / "flashinfer")
    header = copy / "flashinfer/data/include/flashinfer/attention/mla.cuh"
    header.write_text(
        re.sub(r"smem_limit_per_sm >= (221696|147968)", "smem_limit_per_sm >= 999999999", header.read_text())
    )
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(copy)
    sys.path.insert(0, str(copy))


def flashinfer(backend: str) -> Callable[[Problem], Launch]:
    def build(problem: Problem) -> Launch:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        steps = torch.arange(problem.batch + 1, dtype=torch.int32, device="cuda")
        lens = torch.full((problem.batch,), problem.kv_len, dtype=torch.int32, device="cuda")
        wrapper.plan(
            steps * problem.q_len, steps * problem.pages, problem.table.reshape(-1).contiguous(), lens, problem.heads,
            DL, DR, PAGE, True, SCALE, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        nope, rope = problem.q[..., :DL].contiguous(), problem.q[..., DL:].contiguous()
        cache = problem.cache.view(-1, PAGE, DL + DR)
        return lambda: wrapper.run(nope, rope, cache[..., :DL], cache[..., DL:])

    return build


def flashmla(problem: Problem) -> Launch:
    import flash_mla

    cache = problem.cache.view(-1, PAGE, 1, DL + DR)
    q = problem.q.view(problem.batch, problem.q_len, problem.heads, DL + DR)
    lens = torch.full((problem.batch,), problem.kv_len, dtype=torch.int32, device="cuda")
    metadata = flash_mla.get_mla_metadata()[0]

    def launch() -> torch.Tensor:
        out = flash_mla.flash_mla_with_kvcache(
            q, cache, problem.table, lens, DL, metadata, None, SCALE, True, use_legacy=True
        )[0]
        return out.reshape(-1, problem.heads, DL)

    return launch


class _Anything:
    """Stands in for SGLang's settings, all of which are off."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda *_: False)


def _sglang(module: str) -> Any:
    """Import one of SGLang's Triton files without the rest of SGLang."""
    package = "sglang.kernels.ops.attention"
    if f"{package}.{module}" in sys.modules:
        return sys.modules[f"{package}.{module}"]
    if package not in sys.modules:
        for name in ("sglang", "sglang.srt", "sglang.srt.environ", "sglang.srt.utils", "sglang.kernels",
                     "sglang.kernels.ops", package):  # fmt: skip
            stand_in = types.ModuleType(name)
            stand_in.__path__ = []
            sys.modules[name] = stand_in
        sys.modules["sglang.srt.environ"].envs = _Anything()  # type: ignore[attr-defined]
        utils: Any = sys.modules["sglang.srt.utils"]
        utils.get_device_core_count = lambda _=0: torch.cuda.get_device_properties(0).multi_processor_count
        utils.is_gfx95_supported = utils.is_gfx1250_supported = utils.is_hip = lambda: False
        utils.is_cuda = lambda: True
    for name in ("score_mod", "decode_attention", "extend_attention", "verify_splitkv", "verify_mla"):
        _sglang_file(name)
    return sys.modules[f"{package}.{module}"]


def _sglang_file(name: str) -> Any:
    """Import one file of SGLang's attention kernels by its path."""
    module = f"sglang.kernels.ops.attention.{name.replace('/', '.')}"
    if module not in sys.modules:
        path = Path(os.environ["SGL_SRC"]) / "sglang/kernels/ops/attention" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(module, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ImportError(path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def _extend_arguments(problem: Problem) -> tuple[tuple[Any, ...], torch.Tensor]:
    batch, q_len, prefix = problem.batch, problem.q_len, problem.kv_len - problem.q_len
    slots = problem.slots()
    cache = problem.cache.view(-1, 1, DL + DR)
    new = cache[slots[:, prefix:].reshape(-1).long()].contiguous()
    steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    mask = torch.ones(q_len, problem.kv_len, dtype=torch.bool, device="cuda")
    mask[:, prefix:] = torch.tril(torch.ones(q_len, q_len, dtype=torch.bool, device="cuda"))
    out = torch.empty(batch * q_len, problem.heads, DL, device="cuda", dtype=torch.bfloat16)
    arguments = (
        problem.q, new, new[..., :DL].contiguous(), out, cache, cache[..., :DL], steps * q_len, steps * prefix,
        slots[:, :prefix].reshape(-1).contiguous(), mask.reshape(-1).repeat(batch).to(torch.uint8), True,
        steps.to(torch.int64) * (q_len * problem.kv_len), q_len, 1.0, 1.0,
    )  # fmt: skip
    return arguments, out


def sglang_extend(problem: Problem) -> Launch:
    module = _sglang("extend_attention")
    arguments, out = _extend_arguments(problem)

    def launch() -> torch.Tensor:
        module.extend_attention_fwd(*arguments, sm_scale=SCALE)
        return out

    return launch


def sglang_verify(problem: Problem) -> Launch:
    module = _sglang("verify_mla")
    arguments, out = _extend_arguments(problem)

    def launch() -> torch.Tensor:
        if not module.verify_shared_kv_fwd(*arguments, sm_scale=SCALE):
            raise RuntimeError("refused the shape")
        return out

    return launch


class SparseProblem:
    """Tensors of one sparse shape: distinct slots for each query token, in random order, as an indexer gives them."""

    def __init__(self, num_tokens: int, heads: int, topk: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(num_tokens * 31 + heads)
        options = {"device": "cuda", "generator": generator}
        self.cache = torch.randn((SPARSE_SLOTS, DL + DR), dtype=torch.bfloat16, **options)
        self.q = torch.randn((num_tokens, heads, DL + DR), dtype=torch.bfloat16, **options) / 2
        chosen = [torch.randperm(SPARSE_SLOTS, **options)[:topk] for _ in range(num_tokens)]
        self.indices = torch.stack(chosen).to(torch.int32)

    def reference(self, rows: int) -> torch.Tensor:
        """Output of the first query tokens in float64."""
        keys = self.cache[self.indices[:rows].long()].double()
        scores = torch.einsum("thd,tkd->thk", self.q[:rows].double(), keys) * SCALE
        return torch.einsum("thk,tkd->thd", scores.softmax(-1), keys[..., :DL])


def mlaflash_sparse(problem: SparseProblem, budget: str | None) -> Launch:
    out = torch.empty((*problem.q.shape[:2], DL), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(problem.q.shape[:2], device="cuda")

    def launch() -> torch.Tensor:
        mla_sparse(problem.q, problem.cache, problem.indices, sm_scale=SCALE, out=out, lse=lse, budget=budget)
        return out

    return launch


def sglang_sparse(problem: SparseProblem) -> Launch:
    module = _sglang_file("dsa/triton_sparse_mla_prefill")
    lens = torch.full((len(problem.q),), problem.indices.shape[1], dtype=torch.int32, device="cuda")
    out = torch.empty((*problem.q.shape[:2], DL), dtype=torch.bfloat16, device="cuda")

    def launch() -> torch.Tensor:
        module.sparse_mla_prefill(problem.q, problem.cache, problem.indices, SCALE, topk_length=lens, out=out)
        return out

    return launch


def time_sparse(shape: tuple[int, int, int], budget: str | None, rounds: int) -> dict[str, Any]:
    problem = SparseProblem(*shape)
    candidates = {
        SPARSE[0]: lambda: mlaflash_sparse(problem, budget),
        SPARSE[1]: lambda: sglang_sparse(problem),
    }
    rows = min(8, shape[0])
    return time_candidates(candidates, rounds, lambda _: problem.reference(rows), rows, set())


def interleaved(launches: dict[str, Launch], rounds: int, slow: set[str]) -> dict[str, float]:
    """Median microseconds of each, one launch of every candidate a round, each from a cold level-2 cache."""
    flush = torch.ones(2 * Device.current().l2_bytes // 4, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in launches}
    order = random.Random(0)
    for index in range(rounds):
        # In another order each time: what ran before leaves its mark on clocks and temperatures.
        for name in order.sample(list(launches), len(launches)):
            if name in slow and index >= 3:
                continue
            launch = launches[name]
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            for _ in range(16):  # longer than the host needs to enqueue what is timed
                flush.max()
            start.record()
            launch()
            end.record()
            end.synchronize()
            samples[name].append(1e3 * start.elapsed_time(end))
    return {name: float(np.median(values)) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file for the records")
    parser.add_argument("--budget", default="sm_120", help="limits that mlaflash keeps; 'none' is the GPU's own")
    parser.add_argument("--tier", choices=["sm_120", "own"], default="sm_120", help="FlashInfer's shared-memory tier")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", help="only these, as B,q,H,kv;B,q,H,kv")
    parser.add_argument("--candidates", help="only these, by name")
    parser.add_argument("--sparse", action="store_true", help="time mla_sparse instead, on lists of slots")
    parser.add_argument("--table", help="only write the tables of the README, from this JSON file")
    options = parser.parse_args()
    if options.table:
        update_readme(json.loads(Path(options.table).read_text()))
        return
    if torch is None or not torch.cuda.is_available():
        raise SystemExit("this needs a GPU and torch with CUDA; --table needs neither.")
    if options.tier == "sm_120" and not options.sparse:
        use_sm120_tier()
    budget = None if options.budget == "none" else options.budget
    candidates: dict[str, Callable[[Problem], Launch]] = {
        "mlaflash": lambda problem: mlaflash_call(problem, budget),
        "mlaflash causal": lambda problem: mlaflash_call(problem, budget, mask="causal"),
        "mlaflash page 1": lambda problem: mlaflash_call(problem, budget, page_size=1),
        "mlaflash float16": lambda problem: mlaflash_call(problem, budget, dtype=torch.float16),
        "mlaflash deterministic": lambda problem: mlaflash_call(problem, budget, deterministic=True),
        "mlaflash own limits": lambda problem: mlaflash_call(problem, None),
        "mlaflash plan": lambda problem: mlaflash_plan(problem, budget),
        "flashinfer fa2": flashinfer("fa2"),
        "flashinfer fa3": flashinfer("fa3"),
        "flashmla": flashmla,
        "sglang extend": sglang_extend,
        "sglang verify": sglang_verify,
    }
    if options.candidates:
        candidates = {name: candidates[name] for name in options.candidates.split(",")}
    shapes = SHAPES
    if options.shapes:
        shapes = [tuple(map(int, shape.split(","))) for shape in options.shapes.split(";")]  # type: ignore[misc]

    device = Device.current()
    ceilings = measure_ceilings(device)
    # Programmatic dependent launches have no effect on the legacy stream.
    torch.cuda.set_stream(torch.cuda.Stream())
    print(device.name, ceilings, f"budget {options.budget}, fa2 tier {options.tier}", flush=True)
    records: list[dict[str, Any]] = []
    document = {"gpu": device.name, "budget": options.budget, "tier": options.tier, "records": records}
    document["ceilings"] = {name: getattr(ceilings, name) for name in ceilings.__dataclass_fields__}
    for sparse_shape in SPARSE_SHAPES if options.sparse else ():
        record = time_sparse(sparse_shape, budget, options.rounds)
        records.append({"shape": sparse_shape, **record})
        print(sparse_shape, {name: round(us, 1) for name, us in record["us"].items()}, record["failed"], flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(document, indent=1))
    for shape in shapes if not options.sparse else ():
        record = time_shape(Problem(*shape), candidates, options.rounds)
        records.append({"shape": shape, **record})
        print(line(shape, record), flush=True)
        torch.cuda.empty_cache()
        if options.out:
            Path(options.out).write_text(json.dumps(document, indent=1))


def time_shape(problem: Problem, candidates: dict[str, Callable[[Problem], Launch]], rounds: int) -> dict[str, Any]:
    q_len = problem.q_len
    causal = torch.tril(torch.ones(q_len, q_len, dtype=torch.bool, device="cuda"))
    tree = TreeMask.from_parents(problem.parents[:q_len]).to_dense()[0]
    references = {"causal": problem.reference(causal), "tree": problem.reference(torch.from_numpy(tree).cuda())}

    def reference(name: str) -> torch.Tensor:
        return references["tree" if name.startswith("mlaflash") and name != "mlaflash causal" else "causal"]

    builders = {name: functools.partial(build, problem) for name, build in candidates.items()}
    return time_candidates(builders, rounds, reference, q_len, {"sglang extend"})


def time_candidates(
    builders: dict[str, Callable[[], Launch]],
    rounds: int,
    reference: Callable[[str], torch.Tensor],
    rows: int,
    slow: set[str],
) -> dict[str, Any]:
    """Check the first `rows` query tokens of each candidate, then time those that are right."""
    launches, errors, failed = {}, {}, {}
    for name, build in builders.items():
        try:
            launch = build()
            out = launch()[:rows].double()
            expected = reference(name)
            errors[name] = float((out - expected).norm() / expected.norm())
            # 5e-3: bfloat16 outputs of kernels that round differently; a wrong mask or page is far outside.
            if not errors[name] < 5e-3:
                raise RuntimeError(f"relative error {errors[name]:.1e}")
            launches[name] = launch
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    times = interleaved(launches, rounds, slow)
    return {"us": times, "error": errors, "failed": failed}


def line(shape: tuple[int, ...], record: dict[str, Any]) -> str:
    batch, q_len, heads, kv_len = shape
    times = record["us"]
    text = f"{shape!s:22s}"
    if "mlaflash" in times:
        own = times["mlaflash"]
        rate = batch * kv_len * (DL + DR) * 2 / own / 1e3
        flops = 2 * (2 * DL + DR) * batch * q_len * heads * kv_len / own / 1e6
        text += f" {own:8.1f} us {rate:5.0f} GB/s {flops:4.0f} TF err {record['error']['mlaflash']:.1e} |"
        text += "".join(f" {name} {us / own:.2f}x" for name, us in times.items() if name != "mlaflash")
    return text + "".join(f" [{name}: {why}]" for name, why in record["failed"].items())


PEERS = ("flashinfer fa2", "flashinfer fa3", "flashmla", "sglang extend", "sglang verify")
VARIANTS = {
    "mlaflash causal": "causal mask",
    "mlaflash page 1": "pages of 1",
    "mlaflash float16": "float16",
    "mlaflash deterministic": "deterministic",
    "mlaflash own limits": "own limits",
    "mlaflash plan": "`VerifyPlan.run`",
}


def ceilings_line(document: dict[str, Any]) -> str:
    read, mma = document["ceilings"]["read_gb_s"], document["ceilings"]["mma_tflop_s"]
    return (
        f"{document['gpu']}, limits of {document['budget']}; measured ceilings {read:,.0f} GB/s streaming read and "
        f"{mma:.0f} TFLOP/s `mma.sync`."
    )


def peers_table(document: dict[str, Any]) -> list[str]:
    """Return the problems with what peers take."""
    read, mma = document["ceilings"]["read_gb_s"], document["ceilings"]["mma_tflop_s"]
    fa2 = [record["us"]["flashinfer fa2"] / record["us"]["mlaflash"] for record in document["records"]]
    mean = float(np.exp(np.mean(np.log(fa2))))
    lines = [
        f"{ceilings_line(document)} FlashInfer fa2 at the tier of {document['tier']}: {mean:.2f}x in the geometric "
        "mean.",
        "",
        "| B, q, H, kv | rows | us | GB/s (of read) | TFLOP/s (of mma) | fa2 | FA3 | FlashMLA | SGLang extend (tree) "
        "| SGLang verify (chain) |",
        "|" + "---|" * 10,
    ]
    for record in document["records"]:
        batch, q_len, heads, kv_len = record["shape"]
        times = record["us"]
        own = times["mlaflash"]
        rate = batch * kv_len * (DL + DR) * 2 / own / 1e3
        flops = 2 * (2 * DL + DR) * batch * q_len * heads * kv_len / own / 1e6
        ratios = " | ".join(f"{times[name] / own:.2f}x" if name in times else "fails" for name in PEERS)
        lines.append(
            f"| {batch}, {q_len}, {heads}, {kv_len} | {q_len * heads} | {own:.1f} | {rate:,.0f} ({rate / read:.0%}) "
            f"| {flops:.0f} ({flops / mma:.0%}) | {ratios} |"
        )
    return lines


def variants_table(document: dict[str, Any]) -> list[str]:
    """Return the same problems with what mlaflash takes in other ways, as multiples of the first table's time."""
    records = document["records"]
    worst = max(error for record in records for name, error in record["error"].items() if name.startswith("mlaflash"))
    lines = [
        f"The same run; errors are norms against float64, {worst:.2e} at most in any column.",
        "",
        "| B, q, H, kv | error | " + " | ".join(VARIANTS.values()) + " |",
        "|" + "---|" * (2 + len(VARIANTS)),
    ]
    for record in records:
        times = record["us"]
        ratios = " | ".join(
            f"{times[name] / times['mlaflash']:.2f}x" if name in times else "fails" for name in VARIANTS
        )
        lines.append(f"| {', '.join(map(str, record['shape']))} | {record['error']['mlaflash']:.2e} | {ratios} |")
    return lines


def sparse_table(document: dict[str, Any]) -> list[str]:
    """Return what `mla_sparse` and SGLang's kernel take."""
    lines = [
        ceilings_line(document),
        "",
        "| query tokens, heads, slots of each | mla_sparse, us (error) | SGLang, us (error) | |",
        "|---|---|---|---|",
    ]
    for record in document["records"]:
        own, peer = (
            f"{record['us'][name]:.1f} ({record['error'][name]:.1e})" if name in record["us"] else "fails"
            for name in SPARSE
        )
        ratio = record["us"][SPARSE[1]] / record["us"][SPARSE[0]] if len(record["us"]) == len(SPARSE) else None
        shown = f"{ratio:.2f}x" if ratio is not None else ""
        lines.append(f"| {', '.join(map(str, record['shape']))} | {own} | {peer} | {shown} |")
    return lines


def update_readme(document: dict[str, Any]) -> None:
    """Write the tables between their markers."""
    readme = Path(__file__).parents[1] / "README.md"
    text = readme.read_text()
    tables = {"peers-table": peers_table, "variants-table": variants_table}
    if any(SPARSE[0] in record["us"] for record in document["records"]):
        tables = {"sparse-table": sparse_table}
    elif any("mlaflash" not in record["us"] for record in document["records"]):
        raise SystemExit("this file has problems without a time of mla_verify.")
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = head + begin + "\n".join(table(document)) + "\n" + end + rest.split(end)[1]
    readme.write_text(text)


if __name__ == "__main__":
    main()
