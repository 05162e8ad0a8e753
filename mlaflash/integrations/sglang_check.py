"""Verify steps through the backend class of an installed SGLang, held against the oracle and SGLang's own kernel."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlaflash import oracle
from mlaflash.device import Device
from mlaflash.errors import MissingDependencyError, UnsupportedError
from mlaflash.integrations.sglang import attach
from mlaflash.lab.compare import compare, finite_only, tolerance
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
_SM_SCALE = yarn_sm_scale(factor=64)


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
    batch, prefix, q_len, heads : int
    served : bool
        Whether the backend's verify call ran on mlaflash's kernels.
    oracle_error, sglang_error : float or None
        Largest error of an element relative to it, or to the root mean square of its row where that is larger: against
        the oracle (None where the batch is too large for it), and against SGLang's own kernel.
    tolerance : float
        What the first is held against; the second against twice that, for both sides err.
    mlaflash_us, sglang_us : float or None
        Time of the backend's call with either, from a cold level-2 cache. Each call of mlaflash plans its step anew,
        which one layer of a model does.
    """

    kind: str
    batch: int
    prefix: int
    q_len: int
    heads: int
    served: bool
    oracle_error: float | None
    sglang_error: float
    tolerance: float
    mlaflash_us: float | None
    sglang_us: float | None

    @property
    def failure(self) -> str:
        """Say what is wrong; empty where nothing is."""
        if not self.served:
            return "the step was left to SGLang"
        if self.oracle_error is not None and not self.oracle_error <= self.tolerance:
            return f"{self.oracle_error:.2e} from the oracle, more than {self.tolerance:.2e}"
        if not self.sglang_error <= 2 * self.tolerance:
            return f"{self.sglang_error:.2e} from SGLang's kernel, more than {2 * self.tolerance:.2e}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; a number that is not finite is None."""
        return finite_only(asdict(self)) | {"passed": not self.failure, "failure": self.failure}


def check_engine(
    engine: Engine,
    *,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
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
    shapes : sequence of (batch, prefix, q_len)
    heads : int
    device : str
        Of the tensors.
    make_seam : callable, optional
        Of the backend: gives what serves it, by default a `VerifySeam`.
    samples : int
        Of each time; 0 measures none.
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
    cases = [(kind, *shape) for shape in shapes for kind in KINDS]
    for done, (kind, batch, prefix, q_len) in enumerate(cases):
        progress("verifying through SGLang's backend", done, len(cases))
        yield _run(engine, kind, batch, prefix, q_len, heads, device, make_seam, samples)


def _run(
    engine: Engine,
    kind: str,
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
    backend = _backend(engine, metadata, pool, batch, prefix + q_len, 1 if kind == "chain" else 4, device)
    layer, forward_batch = _layer(engine, heads), _forward_batch()

    def call(*, serve: bool) -> Any:
        backend.use_verify_splitkv = serve
        return backend.forward_extend(q, k, k[..., :DL], layer, forward_batch, save_kv_cache=False)

    theirs = call(serve=False).clone()
    reason = attach(backend, None if make_seam is None else make_seam(backend))
    if reason:
        raise UnsupportedError(f"mlaflash does not serve this backend: {reason}.")
    served: list[bool] = []
    verify = backend.verify_splitkv_fwd

    def watched(*arrays: Any, **options: Any) -> bool:
        served.append(verify(*arrays, **options))
        return served[-1]

    backend.verify_splitkv_fwd = watched
    ours = call(serve=True)
    backend.verify_splitkv_fwd = verify

    limits = tolerance("bfloat16", "bfloat16")
    out, other = (_to_numpy(tensor).reshape(tokens, heads, DL) for tensor in (ours, theirs))
    no_lse = np.zeros((tokens, heads))
    oracle_error = None
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
        )
        oracle_error = compare(out, no_lse, expected, no_lse, limits).max_rel
    times: list[float | None] = [None, None]
    if samples:
        gpu = Device.current()
        times = [
            measure(functools.partial(call, serve=serve), gpu, samples=samples).median_us for serve in (True, False)
        ]
    return Outcome(
        kind=kind,
        batch=batch,
        prefix=prefix,
        q_len=q_len,
        heads=heads,
        served=served == [True],
        oracle_error=oracle_error,
        sglang_error=compare(out, no_lse, other.astype(np.float64), no_lse, limits).max_rel,
        tolerance=limits.rel,
        mlaflash_us=times[0],
        sglang_us=times[1],
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
    engine: Engine, metadata: Any, pool: Any, max_batch: int, max_context_len: int, topk: int, device: str
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
            get_key_buffer=lambda layer_id: pool, get_value_buffer=lambda layer_id: pool[..., :DL]
        ),
    }
    for name, value in attributes.items():
        setattr(backend, name, value)
    return backend


def _layer(engine: Engine, heads: int) -> Any:
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=1,
        qk_head_dim=D,
        v_head_dim=DL,
        scaling=_SM_SCALE,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=None,
        v_scale=None,
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

    bits: Array = tensor.contiguous().view(torch.int16).cpu().numpy()
    return bits.view(ml_dtypes.bfloat16)
