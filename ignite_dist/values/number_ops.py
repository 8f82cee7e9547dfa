"""Reductions of Python numbers, in rank order, with Python's arithmetic."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Number, Rational
from typing import Any

from ignite_dist.values import reduce_ops


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
    "XOR": operator.xor,
}


PLAIN_TYPES = frozenset({int, float, bool, complex})
"""Types of numbers that :func:`plain_number` does not change."""


def plain_number(value: Any) -> Any:
    """A number as a Python int, float, complex, bool or Fraction of the same value.

    A ``value`` that is not a number is returned unchanged.

    Raises:
        TypeError: ``value`` is a number without such an equivalent (``longdouble``), or a ``Decimal``,
            whose rounding is a setting of each rank.
    """
    if type(value) in PLAIN_TYPES:
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        # numpy's timedelta64 is registered as a Number.
        plain = value.item() if value.dtype.kind in "biufc" else value
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
        "all_reduce and reduce take int, float, complex, bool, Fraction, and numpy numbers with such values; "
        f"got {value!r} of type {type(value).__name__}. Convert it first, for example to a Fraction."
    )


def check_number_op(op: str, number: Any) -> None:
    """Raise if :func:`reduce_numbers` does not support ``op`` for ``number``, before any communication.

    Raises:
        TypeError: AND, OR or XOR of a float or complex number, or MIN or MAX of a complex number.
        ValueError: ADASUM, which is defined on tensors only.
    """
    if op == "ADASUM":
        raise ValueError("ADASUM is defined on tensors; got a number. Use SUM or AVERAGE.")
    if op in reduce_ops.BITWISE:
        try:
            operator.and_(number, number)
        except TypeError:
            raise TypeError(f"{op} is bitwise on ints and logical on bools; got {number!r}.") from None
    if op in ("MIN", "MAX") and isinstance(number, complex):
        raise TypeError(f"{op} needs an order, and complex numbers have none; got {number!r}.")


def reduce_numbers(rows: Sequence[Sequence[Any]], op: str) -> list[Any]:
    """Reduce the rows of numbers of all ranks to one row, in rank order.

    Ints are exact at any size. A bool counts as 0 or 1, but not in AND, OR and XOR. AVERAGE divides at the
    end.
    """
    combine = _NUMBER_OPS[op]
    totals = list(rows[0])  # if this row is empty, all rows are empty
    for row in rows[1:]:
        totals = list(map(combine, totals, row))
    if op == "AVERAGE":
        return [total / len(rows) for total in totals]
    if op in ("SUM", "PRODUCT"):  # True + True is an int, so one rank's sum must be an int too
        return [int(total) if total is True or total is False else total for total in totals]
    return totals
