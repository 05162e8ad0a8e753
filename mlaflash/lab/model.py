"""A small MLA transformer of random weights that never change, to decode with: on NumPy and on CuPy arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash import oracle
from mlaflash.params import DL, DR, D, numpy_dtype
from mlaflash.scale import yarn_sm_scale

Array = npt.NDArray[Any]
Attend = Callable[[int, Any, Any], Any]

_NOPE = 128  # columns of a head's key without rope, before absorption; of its value, too
_EPS = 1e-6
_FAVOUR = 16.0  # what a favourite's logit has on top, times the share that the token has in the last state


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model.

    Attributes
    ----------
    layers, heads, hidden, vocab : int
    max_tokens : int
        The longest context.
    rope_theta, yarn_factor : float
    original_tokens : int
        Context that the rope was made for, before YaRN stretched it by `yarn_factor`.
    dtype : str
        Element type of queries and cache; everything else is float32.
    seed : int
        Of the weights.
    """

    layers: int = 2
    heads: int = 8
    hidden: int = 128
    vocab: int = 128
    max_tokens: int = 512
    rope_theta: float = 5e4
    yarn_factor: float = 64.0
    original_tokens: int = 64
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def sm_scale(self) -> float:
        """Softmax scale, with YaRN's temperature."""
        return yarn_sm_scale(_NOPE, DR, factor=self.yarn_factor)


class Model:
    """Weights, and the way from tokens to logits; the attention is the caller's.

    A row of a product has the same bits wherever it stands among the others, as long as their number stays: give as
    many rows every time.

    Parameters
    ----------
    config : ModelConfig
    xp : module
        ``numpy`` or ``cupy``.
    work : dtype
        Of weights and activations: float32, or float64 for the oracle.
    """

    def __init__(self, config: ModelConfig, xp: Any, work: Any = np.float32) -> None:
        self.config = config
        self._xp = xp
        self._weights = {name: xp.asarray(weight.astype(work)) for name, weight in make_weights(config).items()}
        cos, sin = rope_table(config)
        self._cos, self._sin = xp.asarray(cos.astype(work)), xp.asarray(sin.astype(work))

    def logits(self, tokens: Any, positions: Any, attend: Attend) -> Any:
        """Compute the logits behind each token.

        Parameters
        ----------
        tokens, positions : array, shape (T,), integers
        attend : callable
            Of the layer, its queries (T, H, 576) and its new cache rows (T, 576), in the model's dtype: gives the
            attention's output, (T, H, 512).

        Returns
        -------
        array, shape (T, vocab)
        """
        config, weights = self.config, self._weights
        state = weights["embedding"][tokens]
        for layer in range(config.layers):
            own = {name.partition(".")[2]: w for name, w in weights.items() if name.startswith(f"{layer}.")}
            normed = self._norm(state)
            q = self._project(normed, own["q"]).reshape(-1, config.heads, D)
            rows = self._project(normed, own["kv"])
            q = self._join(q[..., :DL], q[..., DL:], positions[:, None])
            rows = self._join(self._norm(rows[:, :DL]), rows[:, DL:], positions)
            out = attend(layer, q, rows).astype(state.dtype).reshape(len(tokens), -1)
            state = state + self._project(out, own["out"])
            hidden = self._xp.maximum(self._project(self._norm(state), own["up"]), 0)
            state = state + self._project(hidden, own["down"])
        return self._project(self._norm(state), weights["head"])

    def _join(self, latent: Any, rope: Any, positions: Any) -> Any:
        """Turn the rope columns, set them behind the latent ones, and round both to the model's dtype."""
        cos, sin = self._cos[positions], self._sin[positions]
        left, right = rope[..., : DR // 2], rope[..., DR // 2 :]
        parts = [latent, left * cos - right * sin, right * cos + left * sin]
        return self._xp.concatenate(parts, axis=-1).astype(numpy_dtype(self.config.dtype))

    def _norm(self, x: Any) -> Any:
        return x / self._xp.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)

    def _project(self, x: Any, weight: Any) -> Any:
        if self._xp is np and x.dtype == np.float32:
            # One row at a time: a BLAS may add the last rows of a block in another order. The oracle has no such needs.
            return np.matmul(x[:, None], weight)[:, 0]
        return x @ weight


def oracle_logits(config: ModelConfig, tokens: Array) -> Array:
    """Compute the logits of a sequence in float64, but for queries and cache, which have the model's dtype.

    Parameters
    ----------
    config : ModelConfig
    tokens : numpy.ndarray, shape (T,)

    Returns
    -------
    numpy.ndarray, shape (T, vocab), float64
    """
    count = len(tokens)

    def attend(_layer: int, q: Any, rows: Any) -> Any:
        out, _ = oracle.mla_verify(
            q, rows[None], sm_scale=config.sm_scale, kv_lens=np.array([count], np.int32), mask="causal"
        )
        return out

    return np.asarray(Model(config, np, np.float64).logits(tokens, np.arange(count), attend))


@functools.lru_cache(maxsize=2)
def make_weights(config: ModelConfig) -> Mapping[str, Array]:
    """Draw the weights, and absorb those that lead into and out of the latent space.

    Parameters
    ----------
    config : ModelConfig

    Returns
    -------
    mapping of str to numpy.ndarray
        ``embedding`` (vocab, hidden), ``head`` (hidden, vocab), and of each layer ``q`` (hidden, H * 576), ``kv``
        (hidden, 576), ``out`` (H * 512, hidden), ``up`` and ``down``.
    """
    rng = np.random.default_rng(config.seed)
    heads, hidden = config.heads, config.hidden

    def draw(*shape: int, inputs: int, size: float = 1.0) -> Array:
        return rng.standard_normal(shape) * (size / math.sqrt(inputs))

    embedding = draw(config.vocab, hidden, inputs=1)
    # Each token has a favourite behind it, as words do: most choices are clear, and attention decides the others. Were
    # all logits alike, one in a thousand choices would hang on the rounding of bfloat16.
    favourite = embedding[rng.permutation(config.vocab)].T * (_FAVOUR / hidden)
    weights = {"embedding": embedding, "head": draw(hidden, config.vocab, inputs=hidden) + favourite}
    for layer in range(config.layers):
        # Scores of a few units: attention that is neither flat nor a choice of one token.
        nope = draw(hidden, heads, _NOPE, inputs=hidden)
        key = draw(heads, _NOPE, DL, inputs=_NOPE, size=0.5)
        rope = draw(hidden, heads, DR, inputs=hidden)
        value = draw(heads, DL, _NOPE, inputs=DL)
        out = draw(heads, _NOPE, hidden, inputs=heads * _NOPE, size=2.0)
        absorbed_q = np.concatenate([np.einsum("dhn,hnl->dhl", nope, key, optimize=True), rope], axis=-1)
        weights |= {
            f"{layer}.q": absorbed_q.reshape(hidden, heads * D),
            f"{layer}.kv": draw(hidden, D, inputs=hidden),
            f"{layer}.out": np.einsum("hln,hnd->hld", value, out, optimize=True).reshape(heads * DL, hidden),
            f"{layer}.up": draw(hidden, 2 * hidden, inputs=hidden),
            f"{layer}.down": draw(2 * hidden, hidden, inputs=2 * hidden),
        }
    return weights


def rope_table(config: ModelConfig) -> tuple[Array, Array]:
    """Compute cosines and sines of the rope with YaRN: slow dimensions are stretched, fast ones are not.

    Parameters
    ----------
    config : ModelConfig

    Returns
    -------
    cos, sin : numpy.ndarray, shape (max_tokens, 32), float64

    Notes
    -----
    YaRN, arXiv:2309.00071, section 3.2, with beta of 32 and 1 turns in the original context.
    """
    pair = np.arange(DR // 2)
    speed = config.rope_theta ** (-2 * pair / DR)
    slow, fast = (
        DR * math.log(config.original_tokens / (2 * math.pi * turns)) / (2 * math.log(config.rope_theta))
        for turns in (1, 32)
    )
    begin = max(math.floor(fast), 0)
    stretched = np.clip((pair - begin) / max(math.ceil(slow) - begin, 1), 0, 1)
    speed = speed * (1 - stretched) + speed / config.yarn_factor * stretched
    angle = np.arange(config.max_tokens)[:, None] * speed
    return np.cos(angle), np.sin(angle)
