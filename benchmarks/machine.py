"""A description of the machine on which the figures were measured."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def describe(device: str) -> dict[str, Any]:
    return {
        "tag": _tag(device),
        "cpu": _cpu_model(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytorch-ignite": _version("pytorch-ignite"),
        "horovod": _version("horovod"),
        "torch_xla": _version("torch_xla"),
        "ignite_dist": _version("ignite-dist"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load at start": os.getloadavg()[0],
    }


def _tag(device: str) -> str:
    if device == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    xla = "-xla" if _version("torch_xla") else ""  # another torch, so another file of results
    return f"cpu-{cores()}cores{xla}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
