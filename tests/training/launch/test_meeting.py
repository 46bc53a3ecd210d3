"""Machines that meet, as threads with sockets of their own on the loopback interface."""

import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from training.contract.errors import NodesError
from training.launch.meeting import interface_of, meet

HERE = "127.0.0.1"


@pytest.fixture
def together(free_port: Callable[[], int]) -> Callable[..., list[str]]:
    """How the meeting ended for each of the `nodes` of three machines that come; `then`, done once the first one has come."""

    def run(*nodes: int, then: Callable[[int], object] = lambda port: None) -> list[str]:
        port, ends = free_port(), {}

        def come(node: int) -> None:
            try:
                meet(node, [HERE] * 3, port, seconds=0.8)
                ends[node] = "met"
            except NodesError as error:
                ends[node] = str(error).replace(str(port), "PORT")

        threads = [threading.Thread(target=come, args=(node,)) for node in nodes]
        threads[0].start()
        then(port)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        return [ends[node] for node in nodes]

    return run


def stranger_at(port: int) -> socket.socket:
    """A connection of somebody who does not belong to the meeting, as soon as the first machine listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((HERE, port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"nobody listens at port {port}"
            time.sleep(0.01)


def test_all_have_met(together: Callable[..., list[str]]):
    assert together(2, 0, 1) == ["met", "met", "met"]


def test_who_is_missing_is_named_and_nobody_goes_on(together: Callable[..., list[str]]):
    first, second = together(0, 1)
    assert "1 s at 127.0.0.1, port PORT, for node 2 [nodes]" in first
    assert second.startswith("node 0 at `address: 127.0.0.1`, port PORT") and second.endswith("[nodes]")


def test_a_stranger_is_not_taken_for_a_node(together: Callable[..., list[str]]):
    def knock(port: int) -> None:
        with stranger_at(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")

    (said,) = together(0, then=knock)
    assert "for node 1, node 2 [nodes]" in said


def test_a_stranger_that_hangs_up_changes_nothing(together: Callable[..., list[str]]):
    """As a check of a port's health does: it resets the connection, so that whoever writes to it is told of an error."""

    def knock(port: int) -> None:
        with stranger_at(port) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert together(0, 1, 2, then=knock) == ["met", "met", "met"]


def test_a_first_node_that_cannot_be_reached_is_named(together: Callable[..., list[str]]):
    (said,) = together(1)
    assert "node 0 at `address: 127.0.0.1`, port PORT, in 1 s: " in said


def test_a_port_that_is_taken(free_port: Callable[[], int]):
    port = free_port()
    with (
        socket.create_server((HERE, port)),
        pytest.raises(NodesError, match=rf"port {port}: Address already in use.*\[nodes\]"),
    ):
        meet(0, [HERE, HERE], port)


def test_the_interface_that_has_an_address():
    """Loopback is `lo` on Linux; 192.0.2.1 is set aside for documentation, and `.invalid` never resolves."""
    assert interface_of(HERE) == "lo"
    with pytest.raises(NodesError, match=r"`address: 192.0.2.1` .*lo 127.0.0.1.*\[nodes\]"):
        interface_of("192.0.2.1")
    with pytest.raises(NodesError, match=r"`address: gpu.invalid` .*\[nodes\]"):
        interface_of("gpu.invalid")
