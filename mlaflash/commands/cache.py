"""``mlaflash cache``."""

from __future__ import annotations

import sys

import click

from mlaflash.commands import render
from mlaflash.commands.options import FAILED, json_option
from mlaflash.commands.render import Column
from mlaflash.emulator.build import SUFFIX
from mlaflash.jit.cache import CacheEntry, CubinCache, open_cache
from mlaflash.lab.ceilings import CEILINGS_SUFFIX
from mlaflash.lab.variants import form, spell

_COLUMNS = (
    Column("kernel", "left", head=True),
    Column("arch", "left", head=True),
    Column("config", "left", fold=True, head=True),
    Column("KiB"),
)
_OFF = "there is no cache on disk: MLAFLASH_CACHE_DIR is the empty string, or not set for a user without a home folder"


def open_all() -> list[CubinCache]:
    """Open the caches of cubins and of the emulator's libraries; none where the cache is switched off."""
    caches = [open_cache(), open_cache(suffix=SUFFIX)]
    return [cache for cache in caches if cache is not None]


@click.group()
def cache() -> None:
    """Look at, or empty, the cache of compiled kernels."""


@cache.command("list")
@json_option("one JSON array")
def list_(as_json: bool) -> None:
    """List the compiled kernels."""
    caches = open_all()
    entries = [entry for cache in caches for entry in cache.entries()]
    if as_json:
        render.document(
            [
                {
                    "key": entry.key,
                    "path": str(entry.path),
                    "bytes": entry.num_bytes,
                    "kernel": entry.info.get("kernel"),
                    "arch": entry.info.get("arch"),
                }
                for entry in entries
            ]
        )
        return
    if not caches:
        render.note(_OFF)
        return
    if entries:
        render.table(_COLUMNS, [_row(entry) for entry in entries])
    size = sum(entry.num_bytes for entry in entries)
    render.line(f"{len(entries)} kernels, {size / 2**20:.1f} MiB, in {caches[0].path}")


def _row(entry: CacheEntry) -> tuple[str, ...]:
    kernel, arch, defines = (entry.info.get(name) for name in ("kernel", "arch", "defines"))
    size = f"{entry.num_bytes / 1024:.0f}"
    if not isinstance(kernel, str) or not isinstance(defines, dict):
        return entry.key, str(arch or ""), "", size
    return kernel, "emulator" if arch == "host" else str(arch or ""), spell(form(kernel, defines)), size


@cache.command("path")
def path() -> None:
    """Print the folder of the cache.

    Exit status 1 where there is none.
    """
    caches = open_all()
    if not caches:
        render.note(_OFF)
        sys.exit(FAILED)
    render.line(str(caches[0].path))


@cache.command("clear")
def clear() -> None:
    """Remove compiled kernels and measured ceilings, nothing else."""
    caches = open_all()
    if not caches:
        render.note(_OFF)
        return
    removed = sum(cache.clear() for cache in caches)
    measured = open_cache(suffix=CEILINGS_SUFFIX)
    if measured is not None:
        measured.clear()
    render.line(f"{removed} kernels removed from {caches[0].path}")
