"""Before torchrun starts, the machines of a job connect to the first one, at the port that its torchrun will use.

torchrun itself waits ten minutes for a machine that a wrong address or a firewall keeps away, and then shows a stack
of C++. Here the machine that could not connect, or the one that waited for it, says so in seconds.
"""

import socket
import time
from collections.abc import Sequence

import psutil

from training.contract.errors import NodesError

_RETRY_SECONDS = 0.1
_GREETING_SECONDS = 2.0
_ALL_HERE = b"."


def interface_of(address: str) -> str:
    """The network interface of this machine that has `address`. Raises NodesError, which lists all of them."""
    wanted = _resolve(address)
    own = [
        (name, found.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family in (socket.AF_INET, socket.AF_INET6)
    ]
    for name, ip in own:
        if ip in wanted:
            return name
    named = address if wanted == {address} else f"{address} ({', '.join(sorted(wanted))})"
    there = ", ".join(f"{name} {ip}" for name, ip in own)
    raise NodesError(f"`address: {named}` belongs to no interface of that machine, which has {there}")


def meet(node: int, addresses: Sequence[str], port: int, seconds: float = 20.0) -> None:
    """Return when every machine has reached the first one. Raises NodesError where one has not after `seconds`."""
    if node == 0:  # waits a little longer: a node that cannot reach it knows better why
        _receive_others(addresses[0], port, set(range(1, len(addresses))), 1.25 * seconds)
    else:
        _go_to_first(node, addresses[0], port, seconds)


def _receive_others(address: str, port: int, missing: set[int], seconds: float) -> None:
    deadline, connections = time.monotonic() + seconds, []
    try:
        server = _listen(address, port)
    except OSError as error:
        raise NodesError(
            f"cannot listen at {address}, port {port}: {error.strerror}; wait for the job that does, or set another `port`"
        ) from error
    with server:
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = server.accept()[0]
            except TimeoutError:
                who = ", ".join(f"node {number}" for number in sorted(missing))
                raise NodesError(f"waited {seconds:.0f} s at {address}, port {port}, for {who}") from None
            if (number := _number(connection)) in missing:
                missing.discard(number)
                connections.append(connection)
            else:
                connection.close()
    for connection in connections:
        with connection:
            connection.sendall(_ALL_HERE)


def _number(connection: socket.socket) -> int | None:
    """The number that a node sends; None for anything else that connects to the port."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        return int(connection.recv(16))
    except (OSError, ValueError):
        return None


def _go_to_first(node: int, address: str, port: int, seconds: float) -> None:
    with _reach(address, port, seconds) as first:
        first.settimeout(2 * seconds)  # longer than node 0 waits, which knows who is missing
        first.sendall(f"{node}".encode())
        if first.recv(len(_ALL_HERE)) != _ALL_HERE:
            raise NodesError(f"node 0 at `address: {address}`, port {port}, gave up while it waited for others")


def _reach(address: str, port: int, seconds: float) -> socket.socket:
    """Connect, with retries, since node 0 may listen a little later."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodesError(
                    f"could not reach node 0 at `address: {address}`, port {port}, in {seconds:.0f} s: {error}; the "
                    "machines need a network without a firewall between them"
                ) from error
            time.sleep(_RETRY_SECONDS)


def _listen(address: str, port: int) -> socket.socket:
    ip = min(_resolve(address), key=lambda found: ":" in found)
    return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)


def _resolve(address: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise NodesError(f"`address: {address}` is unknown there: {error}") from error
