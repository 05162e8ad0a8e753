"""What a result was made with: versions that every record carries."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlaflash
from mlaflash.device import driver_version
from mlaflash.errors import MlaFlashError
from mlaflash.jit.compiler import nvrtc_version
from mlaflash.jit.sources import kernel_root

_CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def versions() -> dict[str, str | None]:
    """Tell the version of everything that a result depends on; None is not installed, or not to be found out.

    Returns
    -------
    dict
        ``mlaflash``, ``sources`` (the start of a digest over all kernels and headers), ``python``, ``numpy``, ``cupy``,
        ``nvrtc`` and ``driver`` (the newest CUDA that it supports).
    """
    return {
        "mlaflash": mlaflash.__version__,
        "sources": sources_digest(),
        "python": platform.python_version(),
        "numpy": _installed("numpy"),
        "cupy": next((version for version in map(_installed, _CUPY_WHEELS) if version), None),
        "nvrtc": _or_none(nvrtc_version),
        "driver": _or_none(driver_version),
    }


def revision() -> str | None:
    """Tell the git revision of the checkout that runs, with ``-dirty`` where it was changed; None without one."""
    root = Path(mlaflash.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def sources_digest() -> str:
    """Return the start of a digest over all of the CUDA sources."""
    digest = hashlib.sha256()
    root = kernel_root()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".cu", ".cuh", ".h"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _or_none(probe: Callable[[], str | None]) -> str | None:
    try:
        return probe()
    except MlaFlashError:
        return None
