"""SGLang's Triton backend from its sources alone: what the verify call does not reach is replaced by nothing.

The folder holds ``sglang/`` as in the wheel; the environment variable SGLANG_SOURCES names it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REAL = {
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.triton_backend",
    *(f"sglang.kernels.ops.attention.{name}" for name in ("decode_attention", "extend_attention", "score_mod")),
    *(f"sglang.kernels.ops.attention.{name}" for name in ("verify_splitkv", "verify_mla")),
    "sglang.srt.plugins.hook_registry",
}


class Nothing:
    """Stands for whatever is imported and not used: its attributes are nothing too, and questions are answered no.

    The answer is a real bool, which Triton takes for a constant of a kernel.
    """

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *arrays: Any, **options: Any) -> bool:
        return False


def is_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


KNOWN: dict[str, Any] = {
    "is_cuda": is_cuda,
    "debug_kernel_api": lambda function: function,
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
}


class Stub(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name, Nothing())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules in the folder; every other one of the package is a stub."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("sglang", "sgl_kernel"):
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.root / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def install(root: Path) -> None:
    """Let ``import sglang`` find the folder."""
    sys.meta_path.insert(0, Finder(root))


def sources() -> Path | None:
    """Return the folder, where the environment names one."""
    folder = os.environ.get("SGLANG_SOURCES")
    return Path(folder) if folder else None
