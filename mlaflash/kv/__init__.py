"""Rows of the KV cache: moved to other slots (accepted tree paths, whole requests), and written in 8 bits."""

from mlaflash.kv.compact import plan_compact
from mlaflash.kv.defrag import Defragmentation, apply_remap, plan_defrag
from mlaflash.kv.move import Moves, RowMover, move_rows
from mlaflash.kv.quantize import dequantize_ds_mla, dequantize_e4m3, quantize_ds_mla, quantize_e4m3

__all__ = [
    "Defragmentation",
    "Moves",
    "RowMover",
    "apply_remap",
    "dequantize_ds_mla",
    "dequantize_e4m3",
    "move_rows",
    "plan_compact",
    "plan_defrag",
    "quantize_ds_mla",
    "quantize_e4m3",
]
