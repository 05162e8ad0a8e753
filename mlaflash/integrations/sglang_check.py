"""Verify steps through the backend class of an installed SGLang, held against the oracle and SGLang's own kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from types import SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlaflash import oracle
from mlaflash.device import Device
from mlaflash.errors import MissingDependencyError, UnsupportedError
from mlaflash.integrations.sglang import attach
from mlaflash.lab.compare import Comparison, Tolerance, compare, finite_only, tolerance
from mlaflash.lab.timing import measure
from mlaflash.masks import TreeMask
from mlaflash.params import DL, D
from mlaflash.scale import yarn_sm_scale

Array = npt.NDArray[Any]

KINDS: Final = ("chain", "tree")
SHAPES: Final = tuple((batch, prefix, q) for batch in (1, 8) for prefix in (4096, 16384, 65536) for q in (8, 16))
"""Requests, tokens before the draft, draft tokens."""
HEADS: Final = 8  # of Kimi K2.x on one of eight GPUs
_ORACLE_TOKENS = 40_000  # beyond, the oracle would take minutes
_RAGGED = 37  # tokens that each request has less than the one before
FP8_SHAPES: Final = ((1, 16384, 8), (8, 4096, 16))
"""Likewise, of pools in float8_e4m3."""
_FP8_SCALE = 0.5
_LAYERS = 9  # of a step that is timed: the first, which plans it, and more that do not
_SM_SCALE = yarn_sm_scale(factor=64)

# mlaflash keeps partial results in bfloat16; SGLang's kernel has none. Apart are the two by the sum of their errors.
_OURS = tolerance("bfloat16", "bfloat16", partials=True)
_APART = Tolerance(*(a + b for a, b in zip(astuple(_OURS), astuple(tolerance("bfloat16", "bfloat16")), strict=True)))


@dataclass(frozen=True, slots=True)
class Engine:
    """What is used of SGLang.

    Attributes
    ----------
    backend : type
        ``TritonAttnBackend``.
    metadata : type
        ``ForwardMetadata``.
    decoder : object
        ``AttentionType.DECODER``.
    extend : callable
        ``extend_attention_fwd``.
    """

    backend: Any
    metadata: Any
    decoder: Any
    extend: Callable[..., Any]


def load_engine() -> Engine:
    """Import what is used of the SGLang that is installed.

    Raises
    ------
    MissingDependencyError
        It, or something that it needs, cannot be imported.
    """
    try:
        triton_backend = importlib.import_module("sglang.srt.layers.attention.triton_backend")
        extend = importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    except ImportError as error:
        raise MissingDependencyError(
            f"SGLang's Triton backend cannot be imported ({error}); install its needs."
        ) from error
    return Engine(
        triton_backend.TritonAttnBackend,
        triton_backend.ForwardMetadata,
        triton_backend.AttentionType.DECODER,
        extend.extend_attention_fwd,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One synthetic batch.

    Attributes
    ----------
    kind : {"chain", "tree"}
    pool : {"bfloat16", "float8_e4m3"}
        Element type of the pool.
    batch, prefix, q_len, heads : int
    served : bool
        Whether the backend's verify calls ran on mlaflash's kernels.
    oracle_error, sglang_error : float or None
        Largest error of an element relative to it, or to the root mean square of its row where that is larger: against
        the oracle (None where the batch is too large for it), and against SGLang's own kernel. That one rounds queries
        and weights to 8 bits where the pool has 8: what it gives is shown then, and judges nothing.
    oracle_norm, sglang_norm : float or None
        Error of the whole relative to its norm, likewise.
    wrong : str
        What is beyond its tolerance, in words; empty where nothing is. The tolerance is that of `mlaflash.lab.compare`
        for partial results of 16 bits; against SGLang's kernel, which errs too, the sum of both kernels'.
    step_us, layer_us : float or None
        What planning adds to the first layer of a step, and the backend's call in a layer, with mlaflash. Layers follow
        each other, each has a pool of its own, and none of it is in the level-2 cache before the step.
    sglang_us : float or None
        The backend's call in a layer with SGLang's kernel, in the same way.
    """

    kind: str
    pool: str
    batch: int
    prefix: int
    q_len: int
    heads: int
    served: bool
    oracle_error: float | None
    oracle_norm: float | None
    sglang_error: float
    sglang_norm: float
    wrong: str
    step_us: float | None
    layer_us: float | None
    sglang_us: float | None

    @property
    def failure(self) -> str:
        """Say what is wrong; empty where nothing is."""
        return self.wrong if self.served else "the step was left to SGLang"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; a number that is not finite is None."""
        return finite_only(asdict(self)) | {"passed": not self.failure, "failure": self.failure}


def check_engine(
    engine: Engine,
    *,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    fp8_shapes: Sequence[tuple[int, int, int]] = (),
    heads: int = HEADS,
    device: str = "cuda",
    make_seam: Callable[[Any], Any] | None = None,
    samples: int = 9,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[Outcome]:
    """Make the backend's verify call on synthetic batches.

    Parameters
    ----------
    engine : Engine
    shapes, fp8_shapes : sequence of (batch, prefix, q_len)
        With pools in bfloat16, and in float8_e4m3.
    heads : int
    device : str
        Of the tensors.
    make_seam : callable, optional
        Of the backend: gives what serves it, by default a `VerifySeam`.
    samples : int
        Of each time; 0 measures none, and lets the step have two layers.
    progress : callable
        Told what is done, how much of it, and of how much.

    Returns
    -------
    iterator of Outcome

    Raises
    ------
    MissingDependencyError
        torch is not installed.
    UnsupportedError
        `mlaflash.integrations.sglang.attach` refuses the backend.
    """
    pools = [("bfloat16", shape) for shape in shapes] + [("float8_e4m3", shape) for shape in fp8_shapes]
    cases = [(kind, pool, *shape) for pool, shape in pools for kind in KINDS]
    for done, case in enumerate(cases):
        progress("verifying through SGLang's backend", done, len(cases))
        yield _run(engine, *case, heads, device, make_seam, samples)


def _run(
    engine: Engine,
    kind: str,
    pool_dtype: str,
    batch: int,
    prefix: int,
    q_len: int,
    heads: int,
    device: str,
    make_seam: Callable[[Any], Any] | None,
    samples: int,
) -> Outcome:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(f"SGLang's tensors need torch, which cannot be imported ({error}).") from error

    rng = np.random.default_rng([batch, prefix, q_len])
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**31)))
    prefix_lens = [max(prefix - _RAGGED * b, 1) for b in range(batch)]
    tokens, total = batch * q_len, sum(prefix_lens)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)

    pool, q, k = normal(total + 65, 1, D), 0.5 * normal(tokens, heads, D), normal(tokens, 1, D)
    scale = None
    if pool_dtype == "float8_e4m3":
        scale, pool = _FP8_SCALE, (pool / _FP8_SCALE).to(torch.float8_e4m3fn)
    slots = 1 + torch.randperm(total + 64, generator=generator, device=device)[:total]
    indptr = torch.tensor(np.cumsum([0, *prefix_lens]), dtype=torch.int32, device=device)
    mask, flat, mask_indptr = _mask(kind, prefix_lens, q_len, rng)
    metadata = engine.metadata(
        attn_logits=None,
        attn_lse=None,
        max_extend_len=q_len,
        num_kv_splits=None,
        kv_indptr=indptr,
        kv_indices=slots,
        qo_indptr=torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device=device),
        custom_mask=None if flat is None else torch.from_numpy(flat).to(device),
        mask_indptr=torch.from_numpy(mask_indptr).to(device),
        window_kv_indptr=None,
        window_kv_indices=None,
        window_num_kv_splits=None,
        window_kv_offsets=None,
    )
    layers = [_layer(engine, heads, index, scale) for index in range(_LAYERS if samples else 2)]
    pools = [pool, *(pool.clone() for _ in layers[1:])]
    backend = _backend(engine, metadata, pools, batch, prefix + q_len, 1 if kind == "chain" else 4, device)
    forward_batch = _forward_batch()

    def step(count: int, *, serve: bool) -> Any:
        """Run the first layers of a model; the first is known by its pool and plans the step."""
        backend.use_verify_splitkv = serve
        for layer in layers[:count]:
            out = backend.forward_extend(q, k, k[..., :DL], layer, forward_batch, save_kv_cache=False)
        return out

    theirs = step(1, serve=False).clone()
    reason = attach(backend, None if make_seam is None else make_seam(backend))
    if reason:
        raise UnsupportedError(f"mlaflash does not serve this backend: {reason}.")
    served: list[bool] = []
    verify = backend.verify_splitkv_fwd

    def watched(*arrays: Any, **options: Any) -> bool:
        served.append(verify(*arrays, **options))
        return served[-1]

    backend.verify_splitkv_fwd = watched
    outs = [_to_numpy(step(count, serve=True)).reshape(tokens, heads, DL) for count in (1, len(layers))]
    backend.verify_splitkv_fwd = verify

    no_lse = np.zeros((tokens, heads))

    def judge(expected: Array, limits: Tolerance) -> Comparison:
        # The first layer, which plans, and the last, which does not; the worse of both.
        found = [compare(out, no_lse, expected, no_lse, limits) for out in outs]
        return min(found, key=lambda comparison: (comparison.passed, -comparison.max_rel))

    from_sglang = judge(_to_numpy(theirs).reshape(tokens, heads, DL).astype(np.float64), _APART)
    wrong = f"from SGLang's kernel: {from_sglang.reason}" if from_sglang.reason and scale is None else ""
    from_oracle = None
    if batch * prefix <= _ORACLE_TOKENS:
        expected, _ = oracle.mla_verify(
            _to_numpy(q),
            _to_numpy(pool)[:, 0],
            sm_scale=_SM_SCALE,
            kv_lens=np.array(prefix_lens, np.int32) + np.int32(q_len),
            kv_indptr=np.cumsum([0, *prefix_lens]),
            kv_indices=slots.cpu().numpy(),
            mask=mask,
            new_kv=_to_numpy(k)[:, 0],
            kv_scale=1.0 if scale is None else scale,
        )
        from_oracle = judge(expected, _OURS)
        wrong = f"from the oracle: {from_oracle.reason}" if from_oracle.reason else wrong
    step_us = layer_us = sglang_us = None
    if samples:
        gpu = Device.current()

        def time_of(count: int, *, serve: bool) -> float:
            return measure(lambda: step(count, serve=serve), gpu, samples=samples).median_us

        first = time_of(1, serve=True)
        layer_us = (time_of(len(layers), serve=True) - first) / (len(layers) - 1)
        step_us = first - layer_us
        sglang_us = time_of(1, serve=False)
    return Outcome(
        kind=kind,
        pool=pool_dtype,
        batch=batch,
        prefix=prefix,
        q_len=q_len,
        heads=heads,
        served=served == [True] * (1 + len(layers)),
        oracle_error=None if from_oracle is None else from_oracle.max_rel,
        oracle_norm=None if from_oracle is None else from_oracle.rel_norm,
        sglang_error=from_sglang.max_rel,
        sglang_norm=from_sglang.rel_norm,
        wrong=wrong,
        step_us=step_us,
        layer_us=layer_us,
        sglang_us=sglang_us,
    )


def _mask(
    kind: str, prefix_lens: Sequence[int], q_len: int, rng: np.random.Generator
) -> tuple[Any, Array | None, Array]:
    """Draw a tree for each request: as a mask, and as SGLang's FULL_MASK with where requests begin in it."""
    indptr = np.cumsum([0, *(q_len * (length + q_len) for length in prefix_lens)], dtype=np.int64)
    if kind == "chain":
        return "causal", None, indptr
    parents = np.array([[-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, q_len))] for _ in prefix_lens])
    mask = TreeMask.from_parents(parents)
    flat = [
        np.concatenate([np.ones((q_len, length), bool), tree], axis=1).reshape(-1)
        for length, tree in zip(prefix_lens, mask.to_dense(), strict=True)
    ]
    return mask, np.concatenate(flat), indptr


def _backend(
    engine: Engine, metadata: Any, pools: Sequence[Any], max_batch: int, max_context_len: int, topk: int, device: str
) -> Any:
    """Make a backend without a model: the attributes that its verify call reads."""
    backend = engine.backend.__new__(engine.backend)
    attributes = {
        "use_dense_fp8_chunked_prefill": False,
        "allow_bidirectional_attention_in_extend": False,
        "use_mla": True,
        "use_verify_shared_kv": False,
        "use_verify_splitkv": False,
        "verify_splitkv_fwd": None,
        "extend_attention_fwd": engine.extend,
        "enable_deterministic": False,
        "dcp_size": 1,
        "page_size": 1,
        "topk": topk,
        "max_context_len": max_context_len,
        "device": device,
        "forward_metadata": metadata,
        "req_to_token_pool": SimpleNamespace(size=max_batch),
        "token_to_kv_pool": SimpleNamespace(
            get_key_buffer=lambda layer_id: pools[layer_id], get_value_buffer=lambda layer_id: pools[layer_id][..., :DL]
        ),
    }
    for name, value in attributes.items():
        setattr(backend, name, value)
    return backend


def _layer(engine: Engine, heads: int, index: int = 0, scale: float | None = None) -> Any:
    import torch

    on_device = None if scale is None else torch.tensor(scale)
    return SimpleNamespace(
        layer_id=index,
        tp_q_head_num=heads,
        tp_k_head_num=1,
        qk_head_dim=D,
        v_head_dim=DL,
        scaling=_SM_SCALE,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=on_device,
        v_scale=on_device,
        k_scale_float=scale,
        v_scale_float=scale,
        is_cross_attention=False,
        attn_type=engine.decoder,
        sliding_window_size=-1,
        xai_temperature_len=-1,
    )


def _forward_batch() -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: True, is_dllm_extend=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, mha_one_shot=False, attn_attend_prefix_cache=None, extend_seq_lens_cpu=None
    )


def _to_numpy(tensor: Any) -> Array:
    import torch

    is_fp8 = tensor.dtype == torch.float8_e4m3fn
    bits: Array = tensor.contiguous().view(torch.uint8 if is_fp8 else torch.int16).cpu().numpy()
    return bits.view(ml_dtypes.float8_e4m3fn if is_fp8 else ml_dtypes.bfloat16)
