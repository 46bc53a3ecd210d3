"""nodes.yaml: what it gives to a recipe that asks for so many nodes, and what it says when it does not."""

import sys
from pathlib import Path

import pytest

from training.contract.errors import NodesError, without_code
from training.launch.nodes_file import Node, take_nodes

HOSTS = """
hosts:
  listed_by: printf 'gpu-3\\ngpu-10\\ngpu-3\\ngpu-2\\n'
  run: srun --nodelist={host} env NAME={host}
  address: "{host}-ib"
  python: /opt/python
"""

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
    file.write_text(f"port: 1234{TWO}")
    assert take_nodes(file, 2).port == 1234


def test_more_nodes_than_are_listed(tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text(TWO)
    message = refusal(file, 3)
    assert f"`compute.nodes: 3`, but {file} lists 2 (this machine, `ssh -T -i 'my key' gpu-2`)" in message
    assert message.endswith("[nodes]")


def test_hosts_that_a_command_lists(tmp_path: Path):
    """In its order, each once, as a list of slots has a host several times."""
    file = tmp_path / "nodes.yaml"
    file.write_text(HOSTS)
    expected = [
        Node(run=("srun", f"--nodelist={n}", "env", f"NAME={n}"), address=f"{n}-ib", python="/opt/python")
        for n in ("gpu-3", "gpu-10", "gpu-2")
    ]
    assert take_nodes(file, 3).nodes == tuple(expected)
    assert take_nodes(file, 2).nodes == tuple(expected[:2])
    assert "lists 3 (`srun --nodelist=gpu-3 env NAME=gpu-3`, " in refusal(file, 4)
    file.write_text("hosts: {listed_by: echo gpu-1, run: 'ssh {host}'}")
    assert take_nodes(file, 1).nodes == (Node(run=("ssh", "gpu-1"), address="gpu-1"),)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("no-such-command hosts", "`no-such-command hosts`, which should list the hosts, does not run: [Errno 2]"),
        ("sh -c 'echo no job >&2; exit 4'", "ended with status 4 and listed 0; it said: no job."),
        ("sh -c 'echo gpu-1; exit 1'", "ended with status 1 and listed 1; it said: nothing."),
        ("true", "ended with status 0 and listed 0; it said: nothing. The hosts of an allocation can be"),
        ("echo 'gpu-[1-2]'", "`address`: 'gpu-[1-2]': String should match"),
    ],
)
def test_a_command_that_lists_no_hosts(tmp_path: Path, command: str, told: str):
    file = tmp_path / "nodes.yaml"
    file.write_text(f'hosts: {{listed_by: "{command}", run: "ssh {{host}}"}}')
    assert told in refusal(file)


def test_without_a_file_an_example_is_shown(tmp_path: Path):
    message = refusal(tmp_path / "nodes.yaml")
    first_line, _, example = without_code(message).partition("\n")
    assert all(value in first_line for value in ("`compute.nodes: 2`", str(tmp_path / "nodes.yaml")))
    (tmp_path / "nodes.yaml").write_text(example)
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
        ("port: 80", "nodes.yaml: {'port': 80}: Value error, expected either `nodes` or `hosts`"),
        ("nodes: [{address: a}]\nhosts: {listed_by: a, run: '{host}'}", "expected either `nodes` or `hosts`"),
        ("hosts: {listed_by: a, run: ssh gpu-1}", "`hosts.run`: 'ssh gpu-1': Value error, expected {host} in it"),
        ("hosts: {listed_by: '', run: '{host}'}", "`hosts.listed_by`: ''"),
        ("nodes: [", "cannot be read: while parsing a flow node"),
        ("nodes: [{address: 2026-13-45}]", "cannot be read: month must be in 1..12"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, fault: str):
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(str(file)) and fault in message
