"""What a serving engine knows of its verify steps beforehand, and the kernels that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlaflash import combine, cost, mask_pack, schedule, tuned
from mlaflash.checks import integer
from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.mask_formats import words_per_row
from mlaflash.masks import TreeMask
from mlaflash.params import DL, DR, FP8_CODES, MASK_CODES, D, numpy_dtype, row_bytes
from mlaflash.plan import Capacity, check_capacity, choose_work, plan_launch, run_launches
from mlaflash.problem import Problem, element_type, kv_element_type
from mlaflash.schedule import Launch
from mlaflash.tiles import TileConfig

_ANY_SCALE = 1.0  # no kernel is compiled for it, and no choice depends on it
_ANY_CAP = 30.0
_LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Unmade:
    """A contiguous array without memory: what chooses kernels looks at no element."""

    shape: tuple[int, ...]
    dtype: str

    def view(self, name: str) -> ArrayView:
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return ArrayView(name, 0, self.shape, strides, self.dtype, numpy_dtype(self.dtype).itemsize, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyShape:
    """Verify steps as an engine knows them beforehand: the largest of them, and what all have in common.

    Parameters
    ----------
    num_heads : int
        Query heads, H.
    q_len : int
        Most query tokens of a request.
    kv_len : int
        Most tokens of a request, its new ones included.
    batch : int
        Most requests of a step.
    page_size : int
        Tokens of a page.
    dtype : {"bfloat16", "float16", "float32"}
        Of q, and of the cache where `kv_dtype` is left out.
    kv_dtype : {"float8_e4m3", "fp8_ds_mla"}, optional
        What a cache of 8 bits holds; by default `dtype`.
    out_dtype : {"bfloat16", "float16", "float32"}, optional
        By default `dtype`.
    mask : {"causal", "none", "tree"}
    new_kv : bool
        Whether the new tokens come apart from the cache.
    split_kv : bool
        Whether the rope columns of a cache row lie elsewhere than right behind its latent ones.
    soft_cap : bool
        Whether there is a `logit_cap`.

    Raises
    ------
    InvalidArgumentError
        A value that is not allowed.
    UnsupportedError
        An element type that no kernel takes.
    """

    num_heads: int
    q_len: int
    kv_len: int
    batch: int = 1
    page_size: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    mask: str = "causal"
    new_kv: bool = False
    split_kv: bool = False
    soft_cap: bool = False

    def __post_init__(self) -> None:
        """Check each value; element types become names."""
        for name in ("num_heads", "q_len", "kv_len", "batch", "page_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.kv_len > _LONGEST:
            raise InvalidArgumentError(f"kv_len is {self.kv_len}; kernels count tokens in int32, up to {_LONGEST}.")
        object.__setattr__(self, "dtype", element_type("dtype", self.dtype))
        if self.kv_dtype is not None:
            name = kv_element_type("kv_dtype", self.kv_dtype)
            if name != self.dtype and (name not in FP8_CODES or self.dtype == "float32"):
                raise UnsupportedError(
                    f"kv_dtype is {name!r} and dtype {self.dtype!r}; allowed are dtype itself and, where that has 16 "
                    f"bits, {', '.join(FP8_CODES)}."
                )
            object.__setattr__(self, "kv_dtype", None if name == self.dtype else name)
        if self.kv_dtype == "fp8_ds_mla" and self.split_kv:
            raise UnsupportedError("split_kv is set and kv_dtype 'fp8_ds_mla', whose rows are one array. Leave it out.")
        if self.out_dtype is not None:
            object.__setattr__(self, "out_dtype", element_type("out_dtype", self.out_dtype))
        if self.mask not in MASK_CODES:
            raise InvalidArgumentError(f"mask is {self.mask!r}; allowed are {', '.join(map(repr, MASK_CODES))}.")

    @property
    def rows(self) -> int:
        """Most packed rows of a request."""
        return self.q_len * self.num_heads

    @property
    def stored(self) -> str:
        """What the cache holds: `kv_dtype`, or `dtype`."""
        return self.kv_dtype or self.dtype

    @property
    def logit_cap(self) -> float:
        """Some soft cap where there is one."""
        return _ANY_CAP if self.soft_cap else 0.0

    def capacity(self) -> Capacity:
        """Return what a `VerifyPlan` for these steps is made for.

        Raises
        ------
        UnsupportedError
            A plan does not do this.
        """
        return check_capacity(
            num_heads=self.num_heads,
            max_batch=self.batch,
            max_q_len=self.q_len,
            max_kv_len=self.kv_len,
            sm_scale=_ANY_SCALE,
            page_size=self.page_size,
            q_dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            out_dtype=self.out_dtype,
            mask=self.mask,
            new_kv=self.new_kv,
            split_kv=self.split_kv,
            logit_cap=self.logit_cap,
        )

    def problem(self) -> Problem:
        """Return the largest step as a verify call with a block table; its arrays have no memory."""
        tokens, pages = self.batch * self.q_len, -(-self.kv_len // self.page_size)
        cache = (self.batch * pages, self.page_size)
        element = self.dtype if self.kv_dtype is None else "uint8"
        width = row_bytes(self.stored) // numpy_dtype(element).itemsize
        kv_cache: Any = _Unmade((*cache, width), element)
        if self.split_kv:
            kv_cache = tuple(_Unmade((*cache, columns), element) for columns in (DL, DR))
        mask: Any = self.mask
        if self.mask == "tree":
            mask = TreeMask(np.zeros((tokens, words_per_row(self.q_len)), np.uint32), self.q_len)
        return Problem.from_arrays(
            lambda name, array: array.view(name) if isinstance(array, _Unmade) else numpy_view(name, array),
            _Unmade((self.batch, self.q_len, self.num_heads, D), self.dtype),
            kv_cache,
            sm_scale=_ANY_SCALE,
            kv_lens=_Unmade((self.batch,), "int32"),
            block_table=_Unmade((self.batch, pages), "int32"),
            mask=mask,
            new_kv=_Unmade((tokens, D), self.dtype) if self.new_kv else None,
            kv_dtype=self.kv_dtype,
            logit_cap=self.logit_cap,
            out_dtype=self.out_dtype,
            max_kv_len=self.kv_len,
        )

    def check_lens(self, kv_lens: Sequence[int] | None) -> tuple[int, ...]:
        """Check the lengths of one step.

        Parameters
        ----------
        kv_lens : sequence of int or None
            Tokens of each request; None is the largest step.

        Raises
        ------
        InvalidArgumentError
            There are more requests, or a request is longer, than the largest step allows.
        """
        if kv_lens is None:
            return (self.kv_len,) * self.batch
        lens = tuple(integer("kv_lens", length, 0) for length in kv_lens)
        if len(lens) > self.batch or max(lens, default=0) > self.kv_len:
            raise InvalidArgumentError(
                f"kv_lens are {len(lens)} of at most {max(lens, default=0)} tokens; the shape has a batch of "
                f"{self.batch} and a kv_len of {self.kv_len}. Make it larger."
            )
        return lens


def plan_launches(shape: VerifyShape, device: Device) -> tuple[Launch, ...]:
    """Return the launches of a `VerifyPlan`, masks apart, in order.

    Parameters
    ----------
    shape : VerifyShape
    device : Device
        Its limits count; a budget's too.

    Raises
    ------
    UnsupportedError
        A plan does not do this.
    """
    capacity = shape.capacity()
    work = choose_work(capacity, device)
    return plan_launch(work), *run_launches(capacity, work)


def call_launches(shape: VerifyShape, device: Device) -> tuple[Launch, ...]:
    """Return a launch of each kernel that `mla_verify` chooses for some step of a shape, or for a smaller one.

    Parameters
    ----------
    shape : VerifyShape
    device : Device
        Its limits count; a budget's too.

    Raises
    ------
    UnsupportedError
        No kernel does this on the device.
    """
    chosen = schedule.plan(shape.problem(), device).config
    configs: list[Any] = [chosen] if isinstance(chosen, TileConfig) else []
    if shape.dtype != "float32":
        configs += [c.config for c in cost.fitting_classes(device, kv_dtype=shape.stored, has_new_kv=shape.new_kv)]
        if shape.stored == shape.dtype:
            configs += tuned.configs(device)
    # Splits of few rows and of many are merged in other ways; no way is for numbers of rows between alone.
    least = replace(shape, batch=1, q_len=1).problem()
    problems = [least, replace(least, num_tokens=shape.problem().num_tokens)]
    return _distinct(
        launch
        for config in configs
        for problem in problems
        for splits in (1, *combine.merge_splits(problem.rows))
        for launch in schedule.plan(problem, device, tiles=replace(config, nsplit=splits)).launches
    )


def mask_launches(shape: VerifyShape) -> tuple[Launch, ...]:
    """Return a launch of each kernel that packs tree masks: an engine may have them in any format.

    Parameters
    ----------
    shape : VerifyShape
    """
    return mask_pack.every_launch() if shape.mask == "tree" else ()


def _distinct(launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """Keep one launch of each compiled form."""
    found: dict[tuple[str, frozenset[tuple[str, int]]], Launch] = {}
    for launch in launches:
        found.setdefault((launch.kernel, frozenset(launch.defines.items())), launch)
    return tuple(found.values())
