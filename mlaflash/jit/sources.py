"""The CUDA sources as text: where they are, what a kernel includes, one digest over all of it."""

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mlaflash.errors import InvalidArgumentError, UnsupportedError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_HOST = "host"


@dataclass(frozen=True, slots=True)
class SourceSet:
    """Everything that the compiler sees of one kernel.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    path : Path
        File that holds it.
    source : str
        Text of that file.
    headers : mapping of str to str
        Text of each header that the kernel reaches, by the name in its ``#include``.
    digest : str
        SHA-256 over the names and texts.
    """

    kernel: str
    path: Path
    source: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for name, text in [(self.path.name, self.source), *sorted(self.headers.items())]:
            for part in (name.encode(), text.encode()):
                # Lengths keep two sets apart whose concatenations are alike.
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        object.__setattr__(self, "digest", digest.hexdigest())


@functools.cache
def kernel_root() -> Path:
    """Directory of the CUDA sources: inside an installed package, else the checkout's own."""
    packaged = Path(__file__).parents[1] / "kernels"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "kernels"


def kernel_names(root: Path | None = None) -> list[str]:
    """List the kernels, sorted: one for each ``.cu`` file.

    Parameters
    ----------
    root : Path or None
        Directory of the sources; None is `kernel_root`.
    """
    return sorted(path.stem for path in (root or kernel_root()).glob("*.cu"))


def read(kernel: str, root: Path | None = None) -> SourceSet:
    """Read a kernel and the headers that it reaches.

    A header is looked for beside the file that includes it, then in ``include/``, then in the root.
    Headers under ``host/`` are the emulator's side of the same interface: NVRTC never gets them.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    root : Path or None
        Directory of the sources; None is `kernel_root`.

    Returns
    -------
    SourceSet

    Raises
    ------
    UnsupportedError
        There is no such kernel.
    InvalidArgumentError
        Two names in ``#include`` lines lead to one header.
    """
    root = root or kernel_root()
    known = kernel_names(root)
    if kernel not in known:
        raise UnsupportedError(
            f"kernel is {kernel!r}; known are "
            f"{', '.join(known) or f'none: {root} holds no .cu file'}. Name one of them."
        )
    path = root / f"{kernel}.cu"
    source = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    name_of: dict[PurePosixPath, str] = {}
    pending = [(PurePosixPath(), source)]
    while pending:
        folder, text = pending.pop()
        for name in _INCLUDE.findall(text):
            found = _find(root, folder, name)
            if found is None or found.parts[0] == _HOST:
                continue
            spelled = name_of.setdefault(found, name)
            if spelled != name:
                # NVRTC takes headers by name: `#pragma once` would not see that both are one file.
                raise InvalidArgumentError(
                    f"kernel {kernel!r} includes {found} as {spelled!r} and as {name!r}; "
                    "one file must have one name. Spell both alike."
                )
            if name not in headers:
                headers[name] = (root / found).read_text(encoding="utf-8")
                pending.append((found.parent, headers[name]))
    return SourceSet(kernel, path, source, headers)


def _find(root: Path, folder: PurePosixPath, name: str) -> PurePosixPath | None:
    """Locate an included file below the root; a missing one is the compiler's to refuse."""
    resolved_root = root.resolve()
    for base in (folder, PurePosixPath("include"), PurePosixPath()):
        candidate = (resolved_root / base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(resolved_root):
            return PurePosixPath(candidate.relative_to(resolved_root).as_posix())
    return None
