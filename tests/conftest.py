"""Markers, a private cache, and the switch that makes a run without a GPU fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlaflash.device import gpu_available

_ran_on_gpu: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail unless a GPU is present and at least one test marked gpu ran on it",
    )
    parser.addoption(
        "--kernel-cache",
        type=Path,
        help="keep compiled kernels in this folder, for other runs; by default each run has one of its own",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if gpu_available():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu: CuPy finds no GPU here")
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "gpu" in report.keywords and not report.skipped:
        _ran_on_gpu.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    wants_gpu = session.config.getoption("--require-gpu")
    if wants_gpu and not _ran_on_gpu and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--require-gpu") and not _ran_on_gpu:
        terminalreporter.write_line("--require-gpu: no test ran on a GPU", red=True)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """Keep the user's cache and environment out of every test."""
    folder = pytestconfig.getoption("--kernel-cache") or tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("LOG", "DISABLE_JIT", "JIT_LINEINFO", "ARCH", "TUNED"):
            patch.delenv(f"MLAFLASH_{variable}", raising=False)
        patch.setenv("MLAFLASH_CACHE_DIR", str(folder))
        yield folder


TOY_HEADER = """\
#pragma once
#include "toy_scale.cuh"
struct ToyParams {
    int* out_gmem;
    int addend;
};
"""
TOY_SCALE = """\
#pragma once
#ifndef MLAFLASH_FACTOR
#error "MLAFLASH_FACTOR is missing: compile through mlaflash.jit"
#endif
constexpr int FACTOR = MLAFLASH_FACTOR;
"""
TOY_KERNEL = """\
#include "toy_params.cuh"
#ifdef MLAFLASH_EMULATOR
#include "../host/toy.h"
#endif
extern "C" __global__ void mlaflash_toy(const __grid_constant__ ToyParams p) {
    extern __shared__ int out_smem[];
    out_smem[threadIdx.x] = FACTOR * (int)threadIdx.x + p.addend;
    __syncthreads();
    p.out_gmem[blockIdx.x * blockDim.x + threadIdx.x] = out_smem[threadIdx.x];
}
"""


@pytest.fixture
def toy_root(tmp_path: Path) -> Path:
    """Make a folder of sources with one small kernel that includes two headers, and two files it does not."""
    root = tmp_path / "kernels"
    (root / "include").mkdir(parents=True)
    (root / "host").mkdir()
    (root / "toy.cu").write_text(TOY_KERNEL)
    (root / "include" / "toy_params.cuh").write_text(TOY_HEADER)
    (root / "include" / "toy_scale.cuh").write_text(TOY_SCALE)
    (root / "include" / "unrelated.cuh").write_text("#error unrelated\n")
    (root / "host" / "toy.h").write_text("#error host\n")
    return root


@pytest.fixture
def toy_kernels(toy_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let mlaflash take its kernels from `toy_root`."""
    monkeypatch.setattr("mlaflash.jit.sources.kernel_root", lambda: toy_root)
    return toy_root
