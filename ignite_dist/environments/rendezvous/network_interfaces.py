"""The network interfaces of this machine, their addresses, and the interface towards an address."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

# An address reserved for documentation (RFC 5737). Packets to it take the route to remote machines.
_REMOTE_ADDRESS = "192.0.2.1"

_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface


def interface_towards(address: str) -> str | None:
    """The interface through which this machine and ``address`` reach each other; None if unknown.

    gloo's default is the interface with the address of the host's own name. On Debian this is a loopback
    address, which other machines cannot reach.
    """
    local = _local_address(_REMOTE_ADDRESS if is_own_name(address) else address)
    return None if local is None or is_loopback(local) else _interface_of(local)


def _local_address(address: str) -> str | None:
    """The source address of packets from this machine to ``address``. Sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    """The interface with this address, or None."""
    return next((name for name, addresses in by_interface().items() if address in addresses), None)


def by_interface() -> dict[str, list[str]]:
    """The addresses of each network interface. Empty lists on systems other than Linux."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in found:
            with suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def loopback_interface() -> str | None:
    """The name of the loopback interface, ``lo`` or ``lo0``; None if neither exists."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def is_own_name(address: str) -> bool:
    """True if ``address`` is a host name that resolves to a loopback address on this machine."""
    return not is_loopback(address) and is_loopback(_local_address(address) or "")


def is_loopback(address: str) -> bool:
    """True if ``address`` is ``localhost`` or a loopback address: the local machine, on every host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
