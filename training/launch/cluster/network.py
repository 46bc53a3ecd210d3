"""The address and the network interface of a node, as the other nodes of a job see them."""

import socket

import psutil

from training.contract.errors import EngineError

_ANY_PORT = 9  # no packet is sent


def own_address(other: str) -> str:
    """Return the address of this machine on the network of `other`. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address. Raises EngineError, which lists all of them."""
    own = [
        (name, found.address)
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family == socket.AF_INET
    ]
    for name, ip in own:
        if ip == address:
            return name
    listed = ", ".join(f"{name} {ip}" for name, ip in own)
    raise EngineError(f"{address} belongs to no network interface of {socket.gethostname()}, which has {listed}")


def free_port(address: str) -> int:
    """Return a port of `address` on which nothing listens."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
