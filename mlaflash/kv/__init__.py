"""Rows of the KV cache moved to other slots: accepted tree paths to the front, whole requests into aligned runs."""

from mlaflash.kv.compact import plan_compact
from mlaflash.kv.defrag import Defragmentation, apply_remap, plan_defrag
from mlaflash.kv.move import Moves, RowMover, move_rows

__all__ = ["Defragmentation", "Moves", "RowMover", "apply_remap", "move_rows", "plan_compact", "plan_defrag"]
