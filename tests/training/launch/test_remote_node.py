"""A node as the conductor sees it, by what a prefix gives of its output."""

from pathlib import Path

import pytest

from training.launch.node import Order, Word
from training.launch.nodes_file import Node
from training.launch.remote_node import RemoteNode

ORDER = Order(
    node=1, addresses=("a", "b"), port=29400, module="m", job=Path("j"), sha256="", software={}, environment={}
)


def test_a_word_after_a_line_that_did_not_end(capfd: pytest.CaptureFixture[str]):
    """A bar of progress, whose last state stays without an end of line, and what the node says then."""
    said = "read >/dev/null; echo before; printf '\\r50%%\\r100%%pedigree-node: ended 0\\n'"
    node = RemoteNode(Node(run=("sh", "-c", said), address="b"), ORDER)
    node.wait(60)
    assert (node.word, node.detail) == (Word.ENDED, "0")
    assert node.succeeded()
    assert node.last_lines[-1] == "100%"
    assert capfd.readouterr().out.endswith("100%pedigree-node: ended 0\n")
