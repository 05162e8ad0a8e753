"""Numbers that a caller gives, checked: the same rules and the same words wherever one is taken."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from mlaflash.errors import InvalidArgumentError

_LARGEST = float(np.finfo(np.float32).max)


def integer(name: str, value: Any, least: int) -> int:
    """Return an integer as Python's own; NumPy's are taken, bools and floats are not.

    Parameters
    ----------
    name : str
        The caller's name for it.
    value : int
    least : int
        The smallest that is allowed.

    Raises
    ------
    InvalidArgumentError
        It is something else, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return a word that is one of those allowed.

    Parameters
    ----------
    name : str
        The caller's name for it.
    value : str
    allowed : tuple of str

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}.")
    return value


def flag(name: str, value: Any) -> bool:
    """Return a bool as Python's own; NumPy's are taken, nothing else is.

    Parameters
    ----------
    name : str
        The caller's name for it.
    value : bool

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be True or False.")
    return bool(value)


def is_number(value: Any) -> bool:
    """Whether this is a number of Python's or NumPy's, and no array.

    Parameters
    ----------
    value : object
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def finite(name: str, value: Any) -> float:
    """Return a number that is finite, in float32 too: that is what the kernels get.

    Parameters
    ----------
    name : str
        The caller's name for it.
    value : float

    Raises
    ------
    InvalidArgumentError
        It is no number, or not finite.
    """
    try:
        # float() would also read digits out of a text.
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        number = math.inf
    # A NaN passes no comparison.
    if not abs(number) <= _LARGEST:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be a finite number of magnitude at most {_LARGEST:.3g}, the largest float32."
        )
    return number
