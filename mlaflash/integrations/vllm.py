"""vLLM's decode and verify steps of MLA models on mlaflash's kernels, as a plugin.

vLLM calls `register`, an entry point of the group ``vllm.general_plugins``, in each of its processes. It puts a class
of mlaflash's in the place of the backend ``TRITON_MLA``, which vLLM takes by itself where no faster one is there; what
that class does not serve it leaves to vLLM's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from mlaflash.errors import MlaFlashError
from mlaflash.integrations.signatures import differences, installed, load, read
from mlaflash.integrations.steps import Plans, TorchRuntime
from mlaflash.params import DL, DS_MLA_BYTES, D

PACKAGE: Final = "vllm"
BACKEND: Final = "mlaflash.integrations.vllm_backend.MlaFlashBackend"

_DTYPES = ("bfloat16", "float16")
_FP8 = "float8_e4m3fn"
# Below vLLM's own logger, which it shows from the level info on.
_logger = logging.getLogger("vllm.mlaflash")


def register() -> None:
    """Put mlaflash's backend in the place of ``TRITON_MLA``; vLLM calls this in each process, maybe more than once.

    What keeps mlaflash from it is logged in one line, and vLLM goes on with its own kernels.
    """
    try:
        version, root = installed(PACKAGE)
        record = load(PACKAGE, version)
    except MlaFlashError as error:
        _logger.error("mlaflash does not serve MLA: %s", error)
        return
    for difference in differences(record, read(record, root)):
        _logger.error("mlaflash does not serve MLA: this vLLM %s is not the recorded one; %s", version, difference)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TRITON_MLA, BACKEND)
    _logger.info("mlaflash serves decode and verify steps of the backend TRITON_MLA")


@dataclass(frozen=True, slots=True)
class _Key:
    """What a plan is made for, and a step must agree with."""

    heads: int
    q_len: int
    block_size: int
    dtype: str
    kv_dtype: str
    mask: str
    sm_scale: float


class StepServer:
    """Serves the steps of all MLA layers of a process; they share its plans.

    Parameters
    ----------
    runtime : TorchRuntime, optional
        What is needed of the arrays' library.
    """

    def __init__(self, runtime: Any = None) -> None:
        self.runtime = TorchRuntime() if runtime is None else runtime
        self._plans = Plans(self.runtime)
        self._told: set[str] = set()

    def forward(
        self,
        q: Any,
        kv_cache: Any,
        metadata: Any,
        *,
        context: Any,
        sm_scale: float,
        kv_scale: Any,
        dcp_world_size: int,
        max_batch: int,
        max_kv_len: int,
    ) -> tuple[Any, Any] | None:
        """Attend the query tokens of a step.

        Parameters
        ----------
        q : array, shape (T, H, 576), or pair of widths 512 and 64, bfloat16 or float16
            As many query tokens for each request.
        kv_cache : array, shape (blocks, block_size, 576), q's dtype or float8_e4m3fn
            Or of 656 bytes, uint8: ``fp8_ds_mla``.
        metadata : MLACommonMetadata
            ``causal``, ``decode.block_table`` and ``decode.seq_lens``, which counts the new tokens.
        context : object
            Of the forward pass: drafters change the lengths in place and keep the metadata.
        sm_scale : float
        kv_scale : array of one float32
            What the rows of a float8_e4m3fn cache are multiplied by.
        dcp_world_size : int
            GPUs that share the context of a request.
        max_batch, max_kv_len : int
            Most requests of a step, and tokens of a request, ever.

        Returns
        -------
        out : array, shape (T, H, 512)
        lse : array, shape (T, H), float32
            Natural logarithm. Or None, where the step is left to vLLM.
        """
        decode = metadata.decode
        latent, is_split = (q[0], True) if isinstance(q, tuple) else (q, False)
        name = self.runtime.dtype_name
        batch, tokens = decode.seq_lens.shape[0], latent.shape[0]
        q_len = tokens // batch if batch else 0
        kv_dtype = {_FP8: "float8_e4m3", "uint8": "fp8_ds_mla"}.get(name(kv_cache), name(kv_cache))
        width = DS_MLA_BYTES if kv_dtype == "fp8_ds_mla" else D
        if tokens == 0 or tokens != batch * q_len:
            return self._leave(f"{tokens} query tokens of {batch} requests; all must have as many")
        widths = ((DL,) if is_split else (D,)), (width,)
        if (tuple(latent.shape[2:]), tuple(kv_cache.shape[2:])) != widths:
            return self._leave(
                f"queries {tuple(latent.shape)} and a cache {tuple(kv_cache.shape)}; rows of {width} are served"
            )
        if name(latent) not in _DTYPES or kv_dtype not in (name(latent), "float8_e4m3", "fp8_ds_mla"):
            return self._leave(f"queries of {name(latent)} and a cache of {name(kv_cache)}")
        if metadata.causal and q_len > 1 and dcp_world_size > 1:
            return self._leave("a causal step of several tokens over a context that GPUs share")
        key = _Key(
            heads=latent.shape[1],
            q_len=q_len,
            block_size=kv_cache.shape[1],
            dtype=name(latent),
            kv_dtype=kv_dtype,
            mask="causal" if metadata.causal and q_len > 1 else "none",
            sm_scale=float(sm_scale),
        )
        try:
            planned, is_new = self._plans.find(
                key,
                batch,
                max_batch,
                latent,
                num_heads=key.heads,
                max_q_len=q_len,
                max_kv_len=max_kv_len,
                sm_scale=key.sm_scale,
                page_size=key.block_size,
                q_dtype=key.dtype,
                kv_dtype=kv_dtype,
                mask=key.mask,
                block_table=True,
                copy_ids=False,  # vLLM's table stays for the step, and in a graph for good
            )
            step, layer = (context, metadata), self.runtime.address(kv_cache)
            is_capturing = self.runtime.is_capturing()
            if planned.is_new_step(step, layer, is_capturing=is_capturing):
                planned.plan.update(kv_lens=decode.seq_lens, q_len=q_len, block_table=decode.block_table)
                planned.begin(step, layer, is_capturing=is_capturing)
            planned.layers.add(layer)
            out = self.runtime.empty_out(latent, (tokens, key.heads, DL))
            # An array of its own: who merges parts may keep it longer than the step.
            lse = self.runtime.empty_lse(latent, (tokens, key.heads))
            options = {"kv_scale": kv_scale} if kv_dtype == "float8_e4m3" else {}
            planned.plan.run(q, kv_cache, out=out, lse=lse, **options)
        except MlaFlashError as error:
            return self._leave(str(error))
        if is_new:
            kernel, size = planned.plan.work.config.kernel, planned.plan.workspace_bytes / 1e6
            _logger.info(
                "mlaflash: steps of %d tokens and %d heads run on %s (%.0f MB)", q_len, key.heads, kernel, size
            )
        return out, lse

    def _leave(self, reason: str) -> tuple[Any, Any] | None:
        """Say once why a step is not served."""
        if reason not in self._told:
            self._told.add(reason)
            _logger.info("mlaflash leaves a step to vLLM's Triton kernels: %s", reason)
        return None
