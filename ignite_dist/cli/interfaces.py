"""Which of this machine's network interfaces gloo would use."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ignite_dist.rendezvous import network_interfaces

__all__ = ["choice_of_gloo"]


def choice_of_gloo(
    environ: Mapping[str, str], known: Mapping[str, list[str]], main_address: str | None
) -> tuple[str, str]:
    """The interface that gloo uses between machines, and why; empty where there is none of use.

    It is the one that is named, else the one that ``initialize`` names: towards the main address, if a
    launcher has told one on the network, else as if it were this machine's.
    """
    named = environ.get("GLOO_SOCKET_IFNAME")
    if named:
        unknown = [name for name in named.split(",") if name not in known]
        if unknown:
            return "", f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, which this machine does not have"
        return named, "GLOO_SOCKET_IFNAME"
    if main_address is not None and not network_interfaces.is_loopback(main_address):
        address, what = main_address, f"the main address, {main_address}"
    else:
        address, what = socket.gethostname(), "other machines"
    interface = network_interfaces.interface_towards(address)
    if interface is None:
        return "", f"no interface is known to lead to {what}"
    return interface, f"it leads to {what}"
