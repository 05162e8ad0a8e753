"""The cache on disk: whole files or none, and nothing compiled twice."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlaflash.errors import CacheMissError, InvalidArgumentError, MlaFlashError
from mlaflash.jit import cache as cache_module
from mlaflash.jit import cached, compile_cached, stats
from mlaflash.jit.cache import CubinCache, make_key, open_cache

KEY = make_key("toy-ht8-sm_90", {"sources": "abc"})
PAYLOAD = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give a test an empty cache of its own, on disk and in memory."""
    path = tmp_path / "cache"
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(path))
    monkeypatch.setattr(cached, "_compiled", {})
    monkeypatch.setattr(cached, "counters", cached._Counters())
    monkeypatch.setattr(cache_module, "_warned", set())
    return path


@pytest.fixture
def cache(folder):
    return CubinCache(folder)


def test_what_is_stored_comes_back(cache):
    assert cache.get(KEY) is None
    assert cache.put(KEY, PAYLOAD, {"registers": 40})
    assert cache.get(KEY) == (PAYLOAD, {"registers": 40})
    (entry,) = cache.entries()
    assert (entry.key, entry.num_bytes, entry.info) == (KEY, len(PAYLOAD), {"registers": 40})
    assert entry.path.read_bytes() == PAYLOAD


def test_looking_up_makes_no_folder(cache):
    assert cache.get(KEY) is None
    assert cache.entries() == []
    assert cache.clear() == 0
    assert not cache.path.exists()


def test_a_folder_that_may_not_be_looked_into_is_an_empty_cache(folder, monkeypatch, caplog):
    """As /root is for the user of a container who has inherited HOME."""

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(folder))

    for name in ("stat", "iterdir", "mkdir", "read_bytes"):
        monkeypatch.setattr(Path, name, forbidden)
    cache = CubinCache(folder)
    assert cache.get(KEY) is None
    assert cache.entries() == []
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        assert not cache.put(KEY, PAYLOAD, {})
    assert len(caplog.records) == 1
    with pytest.raises(MlaFlashError, match="Permission denied"):
        cache.clear()


def test_a_folder_whose_name_is_too_long_is_an_empty_cache(tmp_path):
    cache = CubinCache(tmp_path / ("x" * 300))
    assert cache.get(KEY) is None
    assert cache.entries() == []


def test_clearing_removes_what_it_can_and_says_what_it_cannot(cache):
    another = make_key("another", {})
    cache.put(KEY, PAYLOAD, {})
    cache.put(another, PAYLOAD, {})
    first = min(KEY, another)
    cache.payload_path(first).unlink()
    (cache.payload_path(first) / "inside").mkdir(parents=True)
    with pytest.raises(MlaFlashError, match=rf"{first}.*1 kernels are removed"):
        cache.clear()
    assert [path.name for path in cache.path.iterdir()] == [f"{first}.cubin"]


def test_g4_storing_again_replaces(cache):
    cache.put(KEY, PAYLOAD, {})
    cache.put(KEY, b"new", {"registers": 1})
    assert cache.get(KEY) == (b"new", {"registers": 1})
    assert sorted(path.name for path in cache.path.iterdir()) == [
        f"{KEY}.cubin",
        f"{KEY}.cubin.json",
    ]


def damage_torn(payload: Path, record: Path) -> None:
    payload.write_bytes(PAYLOAD[:-1])


def damage_empty(payload: Path, record: Path) -> None:
    payload.write_bytes(b"")


def damage_bit(payload: Path, record: Path) -> None:
    payload.write_bytes(PAYLOAD[:100] + bytes([PAYLOAD[100] ^ 1]) + PAYLOAD[101:])


def damage_directory(payload: Path, record: Path) -> None:
    payload.unlink()
    payload.mkdir()


def damage_no_record(payload: Path, record: Path) -> None:
    record.unlink()


def damage_torn_record(payload: Path, record: Path) -> None:
    record.write_bytes(record.read_bytes()[:-10])


def damage_binary_record(payload: Path, record: Path) -> None:
    record.write_bytes(b"\xff\xfe\x00")


def damage_foreign_record(payload: Path, record: Path) -> None:
    record.write_text("[1, 2]")


def damage_digest(payload: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": "0" * 64}))


def damage_schema(payload: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "schema": 0}))


def damage_key(payload: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "key": "another"}))


def damage_fields(payload: Path, record: Path) -> None:
    record.write_text(json.dumps({"schema": 1, "key": KEY}))


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_torn_or_foreign_file_is_a_miss(cache, damage):
    cache.put(KEY, PAYLOAD, {})
    damage(cache.payload_path(KEY), cache.payload_path(KEY).with_suffix(".cubin.json"))
    assert cache.get(KEY) is None


def test_clear_removes_ours_and_nothing_else(cache):
    cache.put(KEY, PAYLOAD, {})
    (cache.path / ".mlaflash-1-leftover").write_bytes(b"half")
    (cache.path / f"{make_key('torn', {})}.cubin.json").write_text("{")
    CubinCache(cache.path, suffix=".so").put(KEY, b"library", {})
    foreign = ["notes.json", "other.cubin", f"{KEY}.txt"]
    for name in foreign:
        (cache.path / name).write_text("mine")
    assert cache.clear() == 1
    left = sorted(path.name for path in cache.path.iterdir())
    assert left == sorted([*foreign, f"{KEY}.so", f"{KEY}.so.json"])


def test_entries_leave_out_what_is_not_ours(cache):
    cache.put(KEY, PAYLOAD, {})
    (cache.path / "other.cubin").write_text("mine")
    (cache.path / f"{make_key('torn', {})}.cubin").write_text("no record")
    assert [entry.key for entry in cache.entries()] == [KEY]


def test_keys_differ_with_any_part_and_not_with_its_order():
    base = {"sources": "abc", "options": ["-a", "-b"], "nvrtc": "12.9"}
    assert make_key("toy", base) == make_key("toy", dict(reversed(base.items())))
    others = [
        {**base, "sources": "abd"},
        {**base, "options": ["-b", "-a"]},
        {**base, "nvrtc": "13.0"},
        {**base, "more": 1},
    ]
    assert len({make_key("toy", parts) for parts in [base, *others]}) == 5


def test_a_key_is_a_file_name_whatever_the_label():
    assert make_key("a/../b c" + "x" * 500, {}).startswith("a_.._b_c")
    assert len(make_key("x" * 500, {})) < 200


def test_a_cache_folder_that_is_a_file_is_a_typed_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(path))
        with pytest.raises(InvalidArgumentError) as caught:
            open_cache()
        assert "MLAFLASH_CACHE_DIR" in str(caught.value)
        assert str(file) in str(caught.value)
    assert file.read_text() == "mine"


def test_the_empty_string_is_no_cache_on_disk(monkeypatch):
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "")
    assert open_cache() is None


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("step", ["os.replace", "pathlib.Path.mkdir", "CubinCache._publish"])
@pytest.mark.usefixtures("toy_kernels")
def test_g2_an_unwritable_folder_is_one_warning_and_the_kernels_stay_in_memory(folder, monkeypatch, caplog, step):
    monkeypatch.setattr(step.replace("CubinCache", "mlaflash.jit.cache.CubinCache"), refuse)
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        first = compile_cached("toy", {"FACTOR": 3}, "sm_90")
        second = compile_cached("toy", {"FACTOR": 4}, "sm_90")
        again = compile_cached("toy", {"FACTOR": 3}, "sm_90")
    (record,) = caplog.records
    assert "MLAFLASH_CACHE_DIR" in record.getMessage()
    assert str(folder) in record.getMessage()
    assert first.cubin != second.cubin
    assert again.cubin == first.cubin
    assert (stats().compiled, stats().memory_hits) == (2, 1)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.usefixtures("toy_kernels")
def test_a_folder_that_the_system_refuses_is_one_warning(monkeypatch, caplog, folder):
    """The kernel's own file system refuses new folders to root as well."""
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "/proc/mlaflash")
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        compile_cached("toy", {"FACTOR": 3}, "sm_90")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("toy_kernels")
def test_memory_then_disk_then_the_compiler(folder, monkeypatch):
    cold = compile_cached("toy", {"FACTOR": 3}, "sm_90")
    assert not cold.cached
    assert cold.seconds > 0
    warm = compile_cached("toy", {"FACTOR": 3}, "sm_90")
    assert warm.cached
    assert warm.seconds == 0.0
    monkeypatch.setattr(cached, "_compiled", {})
    disk = compile_cached("toy", {"FACTOR": 3}, "sm_90")
    assert disk.cached
    assert (disk.cubin, disk.registers, disk.log, disk.defines, disk.nvrtc_version) == (
        cold.cubin,
        cold.registers,
        cold.log,
        cold.defines,
        cold.nvrtc_version,
    )
    counted = stats()
    assert (counted.compiled, counted.memory_hits, counted.disk_hits) == (1, 1, 1)
    assert counted.nvrtc_seconds == cold.seconds


@pytest.mark.parametrize("change", ["defines", "arch", "lineinfo", "source", "header", "nvrtc"])
def test_whatever_the_compiler_sees_is_part_of_the_key(folder, toy_kernels, monkeypatch, change):
    compile_cached("toy", {"FACTOR": 3}, "sm_90")
    defines, arch, lineinfo = {"FACTOR": 3}, "sm_90", None
    if change == "defines":
        defines = {"FACTOR": 4}
    elif change == "arch":
        arch = "sm_120"
    elif change == "lineinfo":
        monkeypatch.setenv("MLAFLASH_JIT_LINEINFO", "1")
    elif change == "nvrtc":
        monkeypatch.setattr(cached, "nvrtc_version", lambda: "99.0")
    else:
        path = toy_kernels / {"source": "toy.cu", "header": "include/toy_scale.cuh"}[change]
        path.write_text(path.read_text() + "\n")
    compile_cached("toy", defines, arch, lineinfo=lineinfo)
    assert stats().compiled == 2
    assert len(CubinCache(folder).entries()) == 2


def test_editing_an_unrelated_file_compiles_nothing(folder, toy_kernels):
    compile_cached("toy", {"FACTOR": 3}, "sm_90")
    (toy_kernels / "include" / "unrelated.cuh").write_text("// edited\n")
    assert compile_cached("toy", {"FACTOR": 3}, "sm_90").cached


@pytest.mark.usefixtures("toy_kernels")
def test_a_record_without_its_numbers_is_compiled_again(folder, monkeypatch):
    cold = compile_cached("toy", {"FACTOR": 3}, "sm_90")
    (entry,) = CubinCache(folder).entries()
    CubinCache(folder).put(entry.key, cold.cubin, {"kernel": "toy"})
    monkeypatch.setattr(cached, "_compiled", {})
    assert not compile_cached("toy", {"FACTOR": 3}, "sm_90").cached
    assert CubinCache(folder).entries()[0].info["registers"] == cold.registers


@pytest.mark.usefixtures("toy_kernels", "folder")
def test_a_miss_is_an_error_when_compiling_is_switched_off(monkeypatch):
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    with pytest.raises(CacheMissError, match=r"'toy' for sm_90.*mlaflash compile --arch sm_90"):
        compile_cached("toy", {"FACTOR": 3}, "sm_90")
    monkeypatch.delenv("MLAFLASH_DISABLE_JIT")
    compile_cached("toy", {"FACTOR": 3}, "sm_90")
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    monkeypatch.setattr(cached, "_compiled", {})
    assert compile_cached("toy", {"FACTOR": 3}, "sm_90").cached


@pytest.mark.usefixtures("toy_kernels", "folder")
def test_a_cold_compile_logs_one_line_before_and_one_after(caplog):
    with caplog.at_level(logging.INFO, logger="mlaflash"):
        compile_cached("toy", {"FACTOR": 3}, "sm_90")
        compile_cached("toy", {"FACTOR": 3}, "sm_90")
    before, after = (record.getMessage() for record in caplog.records)
    assert before == "compiling toy-factor3 for sm_90"
    assert after.startswith("compiled toy-factor3 for sm_90 in ")
    assert "registers, 0 bytes of spills" in after


@pytest.mark.usefixtures("toy_kernels", "folder")
def test_threads_that_want_one_kernel_compile_it_once():
    barrier = threading.Barrier(4)
    cubins = []

    def work():
        barrier.wait()
        cubins.append(compile_cached("toy", {"FACTOR": 3}, "sm_90").cubin)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cubins) == 4
    assert len(set(cubins)) == 1
    assert stats().compiled == 1
    assert stats().memory_hits == 3


WORKER = """
import sys
from pathlib import Path

from mlaflash.jit import compile_cached, sources, stats

sources.kernel_root = lambda: Path(sys.argv[1])
if len(sys.argv) > 2:
    sys.stdin.read()
compiled = compile_cached("toy", {"FACTOR": 3}, "sm_90")
print(len(compiled.cubin), compiled.registers, stats().compiled, stats().nvrtc_seconds)
"""


def start_worker(root: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WORKER, str(root), *more],
        env={**os.environ, "MLAFLASH_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_g1_sixteen_processes_on_an_empty_cache_all_succeed(toy_root, folder):
    workers = [start_worker(toy_root, folder, "wait") for _ in range(16)]
    for worker in workers:
        worker.stdin.close()
    answers = []
    for worker in workers:
        answers.append(worker.stdout.read().split())
        assert worker.wait() == 0, worker.stderr.read()
        worker.stdout.close()
        worker.stderr.close()
    assert len({tuple(answer[:2]) for answer in answers}) == 1
    cache = CubinCache(folder)
    (entry,) = cache.entries()
    payload, info = cache.get(entry.key)
    assert [str(len(payload)), str(info["registers"])] == answers[0][:2]
    assert len(list(folder.iterdir())) == 2, "a temporary file was left behind"


def test_a_second_process_compiles_nothing(toy_root, folder):
    outputs = []
    for _ in range(2):
        output, errors = start_worker(toy_root, folder).communicate()
        outputs.append(output.split())
        assert errors == ""
    first, second = outputs
    assert first[2] == "1"
    assert second[2:] == ["0", "0.0"]
    assert first[:2] == second[:2]
