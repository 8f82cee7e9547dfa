"""``env``: versions, backends, devices, launcher and network. Starts no process and uses no GPU."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ignite_dist as idist
from ignite_dist import environments
from ignite_dist.cli import interfaces
from ignite_dist.cli.output import Output
from ignite_dist.cli.tables import facts
from ignite_dist.comp_models import registered_computation_models
from ignite_dist.comp_models.shared_memory import opening as shared_memory
from ignite_dist.environments import devices
from ignite_dist.environments.rendezvous import network_interfaces
from ignite_dist.errors import EnvironmentVariablesError, without_link
from ignite_dist.internals import _python, _torch

# Variables that backends read. The modules of `environments` declare the variables of launchers.
_BACKEND_VARIABLES = re.compile(
    r"GLOO_.*|NCCL_.*|TORCH_NCCL_.*|HOROVOD_.*|PJRT_.*|CPU_NUM_DEVICES|TPU_.*|XLA_.*|CUDA_VISIBLE_DEVICES"
    r"|OMP_NUM_THREADS|IGNITE_DIST_.*"
)
_LIBRARIES = ("torch", "horovod", "torch_xla", "matplotlib")


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """All facts, in the structure of ``--json``."""
    addresses = network_interfaces.by_interface()
    environment = _environment(environ)
    interface, reason = interfaces.choice_of_gloo(environ, addresses, environment.get("main_address"))
    launcher_names = environments.launcher_variables()
    shown = [name for name in sorted(environ) if name in launcher_names or _BACKEND_VARIABLES.fullmatch(name)]
    return {
        "versions": _versions(),
        "private_names": _private_names(),
        "backends": _backends(),
        "devices": _devices(),
        "environment": environment,
        "interfaces": addresses,
        "gloo": {"interface": interface, "reason": reason},
        "shared_memory": _shared_memory(),
        "variables": {name: environ[name] for name in shown},
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"ignite_dist": idist.__version__, "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.release()}"
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__
    found["CUDA of torch"] = torch.version.cuda
    if dist.is_nccl_available():
        found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _private_names() -> dict[str, Any]:
    """How many private names of torch and of Python this package uses, and which names are missing here."""
    missing = {private.name: private.fallback for private in (*_torch.check(), *_python.check())}
    return {"known": len(_torch.PRIVATE_NAMES) + len(_python.PRIVATE_NAMES), "missing": missing}


def _backends() -> dict[str, dict[str, Any]]:
    """For each known backend: True if the backend works here, else the reason."""
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    names = dict.fromkeys((*known, "horovod", "xla-tpu", *idist.available_backends()))
    return {name: _backend(name) for name in names}


def _backend(name: str) -> dict[str, Any]:
    for model in registered_computation_models:
        if model.can_run(name):
            try:
                devices.check_devices(name, 1)
            except RuntimeError as error:
                return {"works": False, "model": model.name, "reason": str(error)}
            return {"works": True, "model": model.name, "reason": ""}
    reasons = [model.unavailable_reason(name) for model in registered_computation_models]
    return {
        "works": False,
        "model": None,
        "reason": next((reason for reason in reasons if reason), "unknown"),
    }


def _shared_memory() -> dict[str, Any]:
    """Whether this process can share memory with other ranks on this machine, and the reason if not."""
    try:
        reason = shared_memory.unavailable_reason()
    except EnvironmentVariablesError as error:
        reason = without_link(str(error))
    return {"works": not reason, "reason": reason}


def _devices() -> dict[str, Any]:
    found: dict[str, Any] = {"cores": devices.num_cores(), "cuda": torch.cuda.device_count()}
    # Read from the driver's files, because torch would create a CUDA context.
    folder = Path("/proc/driver/nvidia/gpus")
    names = [
        line.partition(":")[2].strip()
        for file in (sorted(folder.glob("*/information")) if folder.is_dir() else ())
        for line in file.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return {**found, "gpus of the driver": names} if names else found


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The launcher's environment, or the error if its variables contradict each other."""
    try:
        return (environments.detect(environ) or environments.ALONE)._asdict()
    except EnvironmentVariablesError as error:
        return {"launcher": None, "error": without_link(str(error))}


# --- the tables --------------------------------------------------------------------------------------


def show_env(output: Output) -> None:
    """Write all facts, as tables or as JSON."""
    found = collect(os.environ)
    if output.as_json:
        output.json(found)
        return
    tables = {
        "Versions": {
            **{name: value or "not installed" for name, value in _shown_versions(found).items()},
            "private names": _private_names_line(found["private_names"]),
        },
        "Backends": {name: _backend_line(backend) for name, backend in found["backends"].items()},
        "Devices": {name: _device_line(name, value) for name, value in found["devices"].items()},
        "Launched by": _launcher_lines(found["environment"]),
        "Network": {
            **_network_lines(found["interfaces"], found["gloo"]),
            "shared memory": _shared_memory_line(found["shared_memory"]),
        },
        "Variables": found["variables"] or {"none": "no variable of a launcher or a backend is set"},
    }
    for position, (title, rows) in enumerate(tables.items()):
        output.show(*([""] if position else []), facts(title, rows))


def _shown_versions(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found["versions"].items() if value or name in _LIBRARIES}


def _private_names_line(found: Mapping[str, Any]) -> str:
    missing = found["missing"]
    if not missing:
        return f"all {found['known']} found"
    names = "; ".join(f"{name} (fallback: {fallback})" for name, fallback in missing.items())
    return f"{len(missing)} of {found['known']} missing: {names}"


def _backend_line(backend: Mapping[str, Any]) -> str:
    return f"works ({backend['model']})" if backend["works"] else f"no: {backend['reason']}"


def _device_line(name: str, value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value or "none")


def _launcher_lines(environment: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in environment:
        return {"contradiction": environment["error"]}
    lines = {name.replace("_", " "): value for name, value in environment.items() if value not in (None, "")}
    return {"launcher": lines.pop("launcher"), "because": lines.pop("reason", ""), **lines}


def _shared_memory_line(found: Mapping[str, Any]) -> str:
    return "works (between gloo's ranks on this machine)" if found["works"] else f"no: {found['reason']}"


def _network_lines(by_interface: Mapping[str, list[str]], gloo: Mapping[str, str]) -> dict[str, Any]:
    lines: dict[str, Any] = {name: ", ".join(found) or "no address" for name, found in by_interface.items()}
    if gloo["interface"] and "127.0.0.1" not in by_interface.get(gloo["interface"], ()):
        lines["gloo"] = f"{gloo['interface']} between machines: {gloo['reason']}"
    else:
        others = [name for name, found in by_interface.items() if found and "127.0.0.1" not in found]
        advice = f" For several machines: export GLOO_SOCKET_IFNAME={others[0]}" if others else ""
        lines["gloo"] = f"for this machine alone: {gloo['reason']}.{advice}"
    return lines
