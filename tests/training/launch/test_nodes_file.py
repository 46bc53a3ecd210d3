"""nodes.yaml: what it gives to a recipe that asks for so many nodes, and what it says when it does not."""

import sys
from pathlib import Path

import pytest

from training.contract.errors import NodesError
from training.launch.nodes_file import Node, take_nodes

TWO = """
nodes:
  - address: 10.0.0.1
  - {run: "ssh -T -i 'my key' gpu-2", address: gpu-2, python: /opt/python}
"""


def refusal(path: Path, count: int = 2) -> str:
    with pytest.raises(NodesError) as caught:
        take_nodes(path, count)
    return str(caught.value)


def test_the_first_so_many_nodes_in_their_order(tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text(TWO)
    first, second = take_nodes(file, 2).nodes
    assert first == Node(run=(), address="10.0.0.1", python=sys.executable)
    assert second == Node(run=("ssh", "-T", "-i", "my key", "gpu-2"), address="gpu-2", python="/opt/python")
    assert take_nodes(file, 1).nodes == (first,)
    assert take_nodes(file, 2).port == 29400


def test_more_nodes_than_are_listed(tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text(TWO)
    assert refusal(file, 3) == (
        f"`compute.nodes: 3`, but {file} lists 2 (this machine, `ssh -T -i 'my key' gpu-2`); list another one there, or set "
        "`compute.nodes` to at most 2"
    )


def test_without_a_file_an_example_is_shown(tmp_path: Path):
    message = refusal(tmp_path / "nodes.yaml")
    assert message.startswith(f"`compute.nodes: 2` needs machines, and there is no {tmp_path / 'nodes.yaml'}; write it")
    (tmp_path / "nodes.yaml").write_text(message.partition("\n")[2])
    assert [node.run for node in take_nodes(tmp_path / "nodes.yaml", 2).nodes] == [(), ("ssh", "-T", "gpu-2")]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nodes: [{run: ssh gpu-1}]", "`nodes[0].address`: Field required"),
        ("nodes: [{address: 10.0.0.1, host: a}]", "`nodes[0].host`: 'a': Extra inputs are not permitted"),
        ("nodes: [{address: 'a b'}]", "`nodes[0].address`: 'a b': String should match"),
        ("nodes: [{address: a, run: 'ssh \"a'}]", "`nodes[0].run`: 'ssh \"a': Value error, No closing quotation"),
        (
            "nodes: [{address: a, python: /a b/python}]",
            "`nodes[0].python`: '/a b/python': Value error, a shell would not",
        ),
        ("nodes: []", "`nodes`: []: Tuple should have at least 1 item"),
        ("port: 70000\nnodes: [{address: a}]", "`port`: 70000: Input should be less than 65536"),
        ("- address: a", "nodes.yaml: [{'address': 'a'}]: Input should be"),
        ("nodes: [", "cannot be read: while parsing a flow node"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, fault: str):
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(str(file)) and fault in message
