"""What the README shows must run."""

import re
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()


def test_the_example_without_a_gpu_runs_and_is_right() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = (block for block in blocks if "emulator" in block)
    names: dict[str, Any] = {}
    exec(example.replace("print(", "error = ("), names)
    assert names["out"].shape == (8, 8, 512)
    assert names["error"] < 0.05


def test_every_argument_of_the_gpu_example_exists() -> None:
    import inspect

    from mlaflash import mla_verify

    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = (block for block in blocks if "cupy" in block)
    call = example.split("mla_verify(")[1]
    keywords = re.findall(r"^\s+(\w+)=", call, re.MULTILINE)
    assert keywords
    assert set(keywords) <= set(inspect.signature(mla_verify).parameters)


def test_the_shape_that_is_warmed_up_is_one() -> None:
    import mlaflash

    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = (block for block in blocks if "warmup" in block)
    names: dict[str, Any] = {"mlaflash": mlaflash}
    exec(example.split("mlaflash.warmup(")[0], names)
    assert names["shape"] == mlaflash.VerifyShape(
        num_heads=8, batch=48, q_len=16, kv_len=262_144, page_size=64, mask="tree"
    )


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (Path(__file__).parents[1] / target).exists()] == []


def test_every_case_from_the_field_is_where_the_table_says() -> None:
    table = {
        found[1]: set(re.findall(r"`(\w+\.py)`", found[2]))
        for found in re.finditer(r"^\| ([A-H]\d+) \|.*\| ([^|]*) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)
    }
    assert all(table.values())
    there: dict[str, set[str]] = {}
    for path in TESTS.glob("*.py"):
        text = path.read_text()
        names = re.findall(r"def test_((?:[a-h]\d+_)+)", text) + re.findall(r'name=f?"([a-h]\d+)-', text)
        names += re.findall(r'"""((?:[A-H]\d+(?:, )?)+): ', text)
        for name in names:
            for case in re.findall(r"[a-h]\d+", name.lower()):
                there.setdefault(case.upper(), set()).add(path.name)
    assert table == there
