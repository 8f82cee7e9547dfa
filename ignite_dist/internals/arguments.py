"""Checks of arguments that several functions share."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from operator import index
from typing import Any

from torch.nn import Module


def as_int(value: Any) -> Any:
    """``value`` as an int if it has ``__index__`` (a NumPy int). Other values, and bools, are unchanged."""
    is_bool = isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # also of NumPy
    if type(value) is int or is_bool or not hasattr(value, "__index__"):
        return value
    try:
        return index(value)
    except TypeError:  # a tensor that is not one int
        return value


def as_port(value: Any) -> Any:
    """``value`` as an int if it is a string of digits, a port. For other values see :func:`as_int`."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        return int(value)
    return as_int(value)


def keywords_of(function: Callable[..., Any]) -> set[str]:
    """The names of ``function``'s keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def check_keywords(function: str, given: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise if ``given`` has a keyword that ``function`` does not accept.

    Raises:
        TypeError: with the unknown keyword, a similar allowed one, and all allowed keywords.
    """
    for name in given:
        if name not in allowed:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}.{did_you_mean(name, allowed)} "
                f"Allowed: {', '.join(sorted(allowed))}."
            )


_NAMES_ELSEWHERE = {"nprocs": "nproc_per_node", "num_processes": "nproc_per_node", "kwargs": "kwargs_dict"}


def did_you_mean(name: str, allowed: Collection[str]) -> str:
    """`` Did you mean 'x'?`` with the most similar name; an empty string if no name is similar."""
    elsewhere = _NAMES_ELSEWHERE.get(name)
    close = [elsewhere] if elsewhere in allowed else difflib.get_close_matches(name, allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_signature(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if ``function(local_rank, *args, **kwargs)`` does not fit the signature of ``function``.

    Raises:
        TypeError: with the signature and the arguments of the call.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # a function written in C, or a signature that a property computes
        return
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        keywords = f" and the keywords {', '.join(map(str, kwargs))}" if kwargs else ""
        raise TypeError(
            f"{name}{signature} cannot be called with the local rank, which always comes first, then "
            f"{len(args)} args{keywords}: {error}."
        ) from None


def check_module(function: str, model: Any) -> None:
    """Raise ``TypeError`` if ``model`` is not a ``torch.nn.Module``. The message names ``function``."""
    if not isinstance(model, Module):
        raise TypeError(f"{function} takes a model, an instance of torch.nn.Module, got {kind_of(model)}.")


def kind_of(value: Any) -> str:
    """``"the class X"`` for a class, ``"a X"`` for an instance."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_counts(**counts: Any) -> None:
    """Raise ``ValueError`` if an argument is not a positive int."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}.")


def check_timeout(name: str, timeout: Any) -> None:
    """Raise if ``timeout`` is not a positive ``datetime.timedelta``.

    Raises:
        TypeError: not a ``datetime.timedelta``.
        ValueError: not positive.
    """
    if not isinstance(timeout, timedelta):
        hint = f" Use timedelta(seconds={timeout!r})." if isinstance(timeout, (int, float)) else ""
        raise TypeError(f"{name} must be a datetime.timedelta, got {timeout!r}.{hint}")
    if timeout <= timedelta(0):
        raise ValueError(f"{name} must be positive, got {timeout}.")


def check_nodes(
    nproc_per_node: int,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    init_method: str | None,
) -> None:
    """Raise ``ValueError`` if arguments of a launch are out of range, missing, or contradictory."""
    nnodes = 1 if nnodes is None else nnodes
    check_counts(nproc_per_node=nproc_per_node, nnodes=nnodes)
    if nnodes > 1 and node_rank is None:
        raise ValueError(f"nnodes={nnodes} needs node_rank, this machine's number in [0, {nnodes}).")
    node = 0 if node_rank is None else node_rank
    if type(node) is not int or not 0 <= node < nnodes:
        raise ValueError(f"node_rank must be in [0, {nnodes}), where {nnodes} is nnodes; got {node_rank!r}.")
    ports = range(0 if nnodes == 1 else 1, 65536)  # 0 means any free port, unknown to other nodes
    if master_port is not None and (type(master_port) is not int or master_port not in ports):
        raise ValueError(f"master_port must be a port, an int in [{ports[0]}, 65535], got {master_port!r}.")
    if init_method not in (None, "env://"):
        for name, given in (("master_addr", master_addr), ("master_port", master_port)):
            if given is not None:
                raise ValueError(f"{name}={given!r} and init_method={init_method!r} exclude each other.")
    elif nnodes > 1 and (master_addr is None or master_port is None):
        raise ValueError(
            f"nnodes={nnodes} needs master_addr and master_port, the same on every node, or an init_method; "
            f"got master_addr={master_addr!r} and master_port={master_port!r}."
        )
