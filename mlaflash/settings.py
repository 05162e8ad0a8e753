"""The environment variables that mlaflash reads, in one place.

Nothing is remembered between calls: a variable that a program changes is in force at the next use.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from mlaflash.errors import InvalidArgumentError

VARIABLES = (
    "MLAFLASH_CACHE_DIR",
    "MLAFLASH_LOG",
    "MLAFLASH_DISABLE_JIT",
    "MLAFLASH_JIT_LINEINFO",
    "MLAFLASH_ARCH",
    "MLAFLASH_TUNED",
    "CXX",
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_ARCH = re.compile(r"sm_\d{2,3}[af]?")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Parameters
    ----------
    cache_dir : str or None
        ``MLAFLASH_CACHE_DIR``: folder of compiled kernels; None is the platform's own, the empty
        string is no cache on disk. Neither is there one where the platform knows no home folder.
    log : str
        ``MLAFLASH_LOG``: ``warning``, ``info`` or ``debug``. It never changes what is compiled.
    disable_jit : bool
        ``MLAFLASH_DISABLE_JIT``: a kernel that is not in the cache is an error instead of a
        compilation; ``mlaflash compile`` compiles all the same.
    lineinfo : bool
        ``MLAFLASH_JIT_LINEINFO``: line tables in the compiled kernel, for profilers.
    arch : str or None
        ``MLAFLASH_ARCH``: target architecture instead of the device's own.
    tuned : str or None
        ``MLAFLASH_TUNED``: a file of measured choices that comes before those that are shipped; None is these alone,
        the empty string none of them.
    cxx : str or None
        ``CXX``: the host compiler of the emulator; None lets the emulator look for one.
    """

    cache_dir: str | None = None
    log: str = "warning"
    disable_jit: bool = False
    lineinfo: bool = False
    arch: str | None = None
    tuned: str | None = None
    cxx: str | None = None

    @property
    def cache_path(self) -> Path | None:
        """Folder of compiled kernels, which may not exist yet; None without a cache on disk.

        Absolute: a loader looks for a bare file name elsewhere, and a program may change its folder.

        Raises
        ------
        InvalidArgumentError
            ``MLAFLASH_CACHE_DIR`` begins with a ``~`` that stands for no folder.
        """
        if self.cache_dir == "":
            return None
        try:
            if self.cache_dir is not None:
                return Path(self.cache_dir).expanduser().absolute()
            path = platformdirs.user_cache_path("mlaflash", appauthor=False)
        except RuntimeError as error:
            if self.cache_dir is None:  # a user without a home, as in many containers
                return None
            raise InvalidArgumentError(
                f"MLAFLASH_CACHE_DIR is {self.cache_dir!r}, and there is no such home folder. Set it to a folder, or "
                "to the empty string for no cache on disk."
            ) from error
        # Older versions of platformdirs name a folder "~", wherever the process is, in place of raising.
        return None if path.parts[0].startswith("~") else path.absolute()


def settings() -> Settings:
    """Read the environment.

    Returns
    -------
    Settings

    Raises
    ------
    InvalidArgumentError
        A variable has a value that is not allowed.
    """
    return Settings(
        cache_dir=cache_settings().cache_dir,
        log=_log_level("MLAFLASH_LOG"),
        disable_jit=_flag("MLAFLASH_DISABLE_JIT"),
        lineinfo=_flag("MLAFLASH_JIT_LINEINFO"),
        arch=arch_override(),
        tuned=tuned_override(),
        cxx=compiler_override(),
    )


def cache_settings() -> Settings:
    """Read ``MLAFLASH_CACHE_DIR`` alone: where the cache is depends on nothing else."""
    return Settings(cache_dir=os.environ.get("MLAFLASH_CACHE_DIR"))


def tuned_override() -> str | None:
    """Read ``MLAFLASH_TUNED`` alone, which every choice of a kernel does.

    Returns
    -------
    str or None
        A file of `mlaflash.tuned` that comes before those that are shipped; the empty string is no such file at all.
    """
    return os.environ.get("MLAFLASH_TUNED")


def compiler_override() -> str | None:
    """Read ``CXX`` alone."""
    return os.environ.get("CXX") or None


def arch_override() -> str | None:
    """Read ``MLAFLASH_ARCH`` alone, which a plan does at every call.

    Returns
    -------
    str or None

    Raises
    ------
    InvalidArgumentError
        It is no architecture's name.
    """
    value = os.environ.get("MLAFLASH_ARCH", "").strip()
    if not value:
        return None
    if not _ARCH.fullmatch(value):
        raise InvalidArgumentError(
            f"MLAFLASH_ARCH is {value!r}; allowed is a CUDA architecture such as sm_90, sm_90a or "
            "sm_120. Set one of them or unset it."
        )
    return value


def variables() -> dict[str, str | None]:
    """Return each variable that is read and its text, allowed or not; None where it is not set."""
    return {name: os.environ.get(name) for name in VARIABLES}


def complaints() -> dict[str, str]:
    """Say of each variable whose value is not allowed what is."""
    readers: dict[str, Callable[[], object]] = {
        "MLAFLASH_LOG": lambda: _log_level("MLAFLASH_LOG"),
        "MLAFLASH_DISABLE_JIT": lambda: _flag("MLAFLASH_DISABLE_JIT"),
        "MLAFLASH_JIT_LINEINFO": lambda: _flag("MLAFLASH_JIT_LINEINFO"),
        "MLAFLASH_ARCH": arch_override,
    }
    found = {}
    for name, read in readers.items():
        try:
            read()
        except InvalidArgumentError as error:
            found[name] = str(error)
    return found


def configure_logging() -> None:
    """Let the logger ``mlaflash`` speak on stderr where ``MLAFLASH_LOG`` asks for it."""
    # A bad value is refused by `settings`, at the first use, not by an import.
    level = _LEVELS.get(os.environ.get("MLAFLASH_LOG", "").strip().lower())
    if level is None:
        return
    logger = logging.getLogger("mlaflash")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        # A program that sets up the root logger would print every line twice.
        logger.propagate = False


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidArgumentError(
        f"{variable} is {value!r}; allowed are 1, true, yes, on and 0, false, no, off. Set one of them or unset it."
    )


def _log_level(variable: str) -> str:
    value = os.environ.get(variable, "").strip().lower() or "warning"
    if value not in _LEVELS:
        raise InvalidArgumentError(
            f"{variable} is {value!r}; allowed are {', '.join(sorted(_LEVELS))}. Set one of them or unset it."
        )
    return value
