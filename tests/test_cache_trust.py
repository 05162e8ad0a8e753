"""Folders that another user can write are no cache; nothing but names and numbers becomes an option of a compiler."""

import json
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlaflash.emulator.build import compile_library
from mlaflash.errors import CacheMissError, InvalidArgumentError, MlaFlashError, UnsupportedError
from mlaflash.jit import cache as cache_module
from mlaflash.jit import cached, compile_cached, trust
from mlaflash.jit.cache import CubinCache, make_key
from mlaflash.jit.compiler import compile_options
from mlaflash.jit.trust import distrust, make_folder

KEY = make_key("toy", {})
ANOTHER_USER = 12345


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o755)
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(path))
    monkeypatch.setattr(cache_module, "_warned", set())
    monkeypatch.setattr(cached, "_compiled", {})
    return path


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Let paths belong to other users, which only root could arrange."""
    found: dict[Path, int] = {}
    lstat = Path.lstat

    def pretended(path: Path) -> os.stat_result:
        real = lstat(path)
        if path not in found:
            return real
        values = list(real)
        values[stat.ST_UID] = found[path]
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", pretended)
    return found


def test_a_folder_of_this_users_own_is_trusted(folder: Path) -> None:
    assert distrust(folder) is None
    assert distrust(folder / "not" / "there") is None
    assert distrust(Path("/")) is None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777, 0o702])
def test_a_folder_that_all_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert f"can be written by other users (mode {mode:04o})" in str(distrust(folder))


@pytest.mark.parametrize("is_private", [False, True])
def test_a_folder_of_a_group_is_refused_unless_it_is_this_users_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_private: bool
) -> None:
    folder.chmod(0o775)
    monkeypatch.setattr(trust, "_is_private", lambda gid: is_private)
    assert (distrust(folder) is None) == is_private


def test_a_group_of_others_is_not_private() -> None:
    assert not trust._is_private(2**31 - 7)
    assert not trust._is_private(1)  # daemon


@pytest.mark.parametrize(
    ("gid", "group", "members", "is_private"),
    [
        (1000, "me", [], True),
        (1000, "me", ["me"], True),
        (1000, "me", ["me", "other"], False),
        (1000, "users", [], False),
        (0, "root", [], False),
    ],
)
def test_a_private_group_has_its_users_name_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, gid: int, group: str, members: list[str], is_private: bool
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=1000))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    assert trust._is_private(gid) == is_private


def test_a_folder_of_another_user_is_refused(folder: Path, owners: dict[Path, int]) -> None:
    owners[folder] = ANOTHER_USER
    assert distrust(folder) == f"{folder} belongs to user {ANOTHER_USER}"
    owners[folder] = 0
    assert distrust(folder) is None


def test_so_is_one_below_a_folder_that_another_user_can_rename_things_in(folder: Path, owners: dict[Path, int]) -> None:
    below = folder / "a" / "b"
    below.mkdir(parents=True)
    folder.chmod(0o777)
    assert str(folder) in str(distrust(below))
    # As /tmp: what is ours stays where it is.
    folder.chmod(0o1777)
    assert distrust(below) is None
    owners[folder / "a"] = ANOTHER_USER
    assert str(folder / "a") in str(distrust(below))


def test_links_are_followed_as_the_system_does(folder: Path, tmp_path: Path, owners: dict[Path, int]) -> None:
    link, open_to_all = tmp_path / "link", tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(folder)
    assert distrust(link) is None
    assert distrust(link / "below") is None
    owners[link] = ANOTHER_USER
    assert "the link" in str(distrust(link))
    del owners[link]
    # By way of a folder where another user could change the second link.
    (open_to_all / "second").symlink_to(folder)
    link.unlink()
    link.symlink_to("open/../open/second")
    assert str(open_to_all) in str(distrust(link))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "too many links" in str(distrust(loop))


def test_folders_are_made_for_this_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_what_lies_in_a_refused_folder_is_neither_read_nor_added_to(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CubinCache(folder)
    assert cache.put(KEY, b"trusted", {})
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        assert cache.get(KEY) is None
        assert not cache.put(KEY, b"other", {})
    (record,) = caplog.records
    assert "can be written by other users" in record.getMessage()
    assert "MLAFLASH_CACHE_DIR" in record.getMessage()
    folder.chmod(0o755)
    assert cache.get(KEY) == (b"trusted", {})


@pytest.mark.usefixtures("toy_kernels")
def test_a_kernel_planted_in_a_refused_folder_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cached("toy", {"FACTOR": 3}, "sm_90")
    (entry,) = CubinCache(folder).entries()
    record = json.loads((folder / f"{entry.path.name}.json").read_text())
    CubinCache(folder).put(entry.key, b"planted", record["info"])
    folder.chmod(0o777)
    monkeypatch.setattr(cached, "_compiled", {})
    assert compile_cached("toy", {"FACTOR": 3}, "sm_90").cubin != b"planted"
    monkeypatch.setattr(cached, "_compiled", {})
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    with pytest.raises(CacheMissError, match=r"not used because .* can be written by other users"):
        compile_cached("toy", {"FACTOR": 3}, "sm_90")


# --- options of compilers ------------------------------------------------------------------------------------------

NASTY = ["X -I/tmp", "X=1 -include/etc/passwd", "x", "X\n", "", "X;touch /tmp/y", "-X", "X\0", 5]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_that_is_no_constant_is_refused_by_both_compilers(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="upper-case names"):
        compile_options({name: 1}, "sm_90")
    with pytest.raises(InvalidArgumentError, match="upper-case names"):
        compile_library("naive", {name: 1})


@pytest.mark.parametrize("value", ["1 -I/tmp", "1", 1.5, None, b"1"])
def test_a_value_that_is_no_integer_is_refused_by_both_compilers(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="integer"):
        compile_options({"X": value}, "sm_90")  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="integer"):
        compile_library("naive", {"X": value})  # type: ignore[dict-item]


def test_an_integer_that_spells_itself_otherwise_is_written_as_a_number() -> None:
    class Spelled(int):
        def __format__(self, spec: str) -> str:
            return "1 -I/tmp"

        def __str__(self) -> str:
            return "1 -I/tmp"

    assert "-DMLAFLASH_X=1" in compile_options({"X": Spelled(1)}, "sm_90")


@pytest.mark.parametrize("arch", ["sm_90 -I/tmp", "sm_90\n", "sm_90;x", "--help", "", "compute_90", "sm_9090"])
@pytest.mark.usefixtures("toy_kernels", "folder")
def test_an_architecture_is_a_name_and_nothing_more(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)):
        compile_options({}, arch)
    if arch.strip() == arch != "":  # what surrounds a value is nothing, and so is no value
        monkeypatch.setenv("MLAFLASH_ARCH", arch)
        with pytest.raises(InvalidArgumentError, match="MLAFLASH_ARCH"):
            compile_cached("toy", {"FACTOR": 3}, "sm_90")


@pytest.mark.parametrize("kernel", ["../toy", "toy.cu", "/etc/passwd", "-toy", "toy\0", ""])
@pytest.mark.usefixtures("toy_kernels")
def test_a_kernel_is_one_of_the_names_that_there_are(kernel: str) -> None:
    with pytest.raises(UnsupportedError, match="Name one of them"):
        compile_cached(kernel, {}, "sm_90")
    with pytest.raises(UnsupportedError, match="Name one of them"):
        compile_library(kernel, {})


def test_no_room_for_temporary_files_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(MlaFlashError, match="TMPDIR"):
        compile_library("naive", {})
