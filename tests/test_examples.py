"""The examples run, and what they print is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def errors_of(example: str) -> list[float]:
    """Run an example and return the errors of `out` that it prints."""
    path = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [float(error) for error in re.findall(r"oracle:? (?:out )?(\d\.\d+)", done.stdout)]


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *("emulator.py", "cupy_tree.py", "torch_graph.py", "context_parallel.py"),
    }


def test_emulator() -> None:
    (error,) = errors_of("emulator.py")
    assert 0 < error < 0.05


def test_context_parallel() -> None:
    errors = errors_of("context_parallel.py")
    assert errors
    assert all(0 < error < 0.05 for error in errors)


@pytest.mark.gpu
def test_cupy_tree() -> None:
    (error,) = errors_of("cupy_tree.py")
    assert 0 < error < 0.02


@pytest.mark.gpu
def test_torch_graph() -> None:
    pytest.importorskip("torch")
    errors = errors_of("torch_graph.py")
    assert len(errors) == 3
    assert all(0 < error < 0.05 for error in errors)
