"""Which constants and splits were measured to be best on a GPU, for classes of problems; the cost model for all others.

A table is a JSON file that ``mlaflash sweep --save-best`` writes: of a suite, what beat the cost model by more than
noise. Those beside this module are shipped; one that ``MLAFLASH_TUNED`` names comes before them. Nothing is ever
measured inside a call, and a table is read once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mlaflash import cost
from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError
from mlaflash.mma_tiles import TILE, MmaKernelConfig, MmaNarrowConfig, MmaRolesConfig, MmaWideConfig
from mlaflash.settings import tuned_override

SCHEMA: Final = 1
KIND: Final = "mlaflash tuned"

_CONFIGS: Final[dict[str, type[Any]]] = {
    "mma_narrow": MmaNarrowConfig,
    "mma_wide": MmaWideConfig,
    "mma_roles": MmaRolesConfig,
}
_STEPS_PER_OCTAVE = 2

Key = tuple[int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Entry:
    """The best choice for one problem, which stands for its class.

    Attributes
    ----------
    rows, batch, kv_len, page_size : int
        Packed rows of a request, requests, tokens of each, tokens of a page.
    config : MmaKernelConfig
        Constants, without splits.
    num_splits : int
    us : float
        Time of the whole call from a cold level-2 cache.
    model_us : float
        The same for what the cost model chooses.
    """

    rows: int
    batch: int
    kv_len: int
    page_size: int
    config: MmaKernelConfig
    num_splits: int
    us: float
    model_us: float

    @property
    def key(self) -> Key:
        """Its class."""
        return problem_class(self.rows, self.batch, self.kv_len, self.page_size)


@dataclass(frozen=True, slots=True)
class Table:
    """Choices for one GPU and budget.

    Attributes
    ----------
    gpu : str
        Part of the name of the GPUs that it is for.
    num_sms, shared_per_block, shared_per_sm : int
        That they must have; the latter two are those of a budget where there is one.
    is_predicted : bool
        Whether the times, and so the choices, are the cost model's.
    origin : mapping of str to Any
        Where it comes from: versions, revision, command.
    entries : tuple of Entry
    """

    gpu: str
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    is_predicted: bool
    origin: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, device: Device, entries: Sequence[Entry], *, is_predicted: bool, origin: Mapping[str, Any]) -> Table:
        """Make a table for a GPU.

        Parameters
        ----------
        device : Device
            With the limits of the budget where there is one.
        entries : sequence of Entry
        is_predicted : bool
        origin : mapping of str to Any
        """
        limits = device.num_sms, device.shared_per_block, device.shared_per_sm
        return cls(device.name.removeprefix("NVIDIA "), *limits, is_predicted, origin, tuple(entries))

    def fits(self, device: Device) -> bool:
        """Whether it is for a GPU."""
        return (
            self.gpu in device.name
            and self.num_sms == device.num_sms
            and self.shared_per_block == device.shared_per_block
            and self.shared_per_sm == device.shared_per_sm
        )

    def to_json(self) -> str:
        """Return it as text: an entry a line."""
        head = {"kind": KIND, "schema": SCHEMA} | asdict(self)
        del head["entries"]
        lines = ",\n  ".join(
            json.dumps({**asdict(entry), "kernel": entry.config.kernel, "config": entry.config.as_dict()})
            for entry in self.entries
        )
        return f'{json.dumps(head, indent=1)[:-2]},\n "entries": [\n  {lines}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Table:
        """Read a table.

        Parameters
        ----------
        text : str or bytes
        where : str
            Its name, for messages.

        Raises
        ------
        InvalidArgumentError
            It is no table, or one whose configurations do not fit its GPU.
        """
        try:
            found = json.loads(text)
            if (found["kind"], found["schema"]) != (KIND, SCHEMA):
                raise KeyError("kind")
            entries = tuple(_entry(fields) for fields in found["entries"])
            fields = {field.name: found[field.name] for field in dataclasses.fields(cls)} | {"entries": entries}
            table = cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(
                f"{where} holds no tuned choices ({type(error).__name__}: {error}). Make it with mlaflash sweep "
                "--save-best."
            ) from error
        for entry in entries:
            if entry.config.shared_bytes() > table.shared_per_block:
                raise InvalidArgumentError(
                    f"{where} names {entry.config}, which asks for {entry.config.shared_bytes()} bytes of shared "
                    f"memory a block; the table allows {table.shared_per_block}. Remove the entry."
                )
        return table


def _entry(fields: Mapping[str, Any]) -> Entry:
    config: MmaKernelConfig = _CONFIGS[fields["kernel"]](**fields["config"])
    numbers = {field.name: fields[field.name] for field in dataclasses.fields(Entry)}
    return Entry(**numbers | {"config": config})


def problem_class(rows: int, batch: int, kv_len: int, page_size: int) -> Key:
    """Return what problems that share a choice have in common.

    Rows count by tiles of 16, tokens by half octaves, pages by whether a KV tile may lie in several.

    Parameters
    ----------
    rows, batch, kv_len, page_size : int
        As of `Entry`.
    """
    octaves = round(_STEPS_PER_OCTAVE * math.log2(max(kv_len, 1)))
    return -(-rows // TILE), batch, octaves, page_size < TILE


def find(rows: int, batch: int, max_kv_len: int, device: Device, page_size: int) -> cost.Choice | None:
    """Look up the choice for a problem on 16-bit caches with 16-bit results; None where no table has its class.

    Parameters
    ----------
    rows : int
        Packed rows of a request.
    batch, max_kv_len, device, page_size
        As in `mlaflash.cost.choose`.

    Returns
    -------
    Choice or None

    Raises
    ------
    InvalidArgumentError
        ``MLAFLASH_TUNED`` names a file that cannot be read, or is no table.
    """
    return _find(tuned_override(), rows, batch, max_kv_len, device, page_size)


@functools.lru_cache(maxsize=4096)
def _find(
    path: str | None, rows: int, batch: int, max_kv_len: int, device: Device, page_size: int
) -> cost.Choice | None:
    found = _index(path, device).get(problem_class(rows, batch, max_kv_len, page_size))
    if found is None:
        return None
    entry, table = found
    if table.is_predicted and entry.kv_len != max_kv_len:
        return None  # the cost model knows better than its own answer to a similar question
    splits = cost.usable_splits(entry.num_splits, max_kv_len)
    choice = cost.choice_of(entry.config, splits, rows, batch, max_kv_len, device)
    how = "predicted" if table.is_predicted else "measured"
    problem = f"{entry.batch} x {entry.rows} rows x {entry.kv_len} tokens"
    return replace(
        choice, reasons=(f"{how} to be best for {problem} on {table.gpu}: {entry.us:.1f} us", *choice.reasons)
    )


def configs(device: Device) -> list[MmaKernelConfig]:
    """List the constants that `find` may return from a table on a device: what has to be compiled beforehand.

    Parameters
    ----------
    device : Device
    """
    return list(dict.fromkeys(entry.config for entry, _ in _index(tuned_override(), device).values()))


@functools.lru_cache(maxsize=64)
def _index(path: str | None, device: Device) -> dict[Key, tuple[Entry, Table]]:
    """Index the entries for a device, the caller's first, measured before predicted."""
    index: dict[Key, tuple[Entry, Table]] = {}
    for table in tables(path):
        if table.fits(device):
            for entry in table.entries:
                index.setdefault(entry.key, (entry, table))
    return index


@functools.lru_cache(maxsize=8)
def tables(path: str | None) -> tuple[Table, ...]:
    """Read the tables that count, in the order in which they do.

    Parameters
    ----------
    path : str or None
        As of `mlaflash.settings.tuned_override`.

    Raises
    ------
    InvalidArgumentError
        The file cannot be read, or is no table.
    """
    if path == "":
        return ()
    shipped = [Table.from_json(file.read_bytes(), file.name) for file in sorted(Path(__file__).parent.glob("*.json"))]
    shipped.sort(key=lambda table: table.is_predicted)
    return (*((read(Path(path)),) if path else ()), *shipped)


def read(path: Path) -> Table:
    """Read a table from a file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgumentError
        It cannot be read, or is no table.
    """
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"MLAFLASH_TUNED or --save-best is {path}, which cannot be read: {error}. Name a file that mlaflash sweep "
            "--save-best has written, or unset it."
        ) from error
    return Table.from_json(content, str(path))
