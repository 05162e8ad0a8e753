import pytest

from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.jit import sources


def test_a_kernel_brings_the_headers_that_it_reaches_and_no_others(toy_root):
    found = sources.read("toy", toy_root)
    assert found.path == toy_root / "toy.cu"
    assert set(found.headers) == {"toy_params.cuh", "toy_scale.cuh"}
    assert found.source == (toy_root / "toy.cu").read_text()
    assert found.headers["toy_scale.cuh"] == (toy_root / "include/toy_scale.cuh").read_text()


@pytest.mark.parametrize("name", ["toy.cu", "include/toy_params.cuh", "include/toy_scale.cuh"])
def test_g10_one_byte_of_any_file_that_the_compiler_sees_changes_the_digest(toy_root, name):
    before = sources.read("toy", toy_root).digest
    path = toy_root / name
    path.write_bytes(path.read_bytes().replace(b"#", b" #", 1))
    assert sources.read("toy", toy_root).digest != before


@pytest.mark.parametrize("name", ["include/unrelated.cuh", "host/toy.h"])
def test_a_file_that_the_compiler_never_sees_changes_nothing(toy_root, name):
    before = sources.read("toy", toy_root).digest
    (toy_root / name).write_text("// edited\n")
    assert sources.read("toy", toy_root).digest == before


def test_the_digest_depends_on_the_text_and_not_on_time_or_place(toy_root, tmp_path):
    copy = tmp_path / "copy"
    toy_root.rename(copy)
    before = sources.read("toy", copy).digest
    (copy / "toy.cu").touch()
    copy.rename(toy_root)
    assert sources.read("toy", toy_root).digest == before


def test_moving_text_between_files_changes_the_digest(tmp_path):
    one = sources.SourceSet("k", tmp_path / "k.cu", "ab", {"h": "c"})
    other = sources.SourceSet("k", tmp_path / "k.cu", "a", {"h": "bc"})
    assert one.digest != other.digest


def test_an_unknown_kernel_is_refused_with_the_known_ones(toy_root):
    with pytest.raises(UnsupportedError, match=r"'mma'; known are toy"):
        sources.read("mma", toy_root)
    with pytest.raises(UnsupportedError, match=r"'\.\./kernels/toy'; known are toy"):
        sources.read("../kernels/toy", toy_root)


def test_two_names_for_one_header_are_refused(toy_root):
    (toy_root / "toy.cu").write_text('#include "include/toy_scale.cuh"\n#include "toy_params.cuh"')
    with pytest.raises(InvalidArgumentError, match=r"include/toy_scale\.cuh.*'toy_scale\.cuh'"):
        sources.read("toy", toy_root)


def test_the_shipped_kernels_reach_nothing_outside_their_folder():
    root = sources.kernel_root()
    names = sources.kernel_names()
    assert {"naive", "tile", "combine"} <= set(names)
    for name in names:
        found = sources.read(name)
        assert found.path.parent == root
        text = "\n".join([found.source, *found.headers.values()])
        assert "#include <" not in text, f"{name} needs a header of the CUDA toolkit"
