"""Compiled kernels on disk, found by a digest of everything that their compiler saw.

Any number of processes may use one folder at once, without a lock: a file appears whole by an
atomic rename, and each process goes on with the bytes that it has in memory. Beside a payload lies
a JSON file with its digest; a payload that does not agree with it, in part written or put there by
something else, is not used. Nor is a folder that another user can write: what is loaded runs.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlaflash.errors import InvalidArgumentError, MlaFlashError
from mlaflash.jit.trust import distrust, make_folder
from mlaflash.settings import cache_settings

SCHEMA = 1
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,120}-[0-9a-f]{32}")
_TEMPORARY = ".mlaflash-"

_log = logging.getLogger("mlaflash")
_warned: set[Path] = set()
_NO_HOME = Path("~")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One compiled kernel of a cache.

    Parameters
    ----------
    key : str
        Name of the file without its suffix.
    path : Path
        The payload.
    num_bytes : int
        Size of the payload.
    info : mapping of str to Any
        What was stored about it.
    """

    key: str
    path: Path
    num_bytes: int
    info: Mapping[str, Any] = field(repr=False)


class CubinCache:
    """A folder of compiled kernels.

    Parameters
    ----------
    path : Path
        The folder, made when something is first stored.
    suffix : str
        Ending of the payload files.

    Raises
    ------
    InvalidArgumentError
        `path`, or a folder above it, is a file.
    """

    def __init__(self, path: Path, *, suffix: str = ".cubin") -> None:
        for place in (path, *path.parents):
            try:
                if place.is_dir():
                    break
                is_file = place.exists()
            except OSError:
                # A folder that this user may not look into: nothing is found there, and `put` warns.
                break
            if is_file:
                raise InvalidArgumentError(
                    f"the cache folder is {path}, but {place} is a file; a folder is needed. "
                    "Set MLAFLASH_CACHE_DIR to a folder, or to the empty string for no cache on "
                    "disk."
                )
        self.path = path
        self.suffix = suffix

    def get(self, key: str) -> tuple[bytes, dict[str, Any]] | None:
        """Look a payload up.

        Parameters
        ----------
        key : str
            From `make_key`.

        Returns
        -------
        tuple of bytes and dict, or None
            The payload and what was stored about it; None where there is none that is whole, or the folder is not
            trusted.
        """
        if self.refusal() is not None:
            return None
        try:
            payload = _read(self.payload_path(key))
        except OSError:
            return None
        record = self._record(key)
        if record is None or record["sha256"] != hashlib.sha256(payload).hexdigest():
            return None
        return payload, record["info"]

    def put(self, key: str, payload: bytes, info: Mapping[str, Any]) -> bool:
        """Store a payload.

        Parameters
        ----------
        key : str
            From `make_key`.
        payload : bytes
        info : mapping of str to Any
            Anything that JSON holds.

        Returns
        -------
        bool
            False where the folder cannot be written or is not trusted, which is warned about once.
        """
        if self.refusal() is not None:
            return False
        record = {
            "schema": SCHEMA,
            "key": key,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "info": dict(info),
        }
        try:
            make_folder(self.path)
            if self.refusal() is not None:  # somebody else has made it meanwhile
                return False
            # The record goes first: a payload without one would be a miss until somebody stores it
            # again.
            self._publish(self._record_path(key), json.dumps(record, indent=1, sort_keys=True).encode())
            self._publish(self.payload_path(key), payload)
        except OSError as error:
            if self.path not in _warned:
                _warned.add(self.path)
                _log.warning(
                    "cannot write to the cache folder %s (%s); compiled kernels last for this "
                    "process only. Set MLAFLASH_CACHE_DIR to a folder that can be written, or to "
                    "the empty string for no cache.",
                    self.path,
                    error,
                )
            return False
        return True

    def refusal(self) -> str | None:
        """Say why the folder is not used, which is warned about once; None where it is.

        Returns
        -------
        str or None
        """
        reason = distrust(self.path)
        if reason is not None and self.path not in _warned:
            _warned.add(self.path)
            _log.warning(
                "the cache folder %s is not used, because %s and could give this user kernels to run; compiled kernels "
                "last for this process only. Change owner and mode, set MLAFLASH_CACHE_DIR to a folder that you alone "
                "can write, or to the empty string for no cache.",
                self.path,
                reason,
            )
        return reason

    def entries(self) -> list[CacheEntry]:
        """List what is stored, by key; a file without a record is left out."""
        found = []
        try:
            paths = sorted(self.path.iterdir())
        except OSError:
            return []
        for path in paths:
            key = path.name.removesuffix(self.suffix)
            is_payload = path.name != key and _KEY.fullmatch(key) is not None
            record = self._record(key) if is_payload else None
            if record is None:
                continue
            try:
                num_bytes = path.stat().st_size
            except OSError:
                # Another process cleared the cache in between.
                continue
            found.append(CacheEntry(key, path, num_bytes, record["info"]))
        return found

    def clear(self) -> int:
        """Remove what is stored, also what is torn, and nothing that is not this cache's.

        Returns
        -------
        int
            Payloads removed.

        Raises
        ------
        MlaFlashError
            Something could not be removed; the rest is.
        """
        removed = 0
        kept: list[OSError] = []
        try:
            paths = sorted(self.path.iterdir())
        except FileNotFoundError:
            paths = []
        except OSError as error:
            paths, kept = [], [error]
        for path in paths:
            name = path.name.removesuffix(".json")
            key = name.removesuffix(self.suffix)
            is_ours = name.endswith(self.suffix) and _KEY.fullmatch(key) is not None
            if not (is_ours or name.startswith(_TEMPORARY)):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                kept.append(error)
                continue
            removed += path.suffix == self.suffix and is_ours
        if kept:
            raise MlaFlashError(
                f"the cache {self.path} could not be cleared: {kept[0]}; {removed} kernels are removed. Remove the "
                "rest as a user who may."
            )
        return removed

    def payload_path(self, key: str) -> Path:
        """Path of a payload, whether or not it is there."""
        return self.path / f"{key}{self.suffix}"

    def _record_path(self, key: str) -> Path:
        return self.path / f"{key}{self.suffix}.json"

    def _record(self, key: str) -> dict[str, Any] | None:
        try:
            record = json.loads(_read(self._record_path(key)))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or record.get("key") != key:
            return None
        is_whole = isinstance(record.get("sha256"), str) and isinstance(record.get("info"), dict)
        return record if is_whole else None

    def _publish(self, path: Path, content: bytes) -> None:
        temporary = self.path / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            # Unlike tempfile's, this file gets the permissions that the user's umask gives.
            with temporary.open("xb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _read(path: Path) -> bytes:
    """Read a regular file; anything else, such as a pipe that nobody writes to, is an error and no wait."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        return file.read()


def make_key(label: str, parts: Mapping[str, Any]) -> str:
    """Name a payload after everything that it was made from.

    Parameters
    ----------
    label : str
        Readable start of the name; it identifies nothing.
    parts : mapping of str to Any
        All that the payload depends on, as JSON holds it.

    Returns
    -------
    str
    """
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True)
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", label)[:120]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def open_cache(*, suffix: str = ".cubin") -> CubinCache | None:
    """Return the cache that the environment asks for; None where it asks for none.

    Parameters
    ----------
    suffix : str
        Ending of the payload files.

    Raises
    ------
    InvalidArgumentError
        The cache folder, or a folder above it, is a file.
    """
    configured = cache_settings()
    path = configured.cache_path
    if path is not None:
        return CubinCache(path, suffix=suffix)
    if configured.cache_dir is None and _NO_HOME not in _warned:
        _warned.add(_NO_HOME)
        _log.warning(
            "this user has no home folder for a cache; compiled kernels last for this process only. Set "
            "MLAFLASH_CACHE_DIR to a folder, or to the empty string for no cache."
        )
    return None
