"""``mlaflash info``."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.cache import open_all
from mlaflash.commands.options import json_option
from mlaflash.device import Device, device_count
from mlaflash.emulator.build import find_compiler
from mlaflash.errors import MlaFlashError
from mlaflash.jit.sources import kernel_root
from mlaflash.lab.environment import versions
from mlaflash.settings import complaints, variables


@click.command()
@json_option("one JSON document")
def info(as_json: bool) -> None:
    """Tell versions, GPU, paths, variables and cache.

    Always prints: what cannot be found out is said where it would stand, and of a variable what is wrong with it.
    """
    found = collect()
    if as_json:
        render.document(found)
        return
    render.facts(_lines(found).items())


def collect() -> dict[str, Any]:
    """Find out all of it; what cannot be is a document with why as its ``error``."""
    return {
        "versions": _probe(versions),
        "platform": _probe(platform.platform),
        "gpus": _probe(_gpus),
        "host_compiler": _probe(lambda: " ".join(find_compiler())),
        "kernels": _probe(lambda: str(kernel_root())),
        "cache": _probe(_cache),
        "variables": {name: value for name, value in variables().items() if value is not None},
        "refused_variables": complaints(),
    }


def _probe(ask: Callable[[], Any]) -> Any:
    """Return the answer, or why there is none: a broken CuPy can fail in any of these ways."""
    try:
        return ask()
    except (MlaFlashError, ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return {"error": str(error)}


def _gpus() -> list[dict[str, Any]]:
    return [_gpu(index) for index in range(device_count())]


def _gpu(index: int) -> dict[str, Any]:
    answer = _probe(lambda: Device.current(index))
    if not isinstance(answer, Device):
        return dict(answer)
    return {
        "name": answer.name,
        "arch": answer.arch,
        "num_sms": answer.num_sms,
        "shared_per_block": answer.shared_per_block,
        "shared_per_sm": answer.shared_per_sm,
        "l2_bytes": answer.l2_bytes,
    }


def _cache() -> dict[str, Any]:
    caches = open_all()
    entries = [entry for cache in caches for entry in cache.entries()]
    return {
        "path": str(caches[0].path) if caches else None,
        "kernels": len(entries),
        "bytes": sum(entry.num_bytes for entry in entries),
    }


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """Flatten the document into names and texts."""
    lines: dict[str, str] = {}
    for name, version in _parts(found["versions"]).items():
        lines[name] = str(version) if version is not None else "not found"
    lines["platform"] = _text(found["platform"])
    gpus = found["gpus"]
    if isinstance(gpus, dict):
        lines["GPU"] = f"no GPU: {gpus['error']}"
    elif not gpus:
        lines["GPU"] = "no GPU: the emulator stands in for one"
    for index, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        lines[f"GPU {index}"] = _gpu_text(gpu)
    lines["host compiler"] = _text(found["host_compiler"])
    lines["kernels"] = _text(found["kernels"])
    lines["cache"] = _cache_text(found["cache"])
    for name, value in found["variables"].items():
        complaint = found["refused_variables"].get(name, "")
        lines[name] = complaint.removeprefix(f"{name} is ") or repr(value)
    return lines


def _parts(answer: dict[str, Any]) -> dict[str, Any]:
    return {"versions": answer["error"]} if "error" in answer else answer


def _text(answer: Any) -> str:
    return str(answer["error"] if isinstance(answer, dict) else answer)


def _gpu_text(gpu: dict[str, Any]) -> str:
    if "error" in gpu:
        return str(gpu["error"])
    return (
        f"{gpu['name']}, {gpu['arch']}, {gpu['num_sms']} SMs, {gpu['shared_per_block']} bytes of shared memory a "
        f"block, {gpu['l2_bytes'] / 2**20:.0f} MiB of L2"
    )


def _cache_text(cache: dict[str, Any]) -> str:
    if "error" in cache:
        return str(cache["error"])
    if cache["path"] is None:
        return "switched off"
    return f"{cache['path']}, {cache['kernels']} kernels, {cache['bytes'] / 2**20:.1f} MiB"
