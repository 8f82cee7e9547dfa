"""The network interface of this machine that gloo would use."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ignite_dist.environments.rendezvous import network_interfaces


def choice_of_gloo(
    environ: Mapping[str, str], addresses: Mapping[str, list[str]], main_address: str | None
) -> tuple[str, str]:
    """The interface that gloo uses between nodes, and the reason. The interface is ``""`` if none fits.

    ``GLOO_SOCKET_IFNAME`` takes precedence. Without this variable, ``initialize`` uses the interface of the
    route to the main address. If the main address is missing or a loopback address, ``initialize`` uses the
    interface of the route to other hosts.

    Args:
        environ: all environment variables.
        addresses: the addresses of each interface of this machine.
        main_address: the address of rank 0's node; None if no launcher sets one.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        unknown = [name for name in chosen.split(",") if name not in addresses]
        if unknown:
            return "", f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, which this machine does not have"
        return chosen, "GLOO_SOCKET_IFNAME"
    if main_address is not None and not network_interfaces.is_loopback(main_address):
        address, destination = main_address, f"the main address, {main_address}"
    else:
        address, destination = socket.gethostname(), "other machines"
    interface = network_interfaces.interface_towards(address)
    if interface is None:
        return "", f"no interface is known to lead to {destination}"
    return interface, f"it leads to {destination}"
