"""Errors against float64 of every kernel on hard problems, beside the formula in 16 bits and, if installed, FlashInfer.

One request of 8 query tokens and 8 heads. The formula in 16 bits is what a careful kernel does: float32 scores and
sums, weights and result rounded to the type of q. An error is relative to the element or to the root mean square of its
row, whichever is larger. No kernel may be worse than twice the worse of formula and FlashInfer, in the largest error
and in the mean. Less than half a unit in the last place of the result counts as that, and as a tenth of it in the mean:
where one token has all the weight, the formula is exact, and a kernel whose maximum is not rounds that weight once.

    python benchmarks/numerics.py --out numerics.json      # on a GPU; --device emulator: short contexts
    python benchmarks/numerics.py --table numerics.json    # rewrites docs/numerics.md
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mlaflash import mla_verify
from mlaflash.emulator import mla_verify as emulated_verify
from mlaflash.kv import dequantize_ds_mla, dequantize_e4m3, quantize_ds_mla, quantize_e4m3
from mlaflash.lab.target import GpuTarget, Target, read_problem
from mlaflash.schedule import FP8_KERNELS, MMA_KERNELS

DOC = Path(__file__).parents[1] / "docs/numerics.md"
BEGIN, END = "<!-- numerics -->\n", "<!-- /numerics -->"
Q_LEN, HEADS, PAGE = 8, 8, 64
SCALE = 0.14468
ROUNDING = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LENGTHS = (1, 17, 256, 4096, 65536, 262144)
EMULATED_LENGTHS = (1, 17, 256)
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KERNELS: dict[str, tuple[str, ...]] = {
    "float32": ("naive", "tile"),
    "bfloat16": ("naive", "tile", *MMA_KERNELS),
    "float16": ("naive", "tile", *MMA_KERNELS),
    **FP8_KERNELS,
}


@dataclass(frozen=True)
class Problem:
    """Arrays of one request: q (8, 8, 576), rows (kv_len, 576), in one 16-bit type or in float32."""

    name: str
    dtype: str
    q: Any
    rows: Any


def problems(lengths: tuple[int, ...]) -> Iterator[Problem]:
    """Make every problem in every type."""
    longest = lengths[-1]
    for dtype, numpy_type in DTYPES.items():
        for kv_len in lengths:
            yield like_a_model(f"kv {kv_len:,}", dtype, kv_len, 2.0)
        short = min(longest, 4096)
        yield like_a_model("logits to 1e4", dtype, short, 3000.0)
        yield like_a_model("near-uniform", dtype, min(longest, 65536), 1e-3)
        rng = np.random.default_rng(7)
        hot = like_a_model("one-hot", dtype, short, 0.1)
        # A token for each row of q, which scores about 40 more than all others.
        for i, at in enumerate(rng.choice(short, Q_LEN * HEADS, replace=False)):
            own = hot.q.reshape(-1, 576)[i].astype(np.float32)
            hot.rows[at] = (own * (40.0 / (SCALE * float(own @ own)))).astype(numpy_type)
        yield hot
        tiny = like_a_model("denormals", dtype, short, 2.0)
        # Of float16 its own, of the others those of float32, which accumulators have too.
        unit = 2.0**-24 if dtype == "float16" else 2.0**-136
        tiny.rows[:, :512] = (rng.integers(1, 1024, (short, 512)) * unit).astype(numpy_type)
        yield tiny


def like_a_model(name: str, dtype: str, kv_len: int, spread: float) -> Problem:
    """Draw rows of a common vector and noise, and q so that the scores of a row spread by so much."""
    q, rows = drawn(kv_len)
    kind = DTYPES[dtype]
    return Problem(name, dtype, (q * np.float32(spread / (24 * SCALE))).astype(kind), rows.astype(kind))


@functools.cache
def drawn(kv_len: int) -> tuple[Any, Any]:
    """Draw q and rows in float32."""
    rng = np.random.default_rng([kv_len, 11])
    rows = rng.standard_normal((kv_len, 576), np.float32)
    rows += 0.5 * rng.standard_normal(576, np.float32)
    return rng.standard_normal((Q_LEN, HEADS, 576), np.float32), rows


def to_host(array: Any) -> Any:
    """Bring an array of either library to NumPy, whose conversions and divisions keep subnormal numbers."""
    return array if isinstance(array, np.ndarray) else array.get()


def formula(xp: Any, q: Any, rows: Any, dtype: Any) -> Any:
    """Attend all rows of q to all tokens, in float64, or in float32 with weights and result rounded to a type."""
    kind = np.float64 if dtype is None else np.float32
    flat, keys = (xp.asarray(array.astype(np.float32).astype(kind)) for array in (q.reshape(-1, 576), rows))
    scores = flat @ keys.T * kind(SCALE)
    weights = xp.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1, keepdims=True)
    if dtype is None:
        return to_host(weights @ keys[:, :512]) / to_host(total)
    rounded = weights.astype(dtype).astype(np.float32)
    return (to_host(rounded @ keys[:, :512]) / to_host(total)).astype(dtype)


def errors(got: Any, expected: Any) -> tuple[float, float]:
    """Give the largest and the mean relative error."""
    size = np.maximum(np.abs(expected), np.sqrt((expected**2).mean(1, keepdims=True)))
    error = np.abs(to_host(got).reshape(expected.shape).astype(np.float32).astype(np.float64) - expected) / size
    return float(error.max()), float(error.mean())


def paged(xp: Any, rows: Any) -> tuple[Any, Any]:
    """Lay rows into shuffled pages; return the pool and the table."""
    pages = -(-len(rows) // PAGE)
    order = np.random.default_rng(3).permutation(pages)
    pool = xp.zeros((pages * PAGE, rows.shape[1]), rows.dtype)
    pool[xp.asarray(order[np.arange(len(rows)) // PAGE] * PAGE + np.arange(len(rows)) % PAGE)] = rows
    return pool.reshape(pages, PAGE, -1), xp.asarray(order[None].astype(np.int32))


def call_flashinfer(q: Any, pool: Any, table: Any, kv_len: int) -> Any:
    """Call FlashInfer's fa2 kernel on the same arrays of a GPU."""
    import cupy
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    def tensor(array: Any) -> Any:
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(array.dtype.name)
        return torch.from_dlpack(array) if kind is None else torch.from_dlpack(array.view(np.int16)).view(kind)

    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), backend="fa2")
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (Q_LEN, table.shape[1])]
    lens = torch.tensor([kv_len], dtype=torch.int32, device="cuda")
    there, cache = tensor(q), tensor(pool)
    wrapper.plan(
        *ends, tensor(table).reshape(-1), lens, HEADS, 512, 64, PAGE, False, SCALE, there.dtype, there.dtype
    )  # fmt: skip
    nope, rope = there[..., :512].contiguous(), there[..., 512:].contiguous()
    out = wrapper.run(nope, rope, cache[..., :512], cache[..., 512:])
    return cupy.from_dlpack(out.float())


def formats(problem: Problem) -> tuple[str, ...]:
    """Name what the cache may hold."""
    # The formats of 8 bits have none of the numbers that denormals are about.
    has_codes = problem.dtype != "float32" and problem.name != "denormals"
    return (problem.dtype, *(FP8_KERNELS if has_codes else ()))


def compile_all(target: Target, all_problems: list[Problem]) -> None:
    """Compile what the measurements need side by side, by shapes alone."""
    launches = []
    for problem in all_problems:
        pages = -(-len(problem.rows) // PAGE)
        for stored in formats(problem):
            width, kind = {"fp8_ds_mla": (656, np.uint8), "float8_e4m3": (576, np.uint8)}.get(
                stored, (576, problem.rows.dtype)
            )
            arguments = call(
                problem.q,
                np.empty((pages, PAGE, width), kind),
                np.empty((1, pages), np.int32),
                np.empty(1, np.int32),
                stored,
                1.0,
            )
            for kernel in KERNELS[stored]:
                launches += target.plan(read_problem(arguments), kernel, None).launches
    target.build(launches)


def call(q: Any, pool: Any, table: Any, lens: Any, stored: str, kv_scale: Any) -> dict[str, Any]:
    """Give the arguments of a call."""
    options = {"kv_dtype": stored} if stored in FP8_KERNELS else {}
    if stored == "float8_e4m3":
        options["kv_scale"] = kv_scale
    return {
        "q": q,
        "kv_cache": pool,
        "sm_scale": SCALE,
        "kv_lens": lens,
        "block_table": table,
        "mask": "none",
        **options,
    }


def compile_flashinfer() -> Callable[..., Any] | None:
    """Let FlashInfer compile its kernels side by side; None where it does not run."""
    import cupy

    def first(dtype: str) -> None:
        problem = like_a_model("first", dtype, PAGE, 2.0)
        pool, pages = paged(cupy, cupy.asarray(problem.rows))
        call_flashinfer(cupy.asarray(problem.q), pool, pages, PAGE)
        cupy.cuda.Device().synchronize()

    try:
        importlib.import_module("flashinfer.mla")
        with ThreadPoolExecutor() as pool:
            list(pool.map(first, ("bfloat16", "float16")))
    except Exception as error:  # whatever keeps it from running, our own kernels are to be measured
        print(f"FlashInfer does not run here, so that the formula stands alone: {type(error).__name__}: {error}"[:500])
        return None
    return call_flashinfer


def measure(problem: Problem, device: str, peer: Callable[..., Any] | None) -> Iterator[dict[str, Any]]:
    """Give a record for each thing that solves a problem, in each format of the cache."""
    on_gpu = device == "gpu"
    xp: Any = importlib.import_module("cupy") if on_gpu else np
    verify: Any = mla_verify if on_gpu else emulated_verify
    q, stored_rows = xp.asarray(problem.q), xp.asarray(problem.rows)
    for stored in formats(problem):
        rows, given, kv_scale = problem.rows, stored_rows, None
        if stored == "float8_e4m3":
            given, kv_scale = quantize_e4m3(stored_rows)
            rows = dequantize_e4m3(given, kv_scale)
        elif stored == "fp8_ds_mla":
            given = quantize_ds_mla(stored_rows)
            rows = dequantize_ds_mla(given)
        exact = formula(xp, problem.q, rows, None)
        results = {"formula": formula(xp, problem.q, rows, problem.q.dtype)}
        pool, table = paged(xp, given)
        arguments = call(q, pool, table, xp.asarray(np.array([len(rows)], np.int32)), stored, kv_scale)
        for kernel in KERNELS[stored]:
            results[kernel] = verify(**arguments, kernel=kernel)[0]
        if peer is not None and stored == problem.dtype != "float32":
            results["flashinfer"] = peer(q, pool, table, len(rows))
        for name, out in results.items():
            largest, mean = errors(out, exact)
            common = {"problem": problem.name, "dtype": problem.dtype, "cache": stored, "kernel": name}
            yield common | {"max": largest, "mean": mean}


def failures(records: list[dict[str, Any]], others_are: Collection[str] = ("formula", "flashinfer")) -> list[str]:
    """Name what is worse than twice the others."""
    others: dict[tuple[str, ...], tuple[float, float]] = {}
    for record in records:
        if record["kernel"] in others_are:
            key = record["problem"], record["dtype"], record["cache"]
            before = others.get(key, (ROUNDING[record["dtype"]], ROUNDING[record["dtype"]] / 10))
            others[key] = max(before[0], record["max"]), max(before[1], record["mean"])
    found = []
    for record in records:
        limits = others[record["problem"], record["dtype"], record["cache"]]
        for which, limit in zip(("max", "mean"), limits, strict=True):
            if not record[which] <= 2 * limit:
                found.append(
                    f"{record['problem']}, q {record['dtype']}, cache {record['cache']}, {record['kernel']}: {which} "
                    f"{record[which]:.1e}, others {limit:.1e}"
                )
    return found


def table(document: dict[str, Any]) -> str:
    """Return the tables, one for each type of q and of the cache."""
    lines = [f"{document['device']}; largest error, and mean in brackets.", ""]
    kinds: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for record in document["records"]:
        rows = kinds.setdefault((record["dtype"], record["cache"]), {})
        rows.setdefault(record["problem"], {})[record["kernel"]] = f"{record['max']:.1e} ({record['mean']:.1e})"
    for (dtype, cache), rows in kinds.items():
        names = list(next(iter(rows.values())))
        lines += [f"q {dtype}, cache {cache}:", "", f"| problem | {' | '.join(names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        lines += [f"| {name} | {' | '.join(cells[n] for n in names)} |" for name, cells in rows.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "emulator"), default="gpu")
    parser.add_argument("--out", type=Path, help="write the records here")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only rewrite docs/numerics.md by this file")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer contexts")
    options = parser.parse_args()
    if options.table:
        head, rest = DOC.read_text().split(BEGIN)
        DOC.write_text(head + BEGIN + table(json.loads(options.table.read_text())) + END + rest.split(END)[1])
        return
    lengths = LENGTHS if options.device == "gpu" else EMULATED_LENGTHS
    lengths = tuple(length for length in lengths if length <= options.longest)
    peer, name = None, "the emulator"
    if options.device == "gpu":
        target = GpuTarget()
        name = target.name
        with ThreadPoolExecutor() as pool:
            compiling = pool.submit(compile_flashinfer)  # takes the longest
            all_problems = list(problems(lengths))
            compile_all(target, all_problems)
            peer = compiling.result()
    else:
        all_problems = list(problems(lengths))
    records = [record for problem in all_problems for record in measure(problem, options.device, peer)]
    document = {"device": name, "records": records}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1))
    worse, ours = failures(records), [record for record in records if record["kernel"] != "flashinfer"]
    for line in worse:
        print(f"WORSE {line}")
    count = sum(record["kernel"] not in ("formula", "flashinfer") for record in records)
    bad, alone = (len({line.rsplit(":", 1)[0] for line in lines}) for lines in (worse, failures(ours, ("formula",))))
    print(
        f"{count - bad} of {count} within twice the others' errors, {count - alone} within twice the formula's ({name})"
    )
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
