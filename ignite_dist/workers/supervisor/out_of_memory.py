"""Tells a SIGKILL of the kernel, because memory ran out, from any other SIGKILL."""

from __future__ import annotations

import re

SIGKILL_HINT = " (the kernel sends SIGKILL when memory runs out)"


def count_oom_kills() -> int | None:
    """Number of out-of-memory kills in this process's control group.

    None if unknown: not on Linux, or no control group has a memory controller.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    paths = []
    for number, controllers, path in groups:
        if "memory" in controllers.split(","):  # version 1
            root, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        elif number == "0":  # version 2
            root, name = "/sys/fs/cgroup", "memory.events"
        else:
            continue
        # In a container, the path may be valid on the host only. The root is then the container's group.
        paths += [f"{root}{path.rstrip('/')}/{name}", f"{root}/{name}"]
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                found = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def sigkill_reason(oom_kills_before: int | None) -> str:
    """The likely reason for a SIGKILL, given the number of out-of-memory kills at the workers' start."""
    now = count_oom_kills()
    if now is None or oom_kills_before is None:
        return SIGKILL_HINT
    if now <= oom_kills_before:
        return " (not by the kernel for lack of memory: its counter has not changed)"
    return " (by the kernel: memory has run out in the control group of this launch)"
