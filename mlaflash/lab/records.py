"""What `bench` records of a verify step: JSON, CSV, comparisons."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mlaflash.errors import InvalidArgumentError, MlaFlashError

KIND: Final = "mlaflash bench"

Status = Literal["ok", "wrong", "failed", "predicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A step's figures; the fields are those of JSON and CSV. None is what is not known.

    Attributes
    ----------
    status : {"ok", "wrong", "failed", "predicted"}
        ``predicted``: nothing ran, times are those of the cost model.
    reason : str
        Why it is wrong or failed.
    problem : dict
        A `VerifyShape` and the lengths of its requests; one stands for all where they are alike.
    batch, q_len, rows, kv_len : int
        Requests, query tokens and packed rows of a request, tokens of the longest request.
    kernel : str
    config : dict of str to int
    num_splits : int
    median_us, p10_us, p90_us : float or None
        Time of the call's launches on the GPU, merge included, from a cold level-2 cache.
    graph_us : float or None
        Median time of a CUDA graph of these launches.
    host_us : float or None
        Time for which a call of `mla_verify` like one before keeps the host, one of many without a pause between them:
        looking at the arguments, looking up what was prepared for the like, launches.
    tb_s : float or None
        KV rows, each counted once, and q, out, lse, in 1e12 bytes a second.
    tflop_s : float or None
        ``2 * (576 + 512)`` operations for each row and token that it sees.
    of_read, of_mma : float or None
        The same as shares of the measured ceilings.
    floor_us : float
        The least time by these ceilings; of a prediction by the data sheet.
    roof : str
        ``"memory"`` or ``"tensor cores"``: which of them that is.
    predicted_us : float or None
        By the cost model, which goes by the data sheet; None for float32, which it does not know.
    predicted_limit : str or None
        What binds, by the cost model.
    predicted_from : dict of str to float
        All numbers that the prediction was made of.
    max_rel, tolerance : float or None
        Largest relative error of the rows that were held against a float64 reference, and its bound.
    ceilings : dict of str to float or None
    gpu, arch : str
    budget : str or None
        Architecture whose shared memory was kept to.
    versions : dict
        See `mlaflash.lab.environment.versions`.
    revision : str or None
        Of git.
    seed : int
    samples : int
        Durations that were taken.
    command : str
        Repeats this record.
    """

    status: Status
    reason: str
    problem: dict[str, Any]
    batch: int
    q_len: int
    rows: int
    kv_len: int
    kernel: str
    config: dict[str, int]
    num_splits: int
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    graph_us: float | None
    host_us: float | None
    tb_s: float | None
    tflop_s: float | None
    of_read: float | None
    of_mma: float | None
    floor_us: float
    roof: str
    predicted_us: float | None
    predicted_limit: str | None
    predicted_from: dict[str, float]
    max_rel: float | None
    tolerance: float | None
    ceilings: dict[str, float] | None
    gpu: str
    arch: str
    budget: str | None
    versions: dict[str, str | None]
    revision: str | None
    seed: int
    samples: int
    command: str

    @property
    def us(self) -> float | None:
        """The measured time; of a prediction the predicted one."""
        return self.predicted_us if self.status == "predicted" else self.median_us

    @property
    def key(self) -> str:
        """What tells its problem from others."""
        given = {name: value for name, value in self.problem.items() if value is not None}
        return json.dumps(given, sort_keys=True)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BenchRecord))


def to_document(records: Iterable[BenchRecord]) -> dict[str, Any]:
    """Return records as one JSON document.

    Parameters
    ----------
    records : iterable of BenchRecord
    """
    return {"kind": KIND, "records": [asdict(record) for record in records]}


def from_document(document: Any, where: str) -> list[BenchRecord]:
    """Read records back.

    Parameters
    ----------
    document : Any
        What `to_document` returned; or a report, which holds such a document.
    where : str
        Its name, for messages.

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    if isinstance(document, Mapping) and isinstance(document.get("bench"), Mapping):
        document = document["bench"]
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise InvalidArgumentError(f"{where} holds no records of a bench. Make it with mlaflash bench --json.")
    records = []
    for fields in document.get("records", []):
        missing = [name for name in _FIELDS if name not in fields]
        if missing:
            raise InvalidArgumentError(
                f"{where} holds a record without {', '.join(missing)}; it is of another version. Make it again."
            )
        records.append(BenchRecord(**{name: fields[name] for name in _FIELDS}))
    return records


def read_records(path: Path) -> list[BenchRecord]:
    """Read the records of a file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgumentError
        It cannot be read, or holds something else.
    """
    try:
        return from_document(json.loads(path.read_bytes()), str(path))
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}. Name another file.") from error
    except ValueError as error:
        if isinstance(error, MlaFlashError):
            raise
        raise InvalidArgumentError(f"{path} is no JSON: {error}. Make it with mlaflash bench --json.") from error


def to_csv(records: Iterable[BenchRecord]) -> str:
    """Return records as CSV with a head; fields that hold several values are JSON.

    Parameters
    ----------
    records : iterable of BenchRecord
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for record in records:
        values = (getattr(record, name) for name in _FIELDS)
        writer.writerow([json.dumps(v) if isinstance(v, dict) else v for v in values])
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class Difference:
    """One problem in two files.

    Attributes
    ----------
    before, after : BenchRecord
    """

    before: BenchRecord
    after: BenchRecord

    @property
    def ratio(self) -> float:
        """How many times as long the second takes."""
        if not self.before.us or not self.after.us:
            return math.nan
        return self.after.us / self.before.us


def compare_records(before: Iterable[BenchRecord], after: Iterable[BenchRecord]) -> list[Difference]:
    """Pair the records of the same problem that have times, in the order of the first list.

    Parameters
    ----------
    before, after : iterable of BenchRecord

    Raises
    ------
    InvalidArgumentError
        They have no problem in common.
    """
    others = {record.key: record for record in after if record.us}
    pairs = [Difference(record, others[record.key]) for record in before if record.us and record.key in others]
    if not pairs:
        raise InvalidArgumentError("the two files have no problem in common. Compare runs of the same suite.")
    return pairs


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of some ratios.

    Parameters
    ----------
    ratios : iterable of float
        Greater than 0, at least one.
    """
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def model_error(records: Iterable[BenchRecord]) -> tuple[float, float] | None:
    """Tell how far the cost model is from what was measured: median and largest ``|predicted / measured - 1|``.

    Parameters
    ----------
    records : iterable of BenchRecord

    Returns
    -------
    tuple of float or None
        None where no record has both times.
    """
    errors = [abs(r.predicted_us / r.median_us - 1) for r in records if r.predicted_us and r.median_us]
    return (statistics.median(errors), max(errors)) if errors else None
