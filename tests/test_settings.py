import logging
from pathlib import Path

import platformdirs
import pytest

from mlaflash.errors import InvalidArgumentError
from mlaflash.jit import cache
from mlaflash.settings import Settings, configure_logging, settings

VARIABLES = (
    "MLAFLASH_CACHE_DIR",
    "MLAFLASH_LOG",
    "MLAFLASH_DISABLE_JIT",
    "MLAFLASH_JIT_LINEINFO",
    "MLAFLASH_ARCH",
    "MLAFLASH_TUNED",
    "CXX",
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_defaults():
    assert settings() == Settings(cache_dir=None, log="warning", disable_jit=False, lineinfo=False, arch=None, cxx=None)
    assert settings().cache_path == platformdirs.user_cache_path("mlaflash", appauthor=False)


def test_every_variable_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("MLAFLASH_LOG", "DEBUG")
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    monkeypatch.setenv("MLAFLASH_JIT_LINEINFO", "yes")
    monkeypatch.setenv("MLAFLASH_ARCH", "sm_120a")
    monkeypatch.setenv("MLAFLASH_TUNED", "tuned.json")
    monkeypatch.setenv("CXX", "clang++")
    assert settings() == Settings("~/kernels", "debug", True, True, "sm_120a", "tuned.json", "clang++")
    assert settings().cache_path == Path.home() / "kernels"
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "0")
    assert not settings().disable_jit


def test_an_empty_cache_folder_switches_the_disk_off(monkeypatch):
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "")
    assert settings().cache_path is None


@pytest.mark.parametrize("folder", [".", "kernels", "../x"])
def test_the_cache_folder_is_absolute(monkeypatch, folder):
    """A loader looks for a bare file name elsewhere, and a program may change its folder."""
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", folder)
    assert settings().cache_path == Path.cwd() / folder


def raise_no_home(*args, **kwargs):
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [raise_no_home, lambda *args, **kwargs: Path("~/.cache/mlaflash")])
def test_a_user_without_a_home_has_no_cache_on_disk(monkeypatch, caplog, answer):
    """Versions of platformdirs differ in what they do for a user whom the system does not know."""
    monkeypatch.setattr(platformdirs, "user_cache_path", answer)
    monkeypatch.setattr(cache, "_warned", set())
    assert settings().cache_path is None
    with caplog.at_level(logging.WARNING, logger="mlaflash"):
        assert cache.open_cache() is None
        assert cache.open_cache(suffix=".so") is None
    (record,) = caplog.records
    assert "MLAFLASH_CACHE_DIR" in record.getMessage()


def test_a_home_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(InvalidArgumentError, match="'~no-such-user/kernels'"):
        _ = settings().cache_path


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("MLAFLASH_LOG", "loud", "debug, info, warning"),
        ("MLAFLASH_DISABLE_JIT", "maybe", "1, true, yes, on"),
        ("MLAFLASH_JIT_LINEINFO", "2", "1, true, yes, on"),
        ("MLAFLASH_ARCH", "120", "sm_120"),
        ("MLAFLASH_ARCH", "sm_90b", "sm_90a"),
    ],
)
def test_a_bad_value_is_refused_with_variable_value_and_allowed(monkeypatch, variable, value, allowed):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgumentError) as caught:
        settings()
    for part in (variable, repr(value), allowed):
        assert part in str(caught.value)


@pytest.fixture
def logger():
    logger = logging.getLogger("mlaflash")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers.clear()
    yield logger
    logger.level, logger.handlers[:], logger.propagate = before


def test_logging_is_left_alone_without_the_variable(logger):
    configure_logging()
    assert not logger.handlers


def test_logging_speaks_on_stderr_at_the_level_asked_for(logger, monkeypatch, capsys):
    monkeypatch.setenv("MLAFLASH_LOG", "info")
    configure_logging()
    configure_logging()
    logger.info("compiling toy")
    logger.debug("unheard")
    captured = capsys.readouterr()
    assert captured.err == "mlaflash: compiling toy\n"
    assert captured.out == ""


def test_a_bad_level_does_not_break_the_import(logger, monkeypatch):
    monkeypatch.setenv("MLAFLASH_LOG", "loud")
    configure_logging()
    assert not logger.handlers
