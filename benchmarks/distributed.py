"""Time verify steps over a cache that is spread over the GPUs of this machine, against one GPU with all of it.

    python benchmarks/distributed.py [--ranks 2] [--heads 64] [--q-len 8] [--kv-len 262144] [--batch 1] [--json PATH]
    python benchmarks/distributed.py --predict [--update-docs]

A step is q's all-gather, the attention and the merge of one layer, bfloat16, shuffled pages of 64 tokens dealt out in
turn, causal. Several layers with caches of their own, larger than the level-2 cache together, are captured in one CUDA
graph; times are medians over replays, of the slowest rank. Every rank also computes the whole by itself, and compares.
--predict measures nothing and needs no GPU: it prints the model's times, and --update-docs puts them into the docs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlaflash import Device, VerifyPlan, VerifyShape
from mlaflash.device import device_count
from mlaflash.distributed import Interleaved, NcclCommunicator, ShardedPlan
from mlaflash.errors import MlaFlashError
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.ranks import free_address, run_ranks
from mlaflash.scaling import NVLINK, PCIE5, predict_replicated, predict_sharded

PAGE, SCALE = 64, 0.14468
LAYERS_MB = 400  # of one rank's caches together
DOCS = Path(__file__).parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- predicted-table -->\n", "<!-- /predicted-table -->"


@dataclass(frozen=True)
class Step:
    """`heads` are those of all ranks, `kv_len` those of all ranks, too."""

    heads: int
    q_len: int
    kv_len: int
    batch: int
    head_groups: int = 1

    def shape(self) -> VerifyShape:
        return VerifyShape(num_heads=self.heads, q_len=self.q_len, kv_len=self.kv_len, batch=self.batch, page_size=PAGE)


def cache(step: Step, rank: int, num_ranks: int, layer: int) -> tuple[Any, Any]:
    """Make the pages of a rank, shuffled, and its table; the tokens are the same however many ranks there are."""
    import cupy

    count = step.kv_len // PAGE
    generator = cupy.random.default_rng(layer)
    tokens = generator.standard_normal((step.batch, count, PAGE, 576), np.float32)[:, rank::num_ranks]
    flat = tokens.astype("bfloat16").reshape(-1, PAGE, 576)
    del tokens
    order = np.random.default_rng(layer).permutation(len(flat)).astype(np.int32)
    shuffled = cupy.empty_like(flat)
    pages = cupy.asarray(order)
    shuffled.view("uint16")[pages] = flat.view("uint16")
    return shuffled, pages.reshape(step.batch, -1)


def time_graph(enqueue: Callable[[], None], layers: int, communicator: NcclCommunicator, stream: Any) -> list[float]:
    """Capture `enqueue`, which does so many layers, and return the microseconds of one layer in several windows."""
    import cupy

    with stream:
        enqueue()
        communicator.synchronize(stream)
        stream.begin_capture()
        enqueue()
        graph = stream.end_capture()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        samples = []
        for window in range(8):
            replays = max(2, 24 // layers)
            begin.record(stream)
            for _ in range(replays):
                graph.launch(stream)
            end.record(stream)
            communicator.synchronize(stream)
            if window:  # the first one warms up
                samples.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / replays / layers)
    return samples


def measure(rank: int, num_ranks: int, address: tuple[str, int], steps: list[Step], timeout: float) -> list[Any]:
    """Do all steps as one rank."""
    import cupy

    cupy.cuda.Device(rank).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    results = []
    with NcclCommunicator(num_ranks, rank, address, timeout=timeout) as communicator:
        for step in steps:
            started = time.perf_counter()
            with stream:
                results.append(measure_step(step, communicator, stream))
            results[-1]["seconds"] = time.perf_counter() - started
            if rank == 0:  # at once: a later step may fail
                print(step, {name: round(us, 1) for name, us in results[-1]["us"].items()}, flush=True)
            cupy.get_default_memory_pool().free_all_blocks()
    return results


def measure_one(
    step: Step, q: Any, kv_lens: Any, common: dict[str, Any], communicator: NcclCommunicator, stream: Any
) -> tuple[list[float], Any, Any]:
    """Do the whole step on this GPU alone: its time, out and lse."""
    plan = VerifyPlan(num_heads=step.heads, **common)
    layers = [cache(step, 0, 1, layer) for layer in range(2)]
    plan.update(kv_lens=kv_lens, block_table=layers[0][1])
    out, lse = plan.run(q, layers[0][0])

    def enqueue() -> None:
        for tokens, _ in reversed(layers):  # the first layer last: its results remain
            plan.run(q, tokens, out=out, lse=lse)

    return time_graph(enqueue, len(layers), communicator, stream), out, lse


def measure_step(step: Step, communicator: NcclCommunicator, stream: Any) -> dict[str, Any]:
    import cupy

    rank, ranks = communicator.rank, communicator.num_ranks
    heads, tokens = step.heads // ranks, step.batch * step.q_len
    kv_mb = step.batch * step.kv_len * 1152 / 1e6
    layers = int(min(16, max(2, LAYERS_MB / kv_mb * ranks)))
    q = (0.3 * cupy.random.default_rng(99).standard_normal((tokens, step.heads, 576))).astype("bfloat16")
    kv_lens = cupy.full(step.batch, step.kv_len, "int32")
    common: dict[str, Any] = {
        "max_batch": step.batch,
        "max_q_len": step.q_len,
        "max_kv_len": step.kv_len,
        "page_size": PAGE,
        "block_table": True,
        "sm_scale": SCALE,
    }
    one_us, *expected = measure_one(step, q, kv_lens, common, communicator, stream)
    cupy.get_default_memory_pool().free_all_blocks()

    plan = ShardedPlan(communicator, Interleaved(ranks, PAGE), num_heads=heads, head_groups=step.head_groups, **common)
    shards = [cache(step, rank, ranks, layer) for layer in range(layers)]
    plan.update(kv_lens=kv_lens, block_table=shards[0][1])
    columns = slice(rank * heads, (rank + 1) * heads)
    mine = cupy.ascontiguousarray(q.view("uint16")[:, columns]).view(q.dtype)
    out, lse = plan.run(mine, shards[0][0])
    communicator.synchronize(stream)
    limits = tolerance("bfloat16", "bfloat16")
    # Both were rounded, each at other places.
    result = compare(
        out.get(),
        lse.get(),
        expected[0][:, columns].get().astype(np.float64),
        expected[1][:, columns].get().astype(np.float64),
        type(limits)(**{name: 2 * value for name, value in asdict(limits).items()}),
    )

    def sharded() -> None:
        for shard, _ in shards:
            plan.run(mine, shard, out=out, lse=lse)

    begin = time.perf_counter()
    for _ in range(20):
        plan.run(mine, shards[0][0], out=out, lse=lse)
    host_us = (time.perf_counter() - begin) / 20 * 1e6
    communicator.synchronize(stream)
    times = {"host": [host_us], "one_gpu": one_us, "step": time_graph(sharded, layers, communicator, stream)}
    times |= measure_parts(step, plan, shards, communicator, stream)
    return {
        **asdict(step),
        "rank": rank,
        "ranks": ranks,
        "layers": layers,
        "right": bool(result.passed),
        "reason": str(result.reason),
        "max_abs": float(result.max_abs),
        "us": {name: float(np.median(samples)) for name, samples in times.items()},
        "us_samples": times,
    }


def measure_parts(
    step: Step, plan: ShardedPlan, shards: list[Any], communicator: NcclCommunicator, stream: Any
) -> dict[str, list[float]]:
    """Time the parts of a step by themselves, without groups of heads; and what an update takes."""
    import cupy

    ranks, tokens, repeats = communicator.num_ranks, step.batch * step.q_len, 10
    heads = step.heads // ranks // step.head_groups
    q = cupy.zeros((tokens, heads * ranks, 576), "bfloat16")
    out, lse = cupy.empty((tokens, heads * ranks, 512), "bfloat16"), cupy.empty((tokens, heads * ranks), "float32")
    gathered = cupy.zeros((ranks, heads * tokens * 576 * 2), "uint8")
    parts, received = (cupy.zeros((ranks, heads * tokens * 514 * 2), "uint8") for _ in range(2))

    def attention() -> None:
        for shard, _ in shards:
            plan.local.run(q, shard, out=out, lse=lse)

    def gather() -> None:
        for _ in range(repeats):
            communicator.all_gather(gathered, stream)

    def exchange() -> None:
        for _ in range(repeats):
            communicator.all_to_all(parts, received, stream)

    def update() -> None:
        plan.update(kv_lens=kv_lens, block_table=shards[0][1])

    kv_lens = cupy.full(step.batch, step.kv_len, "int32")
    return {
        "attention": time_graph(attention, len(shards), communicator, stream),
        "gather": time_graph(gather, repeats, communicator, stream),
        "exchange": time_graph(exchange, repeats, communicator, stream),
        "update": time_graph(update, 1, communicator, stream),
    }


def table(results: list[list[Any]]) -> str:
    """Write what all ranks measured: of each time that of the slowest rank."""
    names = ("one_gpu", "step", "attention", "gather", "exchange", "update", "host")
    lines = ["B q H kv groups | " + " ".join(f"{name:>9}" for name in names) + "  (us) | step / one GPU | right"]
    for of_ranks in zip(*results, strict=True):
        first = of_ranks[0]
        us = {name: max(result["us"][name] for result in of_ranks) for name in names}
        right = all(result["right"] for result in of_ranks)
        lines.append(
            f"{first['batch']} {first['q_len']} {first['heads']} {first['kv_len']} {first['head_groups']} | "
            + " ".join(f"{us[name]:9.1f}" for name in names)
            + f" | {us['step'] / us['one_gpu']:.3f} | {right} (max error {max(r['max_abs'] for r in of_ranks):.2e})"
        )
        lines += [f"  rank {result['rank']}: {result['reason']}" for result in of_ranks if not result["right"]]
    return "\n".join(lines)


def predicted_table() -> str:
    """Write the model's times of one layer, for 64 heads in all."""
    links = {
        replace(Device.for_arch("sm_90"), name="NVIDIA H200"): (NVLINK, PCIE5),
        Device.for_arch("sm_120"): (PCIE5,),  # it has no NVLink
    }
    steps = [(1, 8, 32_768), (1, 8, 262_144), (1, 1, 262_144), (32, 8, 32_768)]
    lines = [
        "Predicted, not measured: microseconds of one layer, 64 heads in all, bfloat16; "
        "`python benchmarks/distributed.py --predict`.",
        "",
        f"| GPU | B, q, tokens | 1 GPU | link | {' | '.join(f'{n} GPUs' for n in (2, 4, 8))} |",
        "|---|---|---|---|---|---|---|",
    ]
    for device in links:
        for batch, q_len, kv_len in steps:
            shape = Step(64, q_len, kv_len, batch).shape()
            alone = predict_sharded(shape, 1, PCIE5, device).total_us
            rows: dict[str, list[float]] = {
                link.name: [predict_sharded(shape, ranks, link, device).total_us for ranks in (2, 4, 8)]
                for link in links[device]
            }
            rows["none: tokens on every GPU"] = [
                predict_replicated(shape, ranks, device).total_us for ranks in (2, 4, 8)
            ]
            lines += [
                f"| {device.name} | {batch}, {q_len}, {kv_len:,} | {alone:,.0f} | {name} | "
                + " | ".join(f"{us:,.0f} ({us / alone:.2f})" for us in times)
                + " |"
                for name, times in rows.items()
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="GPUs; by default all")
    parser.add_argument("--heads", type=int, default=64, help="of all ranks together")
    parser.add_argument("--q-len", type=int, default=8)
    parser.add_argument("--kv-len", type=int, nargs="+", default=[262_144], help="tokens on all ranks together")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--head-groups", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--timeout", type=float, default=20, help="seconds that a rank waits for the others")
    parser.add_argument("--predict", action="store_true", help="print the model's times; measures nothing")
    parser.add_argument("--update-docs", action="store_true", help="with --predict: write them into the docs")
    options = parser.parse_args()
    if options.predict:
        text = predicted_table()
        print(text)
        if options.update_docs:
            head, rest = DOCS.read_text().split(BEGIN)
            DOCS.write_text(head + BEGIN + text + END + rest.split(END)[1])
        return
    try:
        ranks = options.ranks or device_count()
        steps = [
            Step(options.heads, options.q_len, kv_len, options.batch, groups)
            for kv_len in options.kv_len
            for groups in options.head_groups
        ]
        for step in steps:
            if step.kv_len % (PAGE * ranks) or step.heads % (ranks * step.head_groups):
                raise SystemExit(f"{step}: tokens must be a multiple of {PAGE * ranks}, heads of {ranks} x the groups")
        results = run_ranks(measure, ranks, ranks, free_address(), steps, options.timeout)
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
