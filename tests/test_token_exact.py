"""Speculative decoding gives the tokens of plain decoding, and what breaks it is noticed."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mlaflash.commands.main import main
from mlaflash.lab.model import ModelConfig, make_weights, oracle_logits, rope_table
from mlaflash.lab.token_exact import SMALL, Outcome, Place, check_tokens, emulator_place, settings_for


def decode(place: Place, config: ModelConfig, *, count: int = 24, **options: Any) -> dict[str, Outcome]:
    options = {"requests": 2, "defrag_steps": 4} | options
    return {found.decoding: found for found in check_tokens(place, config, count=count, **options)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_d14_chains_and_trees_give_the_tokens_of_plain_decoding(dtype: str) -> None:
    found = decode(emulator_place(), replace(SMALL, dtype=dtype))
    for outcome in found.values():
        assert outcome.failure == ""
        assert outcome.divergences == ()
        assert outcome.moved > 0
    assert found["chain"].difference == 0
    assert found["plain"].steps == 24
    assert 1.5 < found["chain"].accepted < found["tree"].accepted
    assert found["tree"].steps < found["chain"].steps < 20


def test_without_deterministic_a_sequence_leaves_only_where_two_logits_are_close() -> None:
    found = decode(emulator_place(), replace(SMALL, dtype="bfloat16"), deterministic=False, requests=3)
    for outcome in found.values():
        assert outcome.failure == ""
        assert outcome.widest_gap <= outcome.bound
    assert found["tree"].difference > 0


def broken(**replaced: Any) -> Place:
    return replace(emulator_place(), **replaced)


def test_h10_without_compaction_trees_are_wrong() -> None:
    def keep(layers: Any, *moves: Any) -> None:
        if moves[-1] == 1:  # of defragmentation
            emulator_place().move_rows(layers, *moves)

    found = decode(broken(move_rows=keep), SMALL, count=12)
    assert found["chain"].failure == ""
    assert "oracle" in found["tree"].failure


def test_a_tree_mask_that_is_ignored_is_noticed() -> None:
    def causal(*arrays: Any, mask: Any, **options: Any) -> Any:
        return emulator_place().verify(*arrays, mask="causal", **options)

    found = decode(broken(verify=causal), SMALL, count=12)
    assert found["chain"].failure == ""
    assert "oracle" in found["tree"].failure


def test_nan_is_noticed() -> None:
    def poisoned(*arrays: Any, **options: Any) -> Any:
        out, lse = emulator_place().verify(*arrays, **options)
        out[0, 0, 0] = np.nan
        return out, lse

    (plain, *_) = check_tokens(broken(verify=poisoned), SMALL, requests=2, count=2)
    assert np.isnan(plain.logit_error)
    assert "nan from the oracle's" in plain.failure
    assert plain.as_dict()["logit_error"] is None


def test_bits_that_depend_on_the_draft_are_noticed() -> None:
    def noisy(q: Any, *arrays: Any, max_q_len: int, **options: Any) -> Any:
        out, lse = emulator_place().verify(q, *arrays, max_q_len=max_q_len, **options)
        return (np.nextafter(out, np.float32(9)) if max_q_len == 4 else out), lse

    found = decode(broken(verify=noisy), SMALL, count=8)
    assert found["plain"].failure == ""
    assert "the bits of the logits are not" in found["chain"].failure


def test_the_oracle_knows_the_order_of_tokens() -> None:
    config = replace(SMALL, dtype="float32", max_tokens=16)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    logits = oracle_logits(config, tokens)
    assert logits.shape == (8, config.vocab)
    np.testing.assert_allclose(oracle_logits(config, tokens[:5]), logits[:5], atol=1e-12)
    assert np.abs(oracle_logits(config, tokens[[1, 0, *range(2, 8)]])[-1] - logits[-1]).max() > 1e-3
    assert 1 < logits.std() < 3


def test_weights_and_rope() -> None:
    config = replace(SMALL, max_tokens=300)
    weights = make_weights(config)
    assert weights["0.q"].shape == (config.hidden, config.heads * 576)
    assert weights["1.out"].shape == (config.heads * 512, config.hidden)
    cos, sin = rope_table(config)
    assert cos.shape == (300, 32)
    angle = np.arctan2(sin[1], cos[1])
    speeds = config.rope_theta ** (-np.arange(32) / 32)
    np.testing.assert_allclose(angle[0], speeds[0])  # the fastest keeps its speed
    np.testing.assert_allclose(angle[-1], speeds[-1] / config.yarn_factor)  # the slowest is stretched
    assert (np.diff(angle) < 0).all()


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaflash.lab.target.gpu_available", lambda: False)
    place = emulator_place()
    monkeypatch.setattr("mlaflash.lab.token_exact.settings_for", lambda kind: (place, SMALL, 2, 6, 2))
    result = CliRunner().invoke(main, ["check", "--token-exact", "--json", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["passed"]
    assert [entry["decoding"] for entry in document["results"]] == ["plain", "chain", "tree"] * 2
    assert "token-exact decoding on the emulator" in result.stderr

    monkeypatch.setattr(
        "mlaflash.lab.token_exact.settings_for", lambda kind: (broken(move_rows=lambda *_: None), SMALL, 2, 6, 9)
    )
    result = CliRunner().invoke(main, ["check", "--token-exact", "--dtype", "float32"])
    assert result.exit_code == 1
    assert "FAIL tree, float32, deterministic=True" in result.stdout


def test_the_command_refuses_options_of_kernels() -> None:
    result = CliRunner().invoke(main, ["check", "--token-exact", "--kernel", "tile", "--device", "emulator"])
    assert result.exit_code == 2
    assert "--token-exact was given with options" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_d14_twenty_sequences_on_a_gpu(dtype: str, deterministic: bool) -> None:
    place, config, requests, count, defrag_steps = settings_for("gpu")
    assert (requests, count, defrag_steps) == (20, 200, 16)
    config = replace(config, dtype=dtype)
    options = {"requests": requests, "defrag_steps": defrag_steps, "deterministic": deterministic}
    for outcome in decode(place, config, count=count, **options).values():
        assert outcome.failure == ""
        assert outcome.moved > 0
