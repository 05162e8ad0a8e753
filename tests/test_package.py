"""The wheel and the sdist hold the kernels, and an installed wheel finds and compiles them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from mlaflash.jit import sources

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """Build the sdist, and the wheel from it."""
    source = tmp_path_factory.mktemp("source") / "mlaflash"
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "dist")
    shutil.copytree(CHECKOUT, source, ignore=ignore)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def kernel_files() -> set[str]:
    root = CHECKOUT / "kernels"
    return {
        path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix in {".cu", ".cuh", ".h", ".md"}
    }


def test_the_wheel_holds_every_kernel_and_no_other_top_level_module(distributions):
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    prefix = "mlaflash/kernels/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} >= (kernel_files())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"mlaflash"}
    assert "mlaflash/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_kernels_the_tests_and_the_documents(distributions):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"kernels/{name}" for name in kernel_files()} <= names
    assert {"cli.py", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert {"tests/test_package.py", "examples/emulator.py"} <= names


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory) -> Path:
    """Install the wheel into an environment of its own, which borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    variables = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", variables))
    # Links, and no .pth file with the borrowed folder: NVRTC is looked for in site-packages itself, and
    # an editable install of mlaflash, itself a .pth file, stays out.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        place = site_packages / entry.name
        if entry.suffix != ".pth" and "mlaflash" not in entry.name and not place.exists():
            place.symlink_to(entry)
    return folder


def run_in(installed: Path, *command: str, cache: Path) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cache),
        "MLAFLASH_CACHE_DIR": str(cache / "kernels"),
    }
    done = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_finds_its_own_kernels_and_compiles_one(installed, tmp_path):
    script = """
from pathlib import Path
import mlaflash
from mlaflash.jit import compile_cached, sources
from mlaflash.tiles import NaiveConfig, dtype_defines

root = sources.kernel_root()
assert root == Path(mlaflash.__file__).parent / "kernels", root
print(root)
print(*sources.kernel_names())
print(sources.read("naive").digest)
constants = dtype_defines("bfloat16", "bfloat16", "float32") | NaiveConfig().defines()
compiled = compile_cached("naive", constants, "sm_120")
print(compiled.cubin[1:4].decode(), compiled.registers > 0, compiled.cached)
"""
    output = run_in(installed, "python", "-c", script, cache=tmp_path)
    root, names, digest, compiled = output.splitlines()
    assert Path(root).is_relative_to(installed)
    assert names.split() == sources.kernel_names()
    assert digest == sources.read("naive").digest
    assert compiled == "ELF True False"
    assert len(list((tmp_path / "kernels").glob("naive-*.cubin"))) == 1


def test_the_command_is_installed(installed, tmp_path):
    assert "Usage:" in run_in(installed, "mlaflash", "--help", cache=tmp_path)


def test_ci_runs_the_test_command_of_the_readme_word_for_word():
    command = (CHECKOUT / ".ci" / "run").read_text().splitlines()[-1]
    assert "pytest" in command
    assert command in (CHECKOUT / "README.md").read_text().splitlines()
