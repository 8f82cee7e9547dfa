"""The exception of a rank, as the launcher and other ranks see it: its type, text, notes, cause and group."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ignite_dist as idist
from helpers import run_python, write_script
from ignite_dist.collectives.coordination import same_outcome
from ignite_dist.context.live import current_model
from ignite_dist.workers.failures import FailedRank, Failure, error_of, outcome_of
from ignite_dist.workers.sent_exceptions import LeftOut, decode_exception, encode_exception
from on_ranks import on_ranks


class Required(Exception):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what}: {code}")
        self.code = code


class Prefixed(Exception):
    """``Prefixed(*error.args)`` has another text."""

    def __init__(self, what: str) -> None:
        super().__init__(f"prefix: {what}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Unprintable(ValueError):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class ReduceExits(Exception):
    def __reduce__(self) -> Any:
        sys.exit("in __reduce__")


class UnpicklingExits(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (7,)


class BadValue:
    def __reduce__(self) -> Any:
        return int, ("unpickling fails",)

    def __repr__(self) -> str:
        return "BadValue()"


class OwnFileError(FileNotFoundError):
    pass


class Slots(Exception):
    __slots__ = ("code",)


class Frozen(Exception):
    """No attribute can be set, and it is false."""

    def __len__(self) -> int:
        return 0

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):  # contextlib sets __traceback__
            raise AttributeError(name)
        super().__setattr__(name, value)


class TwoBases(KeyError, AttributeError):
    pass


def with_attributes(error: BaseException, **attributes: Any) -> BaseException:
    vars(error).update(attributes)
    return error


def local_class() -> BaseException:
    class Local(KeyError):
        pass

    return Local("x", 1)


def with_cause(**attributes: Any) -> BaseException:
    error, cause = ValueError("of a cause"), Required(1, "the cause")
    error.__cause__, cause.__cause__ = cause, with_attributes(OSError(28, "No space left"), **attributes)
    return error


def with_context(is_hidden: bool) -> BaseException:
    error = ValueError("of a context")
    error.__context__, error.__suppress_context__ = ZeroDivisionError("division by zero"), is_hidden
    return error


def of_itself() -> BaseException:
    error, other = ValueError("in a circle"), KeyError("other")
    error.__context__, other.__context__ = other, error
    return error


def missing_module() -> BaseException:
    try:
        __import__("no_such_module")
    except ImportError as error:
        return error
    raise AssertionError


def with_slot() -> BaseException:
    error = Slots("x")
    error.code = 3
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "required arguments": lambda: Required(5, "bad"),
    "text of its own": lambda: Prefixed("bad"),
    "keyword-only arguments": lambda: Keyword(code=5),
    "attributes": lambda: with_attributes(KeyError("lr", {"a": [1]}), extra={"x": 1}),
    "notes": lambda: with_attributes(ValueError("noted"), __notes__=["one\ntwo", "three"]),
    "cause": with_cause,
    "cause with a lock": lambda: with_cause(lock=threading.Lock()),
    "from None": lambda: with_context(is_hidden=True),
    "context": lambda: with_context(is_hidden=False),
    "circle": of_itself,
    "lock as an attribute": lambda: with_attributes(ValueError("locked"), lock=threading.Lock(), code=5),
    "lock as an argument": lambda: ValueError("locked", threading.Lock()),
    "local class": local_class,
    "lambda": lambda: ValueError("function", abs, len),
    "SystemExit(0)": lambda: SystemExit(0),
    "SystemExit(None)": lambda: SystemExit(),
    "SystemExit(3)": lambda: SystemExit(3),
    "SystemExit(text)": lambda: SystemExit("the text\nin two lines"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("by the script"),
    "GeneratorExit": lambda: GeneratorExit("early"),
    "StopIteration": lambda: StopIteration(4),
    "__str__ raises": lambda: Unprintable("x"),
    "__reduce__ exits": lambda: ReduceExits("x"),
    "unpickling exits": lambda: UnpicklingExits("x"),
    "unpickling a value fails": lambda: ValueError("bad value", BadValue()),
    "100 MB": lambda: with_attributes(ValueError("big"), tensor=torch.zeros(25_000_000), code=3),
    "100 MB as an argument": lambda: RuntimeError("big", torch.zeros(25_000_000)),
    "OSError": lambda: OwnFileError(2, "No such file", "here", None, "there"),
    "OSError with a lock": lambda: with_attributes(OwnFileError(2, "No file", "here"), lock=threading.Lock()),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "SyntaxError": lambda: SyntaxError("invalid syntax", ("f.py", 1, 3, "a b\n", 1, 4)),
    "ImportError": missing_module,
    "slots": with_slot,
    "no attribute can be set": lambda: with_attributes(Frozen("x"), code=3),
    "two built-in bases": lambda: with_attributes(TwoBases("x"), code=4),
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "CalledProcessError": lambda: subprocess.CalledProcessError(2, "make", b"output"),
    "an error of another job": lambda: error_of([FailedRank(0, 0, 7, "there", _failure(with_cause()))]),
}
if sys.version_info >= (3, 11):
    Group: Any = builtins.ExceptionGroup

    class OwnGroup(Group):  # type: ignore[misc]
        def __new__(cls, members: list[Exception], code: int) -> Any:
            self = super().__new__(cls, "own group", members)
            self.code = code
            return self

    def nested() -> BaseException:
        locked = with_attributes(OSError("locked"), lock=threading.Lock())
        error = Group(
            "outer", [Required(1, "in a group"), Group("inner", [with_cause(), locked]), KeyError(2)]
        )
        return with_attributes(error, __notes__=["a note of the group"])

    EXCEPTIONS["nested groups"] = nested
    EXCEPTIONS["a group's own class"] = lambda: OwnGroup([ValueError("one"), ValueError("two")], 7)
    EXCEPTIONS["BaseExceptionGroup"] = lambda: builtins.BaseExceptionGroup(
        "of exits", [KeyboardInterrupt("one"), SystemExit("two")]
    )


def _failure(error: BaseException) -> Failure:
    """As a worker reports the exception."""

    def call(_: int) -> None:
        raise error

    failure = outcome_of(call, 0)
    assert isinstance(failure, Failure)
    return failure


def _failures(_: int) -> dict[str, Failure]:
    return {name: _failure(make()) for name, make in EXCEPTIONS.items()}


@pytest.fixture(scope="module")
def failures() -> dict[str, Failure]:
    """The reports of a worker about the exceptions."""
    reported: dict[str, Failure] = on_ranks(_failures, world_size=1)[0]
    return reported


def described(error: Any, seen: tuple[BaseException, ...] = ()) -> Any:
    """What must arrive of an exception, without the addresses of objects."""
    if not isinstance(error, BaseException):
        return re.sub(" at 0x[0-9a-f]+", "", repr(error))
    if any(error is one for one in seen):
        return "circle"
    seen = (*seen, error)
    fields = ("code", "errno", "filename", "filename2", "name", "path", "value", "end", "start", "lineno")
    members = getattr(error, "exceptions", ())
    return {
        "type": (type(error).__module__.replace("__mp_main__", "__main__"), type(error).__name__),
        "text": _text(error),
        "args": "" if members else [described(value, seen) for value in error.args],
        "attributes": {name: described(value, seen) for name, value in vars(error).items()},
        "fields": {name: described(getattr(error, name, None)) for name in fields},
        "members": [described(member, seen) for member in members],
        "cause": described(error.__cause__, seen),
        "context": described(error.__context__, seen),
        "hidden": error.__suppress_context__,
    }


def _text(error: BaseException) -> str:
    try:
        return re.sub(" at 0x[0-9a-f]+", "", str(error))
    except ValueError:
        return "no text"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_the_launcher_gets_the_exception(failures: dict[str, Failure], name: str) -> None:
    error, made = error_of([FailedRank(0, 0, 7, "here", failures[name])]), EXCEPTIONS[name]()
    original = idist.original_exception(error)
    assert original is error.__cause__
    assert described(original) == described(made)
    assert type(original) is type(made) or name == "local class"
    _check_text(error.traceback, made)
    assert failures[name].error_type == type(made).__name__
    if isinstance(made, SystemExit):
        first_line = str(made).partition("\n")[0]
        assert f"(SystemExit{': ' * bool(first_line)}{first_line})" in str(error)
    else:
        assert (error.error_type, error.traceback) == (type(made).__name__, failures[name].traceback)


def _check_text(text: str, made: BaseException) -> None:
    """``text`` has the lines in which Python shows the exception, its cause and the members of its group."""
    plain = re.sub(r"(?m)^[ |+]+| at 0x[0-9a-f]+", "", text)
    shown = [made, *getattr(made, "exceptions", ()), made.__cause__]
    shown += [] if made.__suppress_context__ else [made.__context__]
    for error in filter(None, shown):
        for line in "".join(traceback.format_exception_only(error)).split("\n"):
            assert re.sub(" at 0x[0-9a-f]+", "", line).strip() in plain


# --- between ranks -----------------------------------------------------------------------------------


def _in_block(make: Callable[[], BaseException]) -> None:
    with idist.raise_together():
        if idist.get_rank() == 0:
            raise make()


def _on_one_rank(make: Callable[[], BaseException]) -> None:
    @idist.one_rank_only(broadcast=True)
    def fail() -> None:
        raise make()

    fail()


def _on_first_rank(make: Callable[[], BaseException]) -> None:
    with idist.one_rank_first():
        if idist.get_rank() == 0:
            raise make()


def _in_checkpoint(make: Callable[[], BaseException]) -> None:
    def write() -> None:
        if idist.get_rank() == 0:
            raise make()

    same_outcome(current_model(), write)


SHARED = {one.__name__: one for one in (_in_block, _on_one_rank, _on_first_rank, _in_checkpoint)}


def _all_shared(_: int) -> dict[tuple[str, str], tuple[str, str, str, str]]:
    """For each way and exception: its class and text here, and its class and traceback on the failed rank."""
    found = {}
    for way, share in SHARED.items():
        for name, make in EXCEPTIONS.items():
            with pytest.raises(BaseException) as caught:
                share(make)
            error: Any = caught.value
            about = error if isinstance(error, idist.RankFailedError) else error.__cause__
            told = getattr(about, "error_type", ""), getattr(about, "traceback", "")
            found[way, name] = (type(error).__name__, _text(error), *told)
    assert idist.all_reduce(1) == 2
    return found


def test_the_other_ranks_get_the_exceptions() -> None:
    first, second = on_ranks(_all_shared)
    for (way, name), (kind, text, error_type, trace) in second.items():
        made = EXCEPTIONS[name]()
        assert first[way, name][:2] == (type(made).__name__, _text(made)), "rank 0 raises its own exception"
        assert error_type == type(made).__name__
        _check_text(trace, made)
        if way == "_in_checkpoint" and isinstance(made, (ValueError, TypeError, OSError, RuntimeError)):
            assert isinstance(made, getattr(builtins, kind))
            assert text in (_text(made), "<exception str() failed>")
        else:
            assert kind == "RankFailedError"


# --- further ones ------------------------------------------------------------------------------------


def _raises(local_rank: int, name: str) -> None:
    if local_rank == 1:
        raise EXCEPTIONS[name]()


def test_spawn_raises_from_the_exception_of_the_worker() -> None:
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", _raises, ("cause with a lock",), nproc_per_node=2)
    original: Any = idist.original_exception(caught.value)
    assert described(original) == described(with_cause(lock=threading.Lock()))
    assert isinstance(original.__cause__.__cause__.lock, LeftOut)
    assert "_raises" in str(caught.value), "the traceback is in the text"


def test_a_class_that_only_the_worker_has_keeps_its_name_and_its_built_in_base(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ignite_dist as idist

        if __name__ != "__main__":
            class OnlyThere(OSError):
                def __init__(self, code, what):
                    super().__init__(code, what)

        def fail(local_rank):
            raise OnlyThere(28, "No space left") from KeyError("cause")

        if __name__ == "__main__":
            try:
                idist.spawn("gloo", fail)
            except idist.RankFailedError as error:
                original = idist.original_exception(error)
            assert isinstance(original, OSError) and original.errno == 28, repr(original)
            print(type(original).__name__, original, repr(original.__cause__))
        """,
    )
    ended = run_python(script)
    assert ended.stdout == "OnlyThere [Errno 28] No space left KeyError('cause')\n"


def test_what_is_left_out_of_large_exceptions() -> None:
    large = UnicodeDecodeError("utf-8", b"\xff" * (2 << 20), 0, 1, "bad")
    decoded: Any = decode_exception(encode_exception(large))
    assert isinstance(decoded, ValueError)
    assert type(decoded).__name__ == "UnicodeDecodeError"
    assert str(decoded) == "'utf-8' codec can't decode byte 0xff in position 0: bad"
    error = last = ValueError("first")
    for number in range(3000):
        last.__context__ = last = ValueError(number)
    decoded, num_links = decode_exception(encode_exception(error)), 0
    while decoded is not None:
        decoded, num_links = decoded.__context__, num_links + 1
    assert num_links == 1000


def test_a_class_that_python_code_cannot_make() -> None:
    core = pytest.importorskip("pydantic_core")
    details = [{"type": "missing", "loc": ("lr",), "input": {}}]
    error = core.ValidationError.from_exception_data("Config", details)
    decoded: Any = decode_exception(encode_exception(error))
    assert type(decoded) is core.ValidationError
    assert decoded.errors() == error.errors()


def test_another_error_is_its_own_original() -> None:
    error = ValueError()
    error.__cause__ = KeyError()
    assert idist.original_exception(error) is error
