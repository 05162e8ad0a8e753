"""MLA attention for the verify step of speculative decoding, as CUDA kernels compiled at first use.

``import mlaflash`` imports neither CuPy nor a kernel and asks no device: public names are looked up
at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlaflash.errors import (
    BusyError,
    CacheMissError,
    CaptureError,
    CommunicationError,
    CompileError,
    ContextLostError,
    EmulatorError,
    InvalidArgumentError,
    LaunchError,
    MissingDependencyError,
    MlaFlashError,
    NoDeviceError,
    ShapeError,
    TileError,
    UnsupportedError,
)
from mlaflash.settings import configure_logging

if TYPE_CHECKING:
    from mlaflash import distributed, emulator, kv, oracle, spec
    from mlaflash.attention import mla_verify
    from mlaflash.device import Device
    from mlaflash.floors import roofline
    from mlaflash.mask_pack import pack_mask
    from mlaflash.mask_source import MaskSource
    from mlaflash.masks import TreeMask
    from mlaflash.merge import merge_states
    from mlaflash.plan import VerifyPlan
    from mlaflash.scale import yarn_sm_scale
    from mlaflash.shape import VerifyShape
    from mlaflash.sparse import mla_sparse
    from mlaflash.tiles import TileConfig
    from mlaflash.warm import warmup

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "CacheMissError",
    "CaptureError",
    "CommunicationError",
    "CompileError",
    "ContextLostError",
    "Device",
    "EmulatorError",
    "InvalidArgumentError",
    "LaunchError",
    "MaskSource",
    "MissingDependencyError",
    "MlaFlashError",
    "NoDeviceError",
    "ShapeError",
    "TileConfig",
    "TileError",
    "TreeMask",
    "UnsupportedError",
    "VerifyPlan",
    "VerifyShape",
    "__version__",
    "distributed",
    "emulator",
    "kv",
    "merge_states",
    "mla_sparse",
    "mla_verify",
    "oracle",
    "pack_mask",
    "roofline",
    "spec",
    "warmup",
    "yarn_sm_scale",
]

_MODULE_OF = {
    "VerifyPlan": "plan",
    "VerifyShape": "shape",
    "Device": "device",
    "MaskSource": "mask_source",
    "TileConfig": "tiles",
    "TreeMask": "masks",
    "merge_states": "merge",
    "mla_sparse": "sparse",
    "mla_verify": "attention",
    "pack_mask": "mask_pack",
    "roofline": "floors",
    "warmup": "warm",
    "yarn_sm_scale": "scale",
}
_SUBMODULES = frozenset({"distributed", "emulator", "kv", "oracle", "spec"})

configure_logging()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"mlaflash.{name}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"mlaflash.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'mlaflash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
