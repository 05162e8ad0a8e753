"""Attention backends of engines from their sources alone: what the calls do not reach is replaced by nothing.

A folder holds ``sglang/`` or ``vllm/`` as in the wheel; the environment variables SGLANG_SOURCES and VLLM_SOURCES
name it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SGLANG = {
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.triton_backend",
    *(f"sglang.kernels.ops.attention.{name}" for name in ("decode_attention", "extend_attention", "score_mod")),
    *(f"sglang.kernels.ops.attention.{name}" for name in ("verify_splitkv", "verify_mla")),
    "sglang.srt.plugins.hook_registry",
}
VLLM = {
    "vllm.v1.attention.backends.registry",
    "vllm.v1.attention.backends.mla.triton_mla",
    "vllm.v1.attention.ops.triton_decode_attention",
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


class Platform:
    """A GPU of NVIDIA's, as vLLM asks for it."""

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def num_compute_units(self) -> int:
        import torch

        return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 8


class Base:
    """Stands for the bases of vLLM's classes, which a metadata class makes generic."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class Impl(Base):
    """Sets what the implementations of MLA inherit."""

    dcp_world_size = 1

    def __init__(self, num_heads: int, head_size: int, scale: float, *_rest: Any, **mla_args: Any) -> None:
        self.num_heads, self.scale = num_heads, float(scale)
        self.kv_cache_dtype, self.kv_lora_rank = _rest[3], mla_args["kv_lora_rank"]


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def config() -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8), model_config=SimpleNamespace(max_model_len=8192)
    )


KNOWN_OF_SGLANG: dict[str, Any] = {
    "is_cuda": is_cuda,
    "debug_kernel_api": lambda function: function,
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
}
KNOWN_OF_VLLM: dict[str, Any] = {
    "current_platform": Platform(),
    "MLACommonBackend": type("MLACommonBackend", (), {}),
    "MLACommonImpl": Impl,
    "MLACommonMetadataBuilder": Base,
    "MultipleOf": type("MultipleOf", (), {"__init__": lambda self, base: None}),
    "AttentionType": SimpleNamespace(DECODER="decoder"),
    "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
    "get_current_vllm_config": config,
    "is_forward_context_available": lambda: False,
    "resolve_obj_by_qualname": resolve,
    "VLLM_BATCH_INVARIANT": False,
}


class Stub(ModuleType):
    __path__: Sequence[str] = []

    def __init__(self, name: str, known: dict[str, Any]) -> None:
        super().__init__(name)
        self.known = known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("triton", "tl"):
            return importlib.import_module("triton" if name == "triton" else "triton.language")
        return self.known.get(name, Nothing())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules in the folder; every other one of their packages is a stub."""

    def __init__(self, root: Path, real: Set[str], packages: Sequence[str], known: dict[str, Any]) -> None:
        self.root, self.real, self.packages, self.known = root, real, packages, known

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        if name in self.real:
            return importlib.util.spec_from_file_location(name, self.root / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name, self.known)

    def exec_module(self, module: ModuleType) -> None:
        return None


def install(root: Path) -> None:
    """Let ``import sglang`` find the folder."""
    sys.meta_path.insert(0, Finder(root, SGLANG, ("sglang", "sgl_kernel"), KNOWN_OF_SGLANG))


def install_vllm(root: Path) -> Finder:
    """Let ``import vllm`` find the folder; the finder leaves with ``sys.meta_path.remove``."""
    finder = Finder(root, VLLM, ("vllm",), KNOWN_OF_VLLM)
    sys.meta_path.insert(0, finder)
    return finder


def sources(variable: str = "SGLANG_SOURCES") -> Path | None:
    """Return the folder, where the environment names one."""
    folder = os.environ.get(variable)
    return Path(folder) if folder else None
