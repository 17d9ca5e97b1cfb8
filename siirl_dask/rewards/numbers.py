"""Numbers as reward functions give them: numpy's and torch's scalars, Decimals, fractions."""

from __future__ import annotations

from decimal import Decimal
from numbers import Real


def number_of(value: object) -> object:
    """Return a value as a plain number if it is one in another form: a Decimal, a scalar or an array
    without dimensions of numpy or torch. Others are returned as they are.
    """
    if isinstance(value, Decimal) and not value.is_snan():
        return float(value)
    # also of numpy's numbers: a float16 is compared with others in 16 bits, where much is infinite
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()
    return value


def as_float(value: object) -> float:
    """Return a number as a float; TypeError for a value that is none."""
    number = number_of(value)
    if not isinstance(number, Real):
        raise TypeError(f"{value!r:.200} is no number")
    return float(number)
