"""SGLang's verify step of MLA models on mlaflash's kernels, as a plugin of its Triton backend.

SGLang calls `register`, an entry point of the group ``sglang.srt.plugins``, in each of its processes. Nothing has to be
said on its command line beside ``--attention-backend triton``. `mlaflash sglang-check` says whether an installed SGLang
has what this needs, and whether the results are right.

The Triton backend asks a function, ``verify_splitkv_fwd``, whether it serves a verify step, and goes on with its own
kernels where that returns False. Upstream enables that function on some GPUs of another vendor and for chains alone;
here it serves MLA on NVIDIA's, chains and trees.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

from mlaflash.errors import MlaFlashError
from mlaflash.integrations.signatures import differences, installed, load, read
from mlaflash.integrations.steps import Planned, Plans, TorchRuntime
from mlaflash.mask_source import MaskSource
from mlaflash.params import DL, D

PACKAGE: Final = "sglang"
BACKEND: Final = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"

_DTYPES = ("bfloat16", "float16")
_FP8 = "float8_e4m3fn"
# Below SGLang's own loggers, which it shows from the level info on.
_logger = logging.getLogger("sglang.mlaflash")


def register() -> None:
    """Put a hook into SGLang's Triton backend; SGLang calls this once in each process.

    What keeps mlaflash from it is logged in one line, and SGLang goes on with its own kernels.
    """
    try:
        version, root = installed(PACKAGE)
        record = load(PACKAGE, version)
    except MlaFlashError as error:
        _logger.error("mlaflash does not serve verify steps: %s", error)
        return
    for difference in differences(record, read(record, root)):
        _logger.error(
            "mlaflash does not serve verify steps: this SGLang %s is not the recorded one; %s", version, difference
        )
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}.__init__", _after_init, HookType.AFTER)


def _after_init(_result: None, backend: Any, *_args: Any, **_options: Any) -> None:
    attach(backend)


def attach(backend: Any, seam: VerifySeam | None = None) -> str:
    """Let a Triton backend ask mlaflash first about its verify steps.

    Parameters
    ----------
    backend : TritonAttnBackend
    seam : VerifySeam, optional
        By default a new one.

    Returns
    -------
    str
        Why not; empty where it will. It is logged too.
    """
    reason = _backend_refusal(backend)
    if reason:
        _logger.info("mlaflash does not serve verify steps, SGLang's Triton kernels do: %s", reason)
        return reason
    seam = VerifySeam(backend) if seam is None else seam
    backend.verify_splitkv_fwd = seam.runtime.opaque(seam.verify)
    backend.use_verify_splitkv = True
    _logger.info("mlaflash serves the verify steps of MLA layers (%s)", "chains" if backend.topk == 1 else "trees")
    return ""


def _backend_refusal(backend: Any) -> str:
    names = ("verify_splitkv_fwd", "use_verify_splitkv", "use_verify_shared_kv", "use_mla", "topk", "dcp_size")
    missing = [name for name in (*names, "enable_deterministic", "max_context_len") if not hasattr(backend, name)]
    if missing:
        return f"the backend has no {', '.join(missing)}; run mlaflash sglang-check"
    if not backend.use_mla:
        return "the model's attention is not MLA"
    if backend.use_verify_shared_kv:
        return "another kernel for verify steps is enabled"
    if backend.dcp_size != 1:
        return f"the context is shared by {backend.dcp_size} GPUs (attn_dcp_size)"
    if backend.enable_deterministic:
        return "deterministic inference is enabled, which never asks"
    if not str(backend.device).startswith("cuda"):
        return f"the device is {backend.device}"
    try:
        from mlaflash.device import Device

        Device.current()
    except MlaFlashError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class _Key:
    """What a plan is made for, and a step must agree with."""

    heads: int
    q_len: int
    dtype: str
    is_fp8: bool
    id_dtype: str
    mask: str
    sm_scale: float
    logit_cap: float
    is_split_q: bool


class VerifySeam:
    """Serves the verify steps of one backend.

    Memory is taken once for each kind of step (heads, draft tokens, types, kind of mask), for as many requests as the
    backend can ever have and its longest context. Nothing waits for the GPU, so that steps may be captured; the first
    one of a kind must come before, as SGLang's warm-up runs do.

    Parameters
    ----------
    backend : TritonAttnBackend
        Its ``forward_metadata``, ``max_context_len`` and ``topk`` are read.
    runtime : TorchRuntime, optional
        What is needed of the arrays' library.
    """

    def __init__(self, backend: Any, runtime: Any = None) -> None:
        self._backend = backend
        self.runtime = TorchRuntime() if runtime is None else runtime
        self._plans = Plans(self.runtime)
        self._told: set[str] = set()

    def verify(
        self,
        q_extend: Any,
        k_extend: Any,
        v_extend: Any,
        o_extend: Any,
        k_buffer: Any,
        v_buffer: Any,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        custom_mask: Any,
        is_causal: bool,
        mask_indptr: Any,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        skip_prefix_custom_mask: bool = True,
        sliding_window_size: int = -1,
        sinks: Any = None,
        window_kv_offsets: Any = None,
        xai_temperature_len: int = -1,
        max_bs: int | None = None,
    ) -> bool:
        """Attend the draft tokens of a step, with the arguments of SGLang's ``verify_splitkv_fwd``.

        Parameters
        ----------
        q_extend : array, shape (bs * q_len, H, 576), bfloat16 or float16
            Or the pair of widths 512 and 64.
        k_extend : array, shape (bs * q_len, 1, 576)
            Rows of the draft tokens.
        v_extend : array, shape (bs * q_len, 1, 512)
            Their latent columns again; not read.
        o_extend : array, shape (bs * q_len, H, 512)
            Filled in place.
        k_buffer : array, shape (slots, 1, 576), q's dtype or float8_e4m3fn
        v_buffer : array, shape (slots, 1, 512)
            The latent columns of `k_buffer`.
        qo_indptr : array
            Not read: every request has `max_len_extend` tokens.
        kv_indptr : array, shape (bs + 1,), int32
        kv_indices : array, int32 or int64
            Slots of the tokens before the draft.
        custom_mask : array, bool or uint8, or None
            For each request, `max_len_extend` rows of all its tokens. Not read where the backend's ``topk`` is 1: the
            draft is a chain then, and a graph that was captured with a mask may be replayed without one.
        is_causal : bool
        mask_indptr : array, shape (bs + 1,), int64
        max_len_extend : int
            Draft tokens of each request.
        k_scale, v_scale : float
            What the rows of an fp8 pool are multiplied by; both the same.
        sm_scale, logit_cap : float
        skip_prefix_custom_mask : bool
            True: the prefix is visible whatever the mask says.
        sliding_window_size, sinks, window_kv_offsets, xai_temperature_len
            Not served.
        max_bs : int, optional
            Most requests of a step, ever.

        Returns
        -------
        bool
            Whether `o_extend` holds the result; False leaves the step to SGLang.
        """
        latent, rope = q_extend if isinstance(q_extend, tuple | list) else (q_extend, None)
        batch = kv_indptr.shape[0] - 1
        mask = "none"
        if is_causal:
            mask = "causal" if custom_mask is None or self._backend.topk == 1 else "tree"
        reason = self._refusal(
            latent, rope, k_extend, v_extend, k_buffer, v_buffer, batch, max_len_extend, k_scale, v_scale, sm_scale
        )
        if not reason and (sinks is not None or sliding_window_size > 0 or xai_temperature_len > 0):
            reason = "attention sinks, a sliding window or a temperature by length"
        if not reason and (not skip_prefix_custom_mask or (not is_causal and custom_mask is not None)):
            reason = "a mask over the prefix, or one without causality"
        if reason:
            return self._leave(reason)
        key = _Key(
            heads=latent.shape[1],
            q_len=max_len_extend,
            dtype=self.runtime.dtype_name(latent),
            is_fp8=self.runtime.dtype_name(k_buffer) == _FP8,
            id_dtype=self.runtime.dtype_name(kv_indices),
            mask=mask,
            sm_scale=float(sm_scale or 0.0),
            logit_cap=float(logit_cap or 0.0),
            is_split_q=rope is not None,
        )
        try:
            planned = self._planned(key, latent, batch, max_bs)
            self._update(planned, key, k_buffer, kv_indptr, kv_indices, custom_mask, mask_indptr)
            options = {"kv_scale": k_scale} if key.is_fp8 else {}
            lse = planned.lse[: latent.shape[0]]
            planned.plan.run(q_extend, k_buffer, new_kv=k_extend[:, 0], out=o_extend, lse=lse, **options)
        except MlaFlashError as error:
            return self._leave(str(error))
        return True

    def _refusal(
        self,
        latent: Any,
        rope: Any,
        k: Any,
        v: Any,
        k_buffer: Any,
        v_buffer: Any,
        batch: int,
        q_len: Any,
        k_scale: Any,
        v_scale: Any,
        sm_scale: Any,
    ) -> str:
        """Say what of a step is not served; shapes, types and numbers of the host alone."""
        name, address = self.runtime.dtype_name, self.runtime.address
        tokens = latent.shape[0]
        widths = tuple(latent.shape[2:]), tuple(rope.shape[2:]) if rope is not None else None
        if widths not in (((D,), None), ((DL,), (D - DL,))) or v.shape[-1] != DL:
            return f"queries of shape {tuple(latent.shape)} and values of width {v.shape[-1]}; MLA has {D} and {DL}"
        if tuple(k.shape) != (tokens, 1, D) or tuple(k_buffer.shape[1:]) != (1, D):
            return f"keys of shape {tuple(k.shape)} and a pool of {tuple(k_buffer.shape)}; one head of {D} is served"
        if tuple(v_buffer.shape[1:]) != (1, DL) or address(v_buffer) != address(k_buffer):
            return "values that lie apart from the keys"
        if name(latent) not in _DTYPES or name(k) != name(latent):
            return f"queries of {name(latent)} and keys of {name(k)}; both must be {' or '.join(_DTYPES)}"
        if name(k_buffer) not in (name(latent), _FP8):
            return f"a pool of {name(k_buffer)}"
        if not isinstance(k_scale, int | float) or not isinstance(v_scale, int | float) or k_scale != v_scale:
            return f"scales {k_scale} and {v_scale}; keys and values are the same rows and have one scale"
        if k_scale != 1 and name(k_buffer) != _FP8:
            return f"a scale of {k_scale} on a pool of {name(k_buffer)}"
        if not sm_scale or not math.isfinite(sm_scale):
            return f"a softmax scale of {sm_scale}"
        if not isinstance(q_len, int) or q_len < 1 or batch < 1 or tokens != batch * q_len:
            return f"{tokens} tokens of {batch} requests with {q_len} each; all must have as many"
        return ""

    def _planned(self, key: _Key, like: Any, batch: int, max_bs: int | None) -> Planned:
        planned, is_new = self._plans.find(
            key,
            batch,
            max_bs or 0,
            like,
            num_heads=key.heads,
            max_q_len=key.q_len,
            max_kv_len=self._backend.max_context_len + key.q_len,
            sm_scale=key.sm_scale,
            q_dtype=key.dtype,
            kv_dtype="float8_e4m3" if key.is_fp8 else key.dtype,
            id_dtype=key.id_dtype,
            mask=key.mask,
            new_kv=True,
            copy_ids=False,  # SGLang's list of slots stays for the step, and in a graph for good
            logit_cap=key.logit_cap,
        )
        if is_new:
            _logger.info(
                "mlaflash: %s steps of %d draft tokens and %d heads run on %s (%.0f MB)",
                key.mask,
                key.q_len,
                key.heads,
                planned.plan.work.config.kernel,
                planned.plan.workspace_bytes / 1e6,
            )
        return planned

    def _update(
        self,
        planned: Planned,
        key: _Key,
        k_buffer: Any,
        kv_indptr: Any,
        kv_indices: Any,
        custom_mask: Any,
        mask_indptr: Any,
    ) -> None:
        """Plan the step, in the first of its layers."""
        step, layer = (self._backend.forward_metadata,), self.runtime.address(k_buffer)
        is_capturing = self.runtime.is_capturing()
        if not planned.is_new_step(step, layer, is_capturing=is_capturing):
            planned.layers.add(layer)
            return
        prefix_lens = kv_indptr[1:] - kv_indptr[:-1]
        mask = None
        if key.mask == "tree":
            mask = MaskSource.from_sglang(custom_mask, mode="full", prefix_lens=prefix_lens, mask_indptr=mask_indptr)
        planned.plan.update(
            kv_lens=prefix_lens + key.q_len, q_len=key.q_len, kv_indptr=kv_indptr, kv_indices=kv_indices, mask=mask
        )
        # Only now: an update that failed is made again.
        planned.begin(step, layer, is_capturing=is_capturing)

    def _leave(self, reason: str) -> bool:
        if reason not in self._told:
            self._told.add(reason)
            _logger.info("mlaflash leaves a verify step to SGLang's Triton kernels: %s", reason)
        return False
