"""benchmarks/numerics.py: what it measures on short problems, what it calls worse, and the table that it writes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FILE = Path(__file__).parents[1] / "benchmarks/numerics.py"


@pytest.fixture(scope="module")
def numerics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["numerics"] = module  # where its dataclass looks for its own types
    spec.loader.exec_module(module)
    return module


def test_no_kernel_is_worse_on_a_short_problem(numerics: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel in each format of the cache; the program itself has them all."""
    monkeypatch.setattr(numerics, "KERNELS", dict.fromkeys(numerics.KERNELS, ("mma_narrow",)))
    problem = numerics.like_a_model("short", "bfloat16", 40, 2.0)
    records = list(numerics.measure(problem, "emulator", None))
    assert {record["cache"] for record in records} == {"bfloat16", "float8_e4m3", "fp8_ds_mla"}
    assert {record["kernel"] for record in records} == {"formula", "mma_narrow"}
    assert numerics.failures(records) == []
    assert all(0 < record["mean"] < record["max"] < 0.05 for record in records)


def record(kernel: str, largest: float, mean: float) -> dict[str, Any]:
    return {"problem": "x", "dtype": "bfloat16", "cache": "bfloat16", "kernel": kernel, "max": largest, "mean": mean}


@pytest.mark.parametrize(
    ("largest", "mean", "found"),
    [(0.019, 0.0019, 0), (0.021, 0.0019, 1), (0.019, 0.0021, 1), (np.nan, np.nan, 2), (0.007, 0.0007, 0)],
)
def test_worse_than_twice_the_others_is_said(numerics: ModuleType, largest: float, mean: float, found: int) -> None:
    records = [record("formula", 0.005, 0.001), record("flashinfer", 0.01, 0.0005), record("tile", largest, mean)]
    assert len(numerics.failures(records)) == found


def test_one_rounding_is_not_worse_than_none(numerics: ModuleType) -> None:
    assert numerics.failures([record("formula", 0.0, 0.0), record("tile", 2**-8, 2**-11)]) == []
    assert len(numerics.failures([record("formula", 0.0, 0.0), record("tile", 2**-6, 2**-11)])) == 1


def test_the_table_replaces_what_is_between_the_markers(
    numerics: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc, measured = tmp_path / "numerics.md", tmp_path / "numerics.json"
    doc.write_text(f"before\n{numerics.BEGIN}old\n{numerics.END}\nafter\n")
    measured.write_text(json.dumps({"device": "a GPU", "records": [record("formula", 0.005, 0.001)]}))
    monkeypatch.setattr(numerics, "DOC", doc)
    monkeypatch.setattr("sys.argv", ["numerics.py", "--table", str(measured)])
    numerics.main()
    text = doc.read_text()
    assert "| x | 5.0e-03 (1.0e-03) |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
