"""Time `tile` against `naive` and against its own floors on one GPU, and write the table of the README.

    python benchmarks/tile.py [--update-readme]

float32, one request, 8 query tokens, 8 heads, causal, shuffled slots. Times are medians of CUDA events from a cold
level-2 cache and hold every kernel of the call, combine included.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from mlaflash import attention, oracle
from mlaflash.device import Device
from mlaflash.errors import MlaFlashError
from mlaflash.lab.ceilings import Ceilings, measure_ceilings
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.timing import measure
from mlaflash.tiles import NaiveConfig, TileConfig, tile_candidates

Q_LEN, HEADS = 8, 8
ROWS = Q_LEN * HEADS
SPLITS = (16, 32, 64, 128)
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tile-table -->\n", "<!-- /tile-table -->"


def problem(kv_len: int) -> dict[str, Any]:
    rng = np.random.default_rng(kv_len)
    pool = rng.standard_normal((kv_len + 64, 576), np.float32)
    return {
        "q": 0.3 * rng.standard_normal((1, Q_LEN, HEADS, 576), np.float32),
        "kv_cache": pool,
        "kv_lens": np.array([kv_len], np.int32),
        "kv_indptr": np.array([0, kv_len], np.int32),
        "kv_indices": rng.permutation(kv_len + 64)[:kv_len].astype(np.int32),
        "sm_scale": 0.14468,
    }


def shared_bytes_moved(config: TileConfig, kv_len: int) -> float:
    """Bytes that pass the shared-memory pipes, 128 a wavefront: fill, scores and values; the rest is small."""
    heads, tokens = min(8, config.ht), 2 if config.tk >= 32 else 1
    warp_steps = (config.ht // heads) * config.tk / (4 * tokens) * 18  # 18 steps of 8 lanes x 4 dims cover 576
    scores = warp_steps * (heads * 128 + tokens * 512)
    values = config.tk * 8 * (256 + max(1, config.ht // 4) * 128)
    fill = config.tk * 576 * 4
    tiles = -(-kv_len // config.tk) * Q_LEN * -(-HEADS // config.ht)
    return float(tiles * (scores + values + fill))


def row(kv_len: int, ceilings: Ceilings, device: Device) -> str:
    host = problem(kv_len)
    arrays = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in host.items()}
    expected = oracle.mla_verify(**host)

    def time(config: Any) -> float:
        call = attention.prepare(**arrays, tiles=config)
        call.launch()
        result = compare(call.out.get(), call.lse.get(), *expected, tolerance("float32", "float32"))
        if not result.passed:
            raise SystemExit(f"{config}: {result.reason}")
        return measure(call.launch, device, samples=9).median_us

    naive = time(NaiveConfig())
    fitting = [c for c in tile_candidates() if c.shared_bytes() <= device.shared_per_block and c.ht in (4, 8)]
    times = {(c.ht, c.tk, n): time(TileConfig(c.ht, c.tk, n)) for c in fitting for n in SPLITS}
    best = min(times, key=lambda key: times[key])
    best_of = {n: min(us for key, us in times.items() if key[2] == n) for n in SPLITS}
    fma = 2 * ROWS * kv_len * 1088 / ceilings.fma_tflop_s / 1e6
    shared = shared_bytes_moved(TileConfig(*best), kv_len) / ceilings.shared_tb_s / 1e6
    read = kv_len * 2304 / ceilings.read_gb_s / 1e3
    naive_rate = ROWS * kv_len * 1088 * 4 / naive / 1e3
    config = f"{best[0]} x {best[1]} x {best[2]}"
    return (
        f"| {kv_len:,} | {naive:,.0f} ({naive_rate:,.0f} GB/s) "
        f"| **{times[best]:,.0f}** ({config}) | {naive / times[best]:.1f}x "
        f"| {best_of[16]:,.0f} / {best_of[64]:,.0f} | {fma:,.0f} / {shared:,.0f} / {read:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update-readme", action="store_true", help="write the table between its markers")
    options = parser.parse_args()
    try:
        device = Device.current()
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    ceilings = measure_ceilings(device)
    lines = [
        f"{device.name}; measured ceilings: {ceilings.read_gb_s:,.0f} GB/s streaming read, "
        f"{ceilings.fma_tflop_s:.0f} TFLOP/s float32 FMA, "
        f"{ceilings.shared_tb_s:.0f} TB/s shared memory (128 B a clock and SM), "
        f"{ceilings.mma_tflop_s:.0f} TFLOP/s `mma.sync` bfloat16.",
        "",
        "| kv | naive, us (its KV loads) | best tile, us (HT x TK x NSPLIT) | naive / tile "
        "| best at NSPLIT 16 / 64, us | floors of that tile, us: FMA / shared memory / read KV once |",
        "|---|---|---|---|---|---|",
        *(row(kv_len, ceilings, device) for kv_len in (4096, 16384, 65536)),
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    if options.update_readme:
        text = README.read_text()
        head, rest = text.split(BEGIN)
        README.write_text(head + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
