"""The classes that `mlaflash.integrations.vllm` gives to vLLM; imports vLLM."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import vllm.envs as envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

from mlaflash.errors import UnsupportedError
from mlaflash.integrations.vllm import StepServer


@functools.cache
def server() -> StepServer:
    """Return what serves all layers of this process."""
    return StepServer()


class MlaFlashImpl(TritonMLAImpl):  # type: ignore[misc]
    """vLLM's Triton MLA, whose decode and verify steps mlaflash serves; prefill is as it was.

    The log-sum-exp is float32, which merges of parts of a context need.
    """

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> tuple[Any, Any]:
        """Attend the query tokens of a step.

        Parameters
        ----------
        q : torch.Tensor, shape (T, H, 576), or pair of widths 512 and 64
        kv_c_and_k_pe_cache : torch.Tensor, shape (blocks, block_size, 576), or 656 bytes of ``fp8_ds_mla``
        attn_metadata : MLACommonMetadata
        layer : AttentionLayer
            Its ``_k_scale`` belongs to an fp8 cache.

        Returns
        -------
        out : torch.Tensor, shape (T, H, 512)
        lse : torch.Tensor, shape (T, H), natural logarithm

        Raises
        ------
        UnsupportedError
            The cache is ``fp8_ds_mla``, which vLLM's kernel does not read, and the step is not served.
        """
        found = None
        if not envs.VLLM_BATCH_INVARIANT:
            config = self._vllm_config
            found = server().forward(
                q,
                kv_c_and_k_pe_cache,
                attn_metadata,
                context=get_forward_context() if is_forward_context_available() else None,
                sm_scale=self.scale,
                kv_scale=layer._k_scale,
                dcp_world_size=self.dcp_world_size,
                max_batch=config.scheduler_config.max_num_seqs,
                max_kv_len=config.model_config.max_model_len,
            )
        if found is not None:
            return found
        if self.kv_cache_dtype == "fp8_ds_mla":
            raise UnsupportedError(
                "mlaflash does not serve this step (the log says why), and vLLM's Triton kernel reads no cache of "
                "fp8_ds_mla. Take --kv-cache-dtype fp8."
            )
        out, lse = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        return out, lse


class MlaFlashBackend(TritonMLABackend):  # type: ignore[misc]
    """vLLM's backend ``TRITON_MLA`` with another implementation, and the same name, which vLLM asks for."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*TritonMLABackend.supported_kv_cache_dtypes, "fp8_ds_mla"]

    @staticmethod
    def get_impl_cls() -> type[MlaFlashImpl]:
        """Return the implementation."""
        return MlaFlashImpl
