"""What a thread is doing, by its innermost frame: whether it waits for a collective that it began before.

``Work.wait()`` is compiled code, so it has no frame of its own. The caller's frame shows the call.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType

from torch.distributed import Work

__all__ = ["calls_wait"]

# What may stand between the name of a method and its call: the arguments, and what Python adds.
_BETWEEN = ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_SMALL_INT", "PUSH_NULL", "PRECALL", "KW_NAMES")
_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP")


def calls_wait(frame: FrameType) -> bool:
    """Whether the frame is in the call of the ``wait()`` of a ``Work``, as far as its code shows."""
    if "wait" not in frame.f_code.co_names:
        return False
    method, receiver = _called(frame.f_code, frame.f_lasti)
    if method != "wait":
        return False
    found = frame.f_locals.get(receiver, frame.f_globals.get(receiver)) if receiver else None
    return found is None or isinstance(found, Work)  # an attribute or a list's element is not looked up


@lru_cache(maxsize=4096)
def _called(code: CodeType, last: int) -> tuple[str, str]:
    """The method that the instruction at ``last`` calls, and the variable whose method it is; else empty."""
    method = receiver = variable = ""
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if instruction.offset == last and not name.startswith("CALL"):
            return "", ""
        if instruction.offset >= last:
            break
        if name in _NOTHING or (method and name.startswith(_BETWEEN)):
            continue
        if name in ("LOAD_METHOD", "LOAD_ATTR"):
            method, receiver = str(instruction.argval), variable
            variable = ""
        else:
            method = ""
            is_variable = name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL"))
            variable = str(instruction.argval) if is_variable else ""
    return method, receiver
