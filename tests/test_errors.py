from pathlib import Path

import pytest

from mlaflash import errors

PARENTS = {
    "InvalidArgumentError": ValueError,
    "ShapeError": errors.InvalidArgumentError,
    "UnsupportedError": NotImplementedError,
    "TileError": errors.UnsupportedError,
    "MissingDependencyError": ImportError,
    "NoDeviceError": RuntimeError,
    "CompileError": RuntimeError,
    "CacheMissError": RuntimeError,
    "CaptureError": RuntimeError,
    "LaunchError": RuntimeError,
    "ContextLostError": errors.LaunchError,
    "CommunicationError": RuntimeError,
    "BusyError": RuntimeError,
    "EmulatorError": RuntimeError,
}


@pytest.mark.parametrize(("name", "parent"), PARENTS.items())
def test_every_error_is_ours_and_a_builtin(name, parent):
    error = getattr(errors, name)
    assert issubclass(error, errors.MlaFlashError)
    assert issubclass(error, parent)


def test_the_table_above_is_complete():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MlaFlashError)
    }
    assert defined == {*PARENTS, "MlaFlashError"}


def test_a_tile_error_is_a_value_error_and_carries_both_numbers():
    error = errors.TileError("too large", shared_bytes=106_496, shared_limit=101_376)
    assert isinstance(error, ValueError)
    assert (error.shared_bytes, error.shared_limit) == (106_496, 101_376)
    assert str(error) == "too large"


def test_a_compile_error_shows_everything_needed_to_repeat_it():
    error = errors.CompileError(
        "NVRTC refused the kernel.",
        kernel="tile",
        defines={"TK": 16, "HT": 8},
        arch="sm_90",
        options=["-std=c++17", "-DMLAFLASH_HT=8"],
        log="tile.cu(3): error: no\n",
        source_path=Path("kernels/tile.cu"),
    )
    assert str(error).splitlines() == [
        "NVRTC refused the kernel.",
        "  kernel tile for sm_90, constants: HT=8 TK=16",
        "  source kernels/tile.cu",
        "  options -std=c++17 -DMLAFLASH_HT=8",
        "tile.cu(3): error: no",
    ]
    assert error.options == ("-std=c++17", "-DMLAFLASH_HT=8")
    assert error.defines == {"TK": 16, "HT": 8}


def test_an_emulator_error_has_its_kind():
    error = errors.EmulatorError("two warps", kind="race")
    assert error.kind == "race"
    assert error.report is None
