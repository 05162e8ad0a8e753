"""The cache on its worst day: whatever happens to its files, a process gets the kernel that it asked for, soon, and at
most one line is said about it."""

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaflash.emulator.build import load_library
from mlaflash.jit import CompiledKernel, cached, compile_cached, stats
from mlaflash.jit import cache as cache_module
from mlaflash.jit.cache import CubinCache, make_key

KEY = make_key("toy", {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(path))
    forget(monkeypatch)
    return path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a new process: nothing in memory."""
    monkeypatch.setattr(cached, "_compiled", {})
    monkeypatch.setattr(cached, "counters", cached._Counters())
    monkeypatch.setattr(cache_module, "_warned", set())


def toy(factor: int = 3, arch: str = "sm_90") -> CompiledKernel:
    return compile_cached("toy", {"FACTOR": factor}, arch)


def files_of(folder: Path, cubin: bytes) -> tuple[Path, Path]:
    """Find payload and record of a kernel."""
    (payload,) = [path for path in folder.glob("*.cubin") if path.read_bytes() == cubin]
    return payload, payload.with_suffix(".cubin.json")


WORKER = """
import os, signal, sys
from pathlib import Path
from mlaflash.jit import cache, compile_cached, sources

sources.kernel_root = lambda: Path(sys.argv[1])
deaths, replace, calls = int(sys.argv[2]), os.replace, []

def dying(old, new):
    calls.append(new)
    if len(calls) == deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)

os.replace = dying
print(compile_cached("toy", {"FACTOR": 3}, "sm_90").cubin.hex())
"""


def worker(root: Path, folder: Path, deaths: int = 0, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WORKER, str(root), str(deaths)],
        env={**os.environ, "MLAFLASH_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **how,  # type: ignore[call-overload]
    )


# --- killed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_process_killed_while_it_publishes_leaves_nothing_that_is_used(
    toy_root: Path, folder: Path, deaths: int
) -> None:
    assert worker(toy_root, folder, deaths).returncode == -signal.SIGKILL
    left = [path.name for path in folder.iterdir() if path.name.startswith(".mlaflash-")]
    assert len(left) == 1
    assert not list(folder.glob("*.cubin"))
    second = worker(toy_root, folder)
    assert (second.returncode, second.stderr) == (0, "")
    (payload,) = folder.glob("*.cubin")
    assert payload.read_bytes().hex() == second.stdout.strip()
    assert CubinCache(folder).clear() == 1
    assert list(folder.iterdir()) == []


PUBLISHER = """
import os, sys
from pathlib import Path
from mlaflash.jit.cache import CubinCache

cache, number = CubinCache(Path(sys.argv[1])), int(sys.argv[3])
while True:
    number += 1
    assert cache.put(sys.argv[2], number.to_bytes(8, "little") * 4000, {"number": number})
"""


@pytest.mark.slow
def test_killed_publishers_never_leave_a_payload_that_is_torn(folder: Path) -> None:
    rng = random.Random(0)
    cache = CubinCache(folder)
    seen = 0
    for start in range(30):
        publishers = [
            subprocess.Popen([sys.executable, "-c", PUBLISHER, str(folder), KEY, str(1000 * (2 * start + i))])
            for i in range(2)
        ]
        deadline = time.monotonic() + 0.3 + rng.random()
        while time.monotonic() < deadline:
            found = cache.get(KEY)
            if found is not None:
                seen += 1
                assert found[0] == found[1]["number"].to_bytes(8, "little") * 4000
        for publisher in publishers:
            publisher.kill()
            publisher.wait()
    assert seen > 100
    assert cache.put(KEY, b"whole", {})
    assert cache.get(KEY) == (b"whole", {})


def test_threads_that_publish_and_read_one_key_see_whole_payloads_or_none(folder: Path) -> None:
    cache = CubinCache(folder)
    until = time.monotonic() + 0.5
    torn: list[object] = []
    seen = 0

    def publish(first: int) -> None:
        number = first
        while time.monotonic() < until:
            number += 2
            cache.put(KEY, number.to_bytes(8, "little") * 2000, {"number": number})

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        found = cache.get(KEY)
        if found is not None:
            seen += 1
            if found[0] != found[1]["number"].to_bytes(8, "little") * 2000:
                torn.append(found[1])
    for thread in threads:
        thread.join()
    assert torn == []
    assert seen > 0


# --- no room, no folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 100, 2500])
def test_a_full_disk_is_one_line_and_no_loss(toy_root: Path, folder: Path, limit: int) -> None:
    """The limit of a file's size stands in for it: none, less than a record, and less than a cubin."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = worker(toy_root, folder, preexec_fn=full)
    assert result.returncode == 0, result.stderr
    assert len(bytes.fromhex(result.stdout)) > 2500
    (line,) = result.stderr.splitlines()
    assert str(folder) in line
    assert "MLAFLASH_CACHE_DIR" in line
    assert not list(folder.glob("*.cubin"))
    assert not list(folder.glob(".mlaflash-*"))
    assert worker(toy_root, folder).stderr == ""


@pytest.mark.usefixtures("toy_kernels")
def test_a_folder_that_vanished_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = toy(3)
    shutil.rmtree(folder)
    assert toy(3).cubin == first.cubin
    toy(4)
    assert len(CubinCache(folder).entries()) == 1
    forget(monkeypatch)
    assert toy(3).cubin == first.cubin
    assert stats().compiled == 1


@pytest.mark.usefixtures("toy_kernels")
def test_a_folder_that_vanishes_while_it_is_written_to_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token_hex = cache_module.secrets.token_hex

    def vanish(size: int) -> str:
        shutil.rmtree(folder)
        return token_hex(size)

    monkeypatch.setattr(cache_module.secrets, "token_hex", vanish)
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        toy(3)
        toy(4)
    assert len(caplog.records) == 1
    assert stats().compiled == 2


# --- files that are not what they were -----------------------------------------------------------------------------


def truncated(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    mine[0].write_bytes(mine[0].read_bytes()[:-16])


def one_bit(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    content = bytearray(mine[0].read_bytes())
    content[len(content) // 2] ^= 16
    mine[0].write_bytes(content)


def swapped(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    one, two = mine[0].read_bytes(), other[0].read_bytes()
    mine[0].write_bytes(two)
    other[0].write_bytes(one)


def swapped_with_their_records(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    for one, two in zip(mine, other, strict=True):
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b)
        two.write_bytes(a)


def renamed_in_its_record(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    """All agrees, but it is another kernel."""
    record = json.loads(other[1].read_text())
    record["key"] = json.loads(mine[1].read_text())["key"]
    mine[0].write_bytes(other[0].read_bytes())
    mine[1].write_text(json.dumps(record))


def a_pipe(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    mine[0].unlink()
    os.mkfifo(mine[0])


def a_pipe_for_a_record(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    mine[1].unlink()
    os.mkfifo(mine[1])


def a_link_elsewhere(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    mine[0].unlink()
    mine[0].symlink_to(other[0])


def a_record_nested_too_deeply(folder: Path, mine: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    mine[1].write_text("[" * 200_000)


DAMAGES = [
    truncated,
    one_bit,
    swapped,
    swapped_with_their_records,
    renamed_in_its_record,
    a_pipe,
    a_pipe_for_a_record,
    a_link_elsewhere,
    a_record_nested_too_deeply,
]


@pytest.mark.parametrize("others", ["constant", "architecture"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.usefixtures("toy_kernels")
def test_no_other_kernel_is_ever_taken_for_the_one_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None], others: str
) -> None:
    mine, other = toy(3), toy(4) if others == "constant" else toy(3, "sm_120")
    damage(folder, files_of(folder, mine.cubin), files_of(folder, other.cubin))
    forget(monkeypatch)
    again = toy(3)
    assert (again.cubin, again.arch, again.defines) == (mine.cubin, "sm_90", {"FACTOR": 3})
    assert stats().compiled == 1
    # And it is whole again.
    forget(monkeypatch)
    assert toy(3).cubin == mine.cubin
    assert stats().disk_hits == 1


@pytest.mark.parametrize("when", [0.0, 4e9])
@pytest.mark.usefixtures("toy_kernels")
def test_clocks_do_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch, when: float) -> None:
    mine = toy(3)
    for path in [folder, *folder.iterdir()]:
        os.utime(path, (when, when))
    forget(monkeypatch)
    monkeypatch.setattr(time, "time", lambda: when)
    assert toy(3).cubin == mine.cubin
    assert stats().disk_hits == 1


@pytest.mark.usefixtures("toy_kernels")
def test_two_versions_of_nvrtc_share_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ("12.9", "13.0")
    for round_ in range(2):
        for version in versions:
            forget(monkeypatch)
            monkeypatch.setattr(cached, "nvrtc_version", lambda version=version: version)
            toy(3)
            assert (stats().compiled, stats().disk_hits) == ((1, 0) if round_ == 0 else (0, 1))
    assert len(CubinCache(folder).entries()) == 2


def test_a_damaged_library_of_the_emulator_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlaflash.emulator import build

    defines = {"Q_DTYPE": 0, "OUT_DTYPE": 0, "PARTIAL_DTYPE": 0}
    monkeypatch.setattr(build, "_libraries", {})
    load_library("transpose", defines)
    (payload,) = folder.glob("*.so")
    whole = payload.read_bytes()
    # A new file: this process still runs the old one.
    payload.unlink()
    payload.write_bytes(whole[:1000])
    monkeypatch.setattr(build, "_libraries", {})
    load_library("transpose", defines)
    assert payload.read_bytes() == whole


def test_no_other_library_of_the_emulator_is_taken_for_the_one_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlaflash.emulator import build

    asked, other = ({"Q_DTYPE": 0, "OUT_DTYPE": 0, "PARTIAL_DTYPE": 0, "KV_DTYPE": kv_dtype} for kv_dtype in (0, 1))
    for defines in (asked, other):
        monkeypatch.setattr(build, "_libraries", {})
        load_library("transpose", defines)
    mine, others = (
        next(path for path in folder.glob("*.so") if f"kv_dtype{defines['KV_DTYPE']}" in path.name)
        for defines in (asked, other)
    )
    # New files: this process still runs the old ones. All agrees, but it is another kernel.
    record, whole = json.loads(Path(f"{others}.json").read_text()), mine.read_bytes()
    mine.unlink()
    mine.write_bytes(others.read_bytes())
    Path(f"{mine}.json").write_text(json.dumps(record | {"key": mine.name.removesuffix(".so")}))
    assert CubinCache(folder, suffix=".so").get(mine.name.removesuffix(".so")) is not None
    monkeypatch.setattr(build, "_libraries", {})
    load_library("transpose", asked)
    assert mine.read_bytes() == whole
