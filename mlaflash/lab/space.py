"""The constants of each kernel that can be swept, and the values that a sweep tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlaflash.errors import InvalidArgumentError
from mlaflash.mma_tiles import MmaNarrowConfig, MmaRolesConfig, MmaWideConfig
from mlaflash.schedule import FP8_KERNELS, MMA_KERNELS
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig, tile_candidates


@dataclass(frozen=True, slots=True)
class Axis:
    """One constant.

    Attributes
    ----------
    name : str
        Its one name: the field of the configuration, the key of a record and, with dashes, the command line's option.
    values : tuple of int
        What a sweep tries on a GPU.
    emulator_values : tuple of int
        What it tries on the emulator, where each compilation takes seconds.
    help : str
    fp8_values : tuple of int
        What it tries over a cache of 8 bits, on either; empty is the same as else.
    """

    name: str
    values: tuple[int, ...]
    emulator_values: tuple[int, ...]
    help: str
    fp8_values: tuple[int, ...] = ()

    @property
    def option(self) -> str:
        """Its option of the command line."""
        return option_name(self.name)


def option_name(name: str) -> str:
    """Return the option of the command line that a name is given by: ``--kv-groups`` for ``kv_groups``.

    Parameters
    ----------
    name : str
    """
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Space:
    """All constants of a kernel.

    Attributes
    ----------
    config : callable
        Makes the kernel's configuration of one value for each axis, by name, some or all left out.
    axes : tuple of Axis
    is_built : callable
        Whether the kernel can be compiled for a point, given by the names of the axes, and a cache; others are passed
        over.
    """

    config: Callable[..., KernelConfig]
    axes: tuple[Axis, ...]
    is_built: Callable[[Mapping[str, int], str], bool] = lambda *_: True

    def candidates(
        self, device_kind: str, chosen: Mapping[str, Sequence[int]], kv_dtype: str = "bfloat16"
    ) -> Iterator[KernelConfig]:
        """Combine all values of all axes.

        Parameters
        ----------
        device_kind : {"gpu", "emulator"}
            Which of an axis's values count where none are chosen.
        chosen : mapping of str to sequence of int
            Values by the name of an axis; names of other kernels' axes are passed over.
        kv_dtype : str
            What the cache holds.

        Yields
        ------
        KernelConfig
            The last axis changes fastest.
        """
        lists = []
        for axis in self.axes:
            values = axis.values if device_kind == "gpu" else axis.emulator_values
            if axis.fp8_values and kv_dtype in FP8_KERNELS:
                values = axis.fp8_values
            lists.append(chosen.get(axis.name, values))
        for values in itertools.product(*lists):
            point = {axis.name: value for axis, value in zip(self.axes, values, strict=True)}
            if self.is_built(point, kv_dtype):
                yield self.config(**point)

    def change(self, config: KernelConfig, chosen: Mapping[str, int]) -> KernelConfig:
        """Take a configuration but for the values given.

        Parameters
        ----------
        config : KernelConfig
        chosen : mapping of str to int
            One value by the name of an axis; names of other kernels' axes are passed over.
        """
        values = config.as_dict() | {axis.name: chosen[axis.name] for axis in self.axes if axis.name in chosen}
        return self.config(**values)


_MMA_SPLITS: Final = Axis("nsplit", (1, 8, 16, 32, 64, 128), (1, 4), "Splits of the KV, a run-time number.")

SPACES: Final[dict[str, Space]] = {
    "naive": Space(NaiveConfig, ()),
    "tile": Space(
        TileConfig,
        (
            Axis("ht", tuple(sorted({c.ht for c in tile_candidates()})), (1, 2, 4, 8, 16), "Heads of a block."),
            Axis("tk", tuple(sorted({c.tk for c in tile_candidates()})), (4, 8, 16, 32), "KV tokens of a tile."),
            Axis("nsplit", (1, 4, 8, 16, 32, 64, 128), (1, 4), "Splits of the KV, a run-time number."),
        ),
    ),
    "mma_narrow": Space(
        MmaNarrowConfig,
        (
            Axis("kv_groups", (1, 2), (1, 2), "Groups of four warps that take turns at the KV tiles."),
            Axis("stages", (2, 3, 4), (2, 3), "KV tiles in the ring."),
            Axis("exchange_buffers", (1, 2), (1, 2), "Buffers for the scores that warps exchange."),
            Axis("step_tiles", (1,), (1,), "KV tiles that a group takes at once, 2 of 8 bits.", fp8_values=(1, 2)),
            Axis("row_tiles", (1, 2), (1, 2), "Row tiles of 16 of a block."),
            Axis("shared_steps", (0,), (0,), "Steps of a warp's part of q in shared memory.", fp8_values=(0, 1, 3)),
            _MMA_SPLITS,
        ),
        lambda point, kv_dtype: (
            point["shared_steps"] == 0
            if point["row_tiles"] == 1
            else kv_dtype != "fp8_ds_mla" and point["step_tiles"] == point["exchange_buffers"] == 1
        ),
    ),
    "mma_wide": Space(
        MmaWideConfig,
        (
            Axis("row_groups", (1, 2, 4), (2, 4), "Groups of 16 rows of a block."),
            Axis("column_warps", (2, 4), (2, 4), "Warps that share a row group's columns."),
            Axis("stages", (4, 8), (4,), "KV tiles in the ring."),
            Axis("lookahead", (1, 2, 3), (1, 2), "Operand loads ahead of the products."),
            Axis("refill_at", (3, 5, 9), (9,), "Step through the dims of a tile at which the ring is refilled."),
            _MMA_SPLITS,
        ),
        lambda point, _: (
            point["row_groups"] * point["column_warps"] in (4, 8)
            and point["stages"] >= point["row_groups"]
            and point["refill_at"] <= 36 // point["column_warps"]
        ),
    ),
    "mma_roles": Space(
        MmaRolesConfig,
        (
            Axis("stages", (4, 8), (4,), "KV tiles in the ring."),
            Axis(
                "shared_steps",
                (3, 4, 5),
                (4,),
                "Steps of a score warp's part of q that stay in shared memory.",
                fp8_values=(7, 9),
            ),
            Axis("lookahead", (1, 2), (1, 2), "Operand loads ahead of the products."),
            Axis("row_tiles", (4,), (4,), "Row tiles of 16 of a block.", fp8_values=(2, 4)),
            _MMA_SPLITS,
        ),
    ),
}
"""By the name of the kernel. A kernel that is added here can be swept, and gets the options of the command line."""


def swept_kernels(kv_dtype: str | None = None, names: Sequence[str] = ()) -> list[str]:
    """List the kernels that have constants to choose.

    Parameters
    ----------
    kv_dtype : str or None
        Only those that read a cache of this; None is all.
    names : sequence of str
        Only those that have all of these axes.
    """
    takes = [kernel for kernel in SPACES if kv_dtype != "float32" or kernel not in MMA_KERNELS]
    if kv_dtype in FP8_KERNELS:
        takes = list(FP8_KERNELS[kv_dtype])
    return [kernel for kernel in takes if SPACES[kernel].axes and set(names) <= {a.name for a in SPACES[kernel].axes}]


def all_axes() -> list[Axis]:
    """List the axes of all kernels, each name once."""
    axes: dict[str, Axis] = {}
    for space in SPACES.values():
        for axis in space.axes:
            axes.setdefault(axis.name, axis)
    return list(axes.values())


def check_axes(kernels: Sequence[str], names: Sequence[str]) -> None:
    """Refuse values for constants that none of the kernels has.

    Parameters
    ----------
    kernels : sequence of str
    names : sequence of str
        Axes that the user gave values for.

    Raises
    ------
    InvalidArgumentError
    """
    known = {axis.name for kernel in kernels if kernel in SPACES for axis in SPACES[kernel].axes}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"{option_name(unknown[0])} is given and {', '.join(kernels)} has no such constant; allowed here: "
            f"{', '.join(map(option_name, sorted(known))) or 'none'}. Leave it out, or choose another --kernel."
        )
