"""Problems with caches of 8 bits, shared by the tests on the emulator and on a GPU."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from verify_cases import SCALE

from mlaflash import oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case
from mlaflash.mma_tiles import NARROW_32_E4M3, NARROW_E4M3, ROLES_32_E4M3, ROLES_E4M3
from mlaflash.params import FP8_CODES
from mlaflash.schedule import FP8_KERNELS

E4M3 = ml_dtypes.float8_e4m3fn

BASE = Case(
    name="fp8",
    q_lens=(3, 5),
    kv_lens=(37, 70),
    heads=8,
    sm_scale=SCALE,
    page_size=16,
    mask="tree",
    kv_dtype="float8_e4m3",
)
FORMATS = tuple(FP8_CODES)
NAMED = [(kv_dtype, kernel) for kv_dtype, kernels in FP8_KERNELS.items() for kernel in kernels]
"""Each format with each kernel that reads it."""

ROLES_32 = "mma_roles of 32 rows"
READERS = [*NAMED, ("float8_e4m3", ROLES_32)]
E4M3_CONFIGS = (NARROW_E4M3, NARROW_32_E4M3, ROLES_32_E4M3, ROLES_E4M3)
E4M3_READERS = [reader for kv_dtype, reader in READERS if kv_dtype == "float8_e4m3"]

CASES = [
    replace(BASE, name="causal", mask="causal"),
    replace(BASE, name="none", mask="none"),
    replace(BASE, name="dense-mask", mask="dense", q_lens=(7, 12), kv_lens=(30, 50)),
    replace(BASE, name="page-1", page_size=1, id_dtype="int64"),
    replace(BASE, name="page-3", page_size=3, addressing="block_table"),
    replace(BASE, name="page-64", page_size=64, addressing="block_table", id_dtype="int64"),
    replace(BASE, name="dense-cache", addressing="dense"),
    replace(BASE, name="q-longer-than-kv", q_lens=(9, 4), kv_lens=(4, 4)),
    replace(BASE, name="empty-requests", q_lens=(2, 3, 0, 2), kv_lens=(20, 0, 9, 17)),
    replace(BASE, name="new-kv", new_kv=True),
    replace(BASE, name="new-kv-float16", new_kv=True, dtype="float16", q_lens=(1, 9), kv_lens=(1, 50)),
    replace(BASE, name="float16-soft-cap", dtype="float16", logit_cap=2.5),
    replace(BASE, name="zero-scale", sm_scale=0.0),
    replace(BASE, name="negative-scale", sm_scale=-SCALE),
    replace(BASE, name="pairs", paired=True),
]
JUDGED = [
    (kv_dtype, kernel, replace(case, kv_dtype=kv_dtype))
    for kv_dtype, kernel in READERS
    for case in CASES
    if not (kernel != "mma_narrow" and case.new_kv)
]
"""Each of them with each case that it takes."""


def asked(reader: str | None) -> dict[str, Any]:
    """Give the arguments that ask for one of them."""
    if reader == ROLES_32:
        return {"tiles": ROLES_32_E4M3}
    return {} if reader is None else {"kernel": reader}


def judge(result: tuple[Any, Any], arguments: dict[str, Any], case: Case) -> None:
    """Hold a result against the oracle's: of float32, as closely as float16 weights allow whatever q is."""
    call = oracle.mla_sparse if "indices" in arguments else oracle.mla_verify
    expected = call(**{name: value for name, value in arguments.items() if name != "out_dtype"})
    out_dtype = result[0].dtype.name
    limits = tolerance("float16" if out_dtype == "float32" else case.dtype, out_dtype, partials=True)
    found = compare(*result, *expected, limits)
    assert found.passed, f"{case.name}: {found.reason}; {found.worst_index} {found.worst_actual} {found.worst_expected}"


def numbers(cache: np.ndarray[Any, Any], kv_dtype: str, scale: float) -> np.ndarray[Any, Any]:
    """Read rows by the types of another library."""
    if kv_dtype == "float8_e4m3":
        return cache.view(E4M3).astype(np.float64) * scale
    scales = np.ascontiguousarray(cache[..., 512:528]).view(np.float32).astype(np.float64)
    latent = cache[..., :512].view(E4M3).astype(np.float64) * np.repeat(scales, 128, axis=-1)
    rope = np.ascontiguousarray(cache[..., 528:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([latent, rope], axis=-1)
