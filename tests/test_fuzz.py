"""The fuzzer itself: right on what is right, and it tells what is wrong. What it found is tested here and in the files
of what it was about."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mlaflash import emulator, oracle
from mlaflash.commands.main import main
from mlaflash.errors import EmulatorError, InvalidArgumentError
from mlaflash.lab import fuzz
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.move_inputs import NAMES, ids
from mlaflash.mma_tiles import NARROW_DS_MLA


def run(trials: range, seed: int = 0) -> fuzz.Tally:
    *_, tally = fuzz.fuzz(fuzz.Place("emulator"), seed, trials=trials)
    assert isinstance(tally, fuzz.Tally)
    return tally


def trials_of(kind: str) -> list[int]:
    return [number for number in range(60) if fuzz.kind_of(0, number) == kind]


def test_a_few_trials_have_no_finding() -> None:
    tally = run(range(16))
    assert tally.findings == []
    assert tally.trials == 16
    assert tally.right.total() > 6
    assert tally.refused.total() > 1


def test_a_trial_is_made_of_its_seed_and_number() -> None:
    number = trials_of("verify")[0]
    place = fuzz.Place("emulator")
    seen: list[Any] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            def call(**arguments: Any) -> Any:
                seen.append(arguments["q"])
                return getattr(emulator, name)(**arguments)

            return call

    place.calls = Spy()
    for _ in range(2):
        fuzz.run_trial(place, 0, number, fuzz.Tally())
    first, second = (q if isinstance(q, tuple) else (q,) for q in seen)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("kind", ["verify", "sparse", "shard"])
def test_a_wrong_number_is_a_finding(kind: str) -> None:
    place = fuzz.Place("emulator")

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            def call(**arguments: Any) -> Any:
                out, lse = getattr(emulator, name)(**arguments)
                return out + 1, lse

            return call

    place.calls = Wrong()
    tally = fuzz.Tally()
    for number in trials_of(kind)[:4]:
        fuzz.run_trial(place, 0, number, tally)
    assert tally.right.total() == 0
    assert tally.findings
    assert all("is off by" in finding.reason or "out[" in finding.reason for finding in tally.findings)


def test_a_fault_of_a_kernel_and_an_error_of_no_type_of_ours_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    number = trials_of("mask")[0]
    for error in (EmulatorError("race: here", kind="race"), IndexError("5"), ZeroDivisionError()):

        def fail(*arguments: Any, error: Exception = error, **how: Any) -> Any:
            raise error

        monkeypatch.setattr(emulator, "pack_mask", fail)
        finding = fuzz.run_trial(fuzz.Place("emulator"), 0, number, fuzz.Tally())
        assert finding is not None
        assert type(error).__name__ in finding.reason


def test_the_command_says_how_to_repeat_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **how: Any) -> Any:
        raise IndexError("5")

    number = str(trials_of("mask")[0])
    command = ["fuzz", "--device", "emulator", "--trial", number]
    assert CliRunner().invoke(main, command).exit_code == 0
    monkeypatch.setattr(emulator, "pack_mask", fail)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert f"repeat with: mlaflash fuzz --device emulator --seed 0 --trial {number}" in result.output
    assert '"reason": "IndexError: 5"' in CliRunner().invoke(main, [*command, "--json"]).stdout


# --- what it found -------------------------------------------------------------------------------------------------


def test_requests_without_query_tokens_may_have_any_strides() -> None:
    q = np.zeros((3, 0, 4, 608), np.float32)[..., :576]
    out, lse = emulator.mla_verify(
        q, np.zeros((3, 8, 576), np.float32), sm_scale=0.1, kv_lens=np.array([8, 1, 0], np.int32)
    )
    assert (out.shape, lse.shape) == ((3, 0, 4, 512), (3, 0, 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 24, 57])
def test_lists_of_moves_write_a_slot_once(name: str, size: int) -> None:
    _, dst = ids(name, size, np.random.default_rng(0))
    assert np.unique(dst).size == dst.size


@pytest.mark.parametrize("q_len", [0, 7])
def test_new_rows_do_not_make_up_for_a_page_that_is_too_short(q_len: int) -> None:
    """Page b is request b: what the new rows leave must fit it, in checked mode."""
    case = Case(name="dense", q_lens=(9, 9), kv_lens=(20, 5), heads=2, sm_scale=0.1, addressing="dense", new_kv=True)
    arguments = build(case, 0)
    emulator.mla_verify(**arguments)
    arguments["qo_indptr"] = np.array([0, q_len, 9 + q_len], np.int32)
    with pytest.raises(InvalidArgumentError, match=r"kv_lens\[0\] leaves .* page 0 holds 12"):
        emulator.mla_verify(**arguments)


@pytest.mark.parametrize("seed", [15, 23])
def test_new_rows_behind_one_cached_token_of_its_own_scale(seed: int) -> None:
    """The emulator's maximum of two zeros was the negative one, whose bits are no exponent."""
    case = Case(
        name="x",
        q_lens=(32,),
        kv_lens=(33,),
        heads=1,
        sm_scale=0.14468,
        page_size=3,
        dtype="float16",
        kv_dtype="fp8_ds_mla",
        mask="dense",
        new_kv=True,
    )
    arguments = build(case, seed)
    tiles = dataclasses.replace(NARROW_DS_MLA, nsplit=1)
    out, lse = emulator.mla_verify(**arguments, tiles=tiles, out_dtype="float32")
    found = compare(out, lse, *oracle.mla_verify(**arguments), tolerance("float16", "float32", partials=True))
    assert found.passed, found
