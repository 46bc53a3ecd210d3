"""A node as the conductor sees it, by what a prefix gives of its output."""

from pathlib import Path

import pytest

from training.launch.node import Order, Word
from training.launch.nodes_file import Node
from training.launch.remote_node import RemoteNode

ORDER = Order(
    node=1, addresses=("a", "b"), port=29400, module="m", job=Path("j"), sha256="", software={}, environment={}
)


def ended(said: str) -> RemoteNode:
    node = RemoteNode(Node(run=("sh", "-c", said), address="b"), ORDER)
    node.wait(60)
    return node


def test_a_word_after_a_line_that_did_not_end(capfd: pytest.CaptureFixture[str]):
    """A bar of progress, whose last state stays without an end of line, and what the node says then."""
    said = "read >/dev/null; echo before; printf '\\r50%%\\r100%%pedigree-node: ended 0\\n'"
    node = ended(said)
    assert (node.word, node.detail) == (Word.ENDED, "0")
    assert node.succeeded()
    assert node.last_lines[-1] == "100%"
    assert capfd.readouterr().out.endswith("100%pedigree-node: ended 0\n")


def test_a_status_that_the_prefix_keeps_to_itself_counts():
    """Both commands end with status 0; what ran on the node did in one of them only."""
    words = "read >/dev/null; echo pedigree-node: ended"
    assert [ended(f"{words} {status}").succeeded() for status in (0, 1)] == [True, False]


def test_of_what_a_node_said_the_end_is_told():
    problem = ended("read >/dev/null; for n in 1 2 3 4 5 6 7; do echo line $n; done").problem()
    assert problem is not None and "it said: line 3 / line 4 / line 5 / line 6 / line 7. The prefix" in problem
