"""Reductions of Python's numbers, in rank order and with Python's own arithmetic."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Number, Rational
from typing import Any

__all__ = ["check_number_op", "plain_number", "reduce_numbers"]


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a or a <= b else b  # a NaN wins, as in torch.amin


def _maximum(a: Any, b: Any) -> Any:
    return a if a != a or a >= b else b


_NUMBER_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVERAGE": operator.add,
    "PRODUCT": operator.mul,
    "MIN": _minimum,
    "MAX": _maximum,
    "AND": operator.and_,
    "OR": operator.or_,
}


def plain_number(value: Any) -> Any:
    """A number as Python's own of the same value: an int, a float, a complex, a bool or a fraction.

    What is no number is returned as it is.

    Raises:
        TypeError: a number that has no such value (a ``longdouble``), or whose sums are rounded by a setting
            that each rank has for itself (a ``Decimal``).
    """
    if type(value) in (int, float, bool, complex):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item() if value.dtype.kind in "biufc" else value  # a timedelta64 says it is a number
        if not isinstance(plain, numpy.generic) or not isinstance(plain, Number):
            return plain
    elif isinstance(value, float):
        return float(value)
    elif isinstance(value, complex):
        return complex(value)
    elif isinstance(value, Integral):
        return operator.index(value)
    elif isinstance(value, Rational) or not isinstance(value, Number):
        return value
    raise TypeError(
        "all_reduce takes numbers that are int, float, complex, bool, Fraction, or numpy's of such values; "
        f"got {value!r} of type {type(value).__name__}. Convert it first: to a Fraction, for example."
    )


def check_number_op(op: str, number: Any) -> None:
    """Refuse what :func:`reduce_numbers` cannot do with ``number``, before it is sent.

    Raises:
        TypeError: a float under AND or OR.
        ValueError: ADASUM, which is defined on tensors.
    """
    if op == "ADASUM":
        raise ValueError("ADASUM is defined on tensors; got a number. Use SUM or AVERAGE.")
    if op in ("AND", "OR"):
        try:
            operator.and_(number, number)
        except TypeError:
            raise TypeError(f"{op} is bitwise on ints and logical on bools; got {number!r}.") from None
    if op in ("MIN", "MAX") and isinstance(number, complex):
        raise TypeError(f"{op} needs an order, and complex numbers have none; got {number!r}.")


def reduce_numbers(rows: Sequence[Sequence[Any]], op: str) -> list[Any]:
    """Each rank's row of numbers reduced into one row, in rank order and with Python's own arithmetic.

    Ints are exact at any size; a bool counts as 0 or 1, except under AND and OR; AVERAGE divides at the end.
    """
    combine = _NUMBER_OPS[op]
    totals = list(rows[0])  # any of them may be empty; all are then
    for row in rows[1:]:
        totals = list(map(combine, totals, row))
    if op == "AVERAGE":
        return [total / len(rows) for total in totals]
    if op in ("SUM", "PRODUCT"):  # a world of one must not return another type than a world of two
        return [int(total) if total is True or total is False else total for total in totals]
    return totals
