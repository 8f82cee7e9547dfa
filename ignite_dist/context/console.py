"""Output of one rank: ``print`` and ``progress_bar``."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ignite_dist.context.live import current_model
from ignite_dist.internals.arguments import check_keywords

if TYPE_CHECKING:
    from tqdm.auto import tqdm

_Item = TypeVar("_Item")
_PRINT_KEYWORDS = ("end", "file", "flush", "local", "sep")


def print(*args: Any, local: bool = False, **kwargs: Any) -> None:
    """Python's ``print``, on one rank only. Never communicates, so any rank may call it at any time.

    Args:
        args: as for Python's ``print``.
        local: True prints on one rank per node, the rank with local rank 0; False on rank 0.
        kwargs: the keywords of Python's ``print``: ``sep``, ``end``, ``file``, ``flush``.

    Raises:
        TypeError: an unknown keyword; raised on every rank.
        RuntimeError: ``local=True``, but this rank's local rank is not known without communication: the
            environment has no ``LOCAL_RANK``, and no rank has asked for it.

    Example::

        idist.print("epoch", epoch, "loss", loss)  # one line, from rank 0
        idist.print(idist.hostname(), local=True)  # one line per node
    """
    check_keywords("print", kwargs, _PRINT_KEYWORDS)
    model = current_model()
    number = model.known_local_rank() if local else model.get_rank()
    if number is None:
        raise RuntimeError(
            "print(local=True) does not communicate, and the local rank is not known yet. Call "
            "idist.get_local_rank() on every rank first, or set LOCAL_RANK, or call idist.set_local_rank()."
        )
    if number == 0:
        builtins.print(*args, **kwargs)  # noqa: T201


def progress_bar(iterable: Iterable[_Item], **kwargs: Any) -> tqdm[_Item]:
    """``iterable`` with a progress bar of tqdm on rank 0, and without a bar on the other ranks.

    The result is a ``tqdm`` object on every rank, so ``len()``, ``set_postfix()`` and the other methods work
    everywhere, and show nothing without a bar. In a notebook the bar is tqdm's for notebooks. The bar counts
    the items of rank 0. Never communicates.

    Args:
        iterable: for example a data loader. All ranks get the items of their own iterable.
        kwargs: keywords of ``tqdm.tqdm``: ``desc``, ``total``, ``leave``, ... With ``disable=True`` rank 0
            shows no bar either.

    Raises:
        ModuleNotFoundError: tqdm is not installed.
        TypeError: ``iterable`` is not iterable, or an unknown keyword; raised on every rank.

    Example::

        for batch in (bar := idist.progress_bar(loader, desc=f"epoch {epoch}")):
            bar.set_postfix(loss=train_step(batch))
    """
    if not (hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")):
        raise TypeError(f"progress_bar takes an iterable, for example a data loader; got {iterable!r}.")
    try:
        from tqdm.auto import tqdm
        from tqdm.std import tqdm as plain_tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "idist.progress_bar needs tqdm: pip install tqdm", name=error.name
        ) from error
    # A bar without output accepts any keyword. `display` is a keyword of notebooks.
    allowed = inspect.signature(plain_tqdm.__init__).parameters.keys() - {"self", "iterable", "kwargs"}
    check_keywords("progress_bar", kwargs, allowed | {"display"})
    if current_model().get_rank() != 0:
        kwargs["disable"] = True
    return tqdm(iterable, **kwargs)
