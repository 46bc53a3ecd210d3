"""The machines that jobs run on: `nodes.yaml` in PEDIGREE_HOME. The platform lists them; a recipe only says how many.

    nodes:
      - address: 10.0.0.1                                 # this machine
      - {run: ssh -T gpu-2, address: 10.0.0.2}

A node is reached by a *command prefix*: in front of a command, it runs that command on the machine, with standard input and
output connected. `ssh -T gpu-2`, `srun --nodes=1 --ntasks=1 --nodelist=gpu-2`, `docker exec -i trainer` are such prefixes. Some
pass their arguments to a shell, joined by spaces, others do not; so only plain words may follow one.

Where a scheduler chooses other machines each time, a command lists them instead, and one prefix serves for all:

    hosts:
      listed_by: scontrol show hostnames
      run: srun --overlap --nodes=1 --ntasks=1 --nodelist={host}
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from training.contract.config.fields import ConfigSection, StrictModel
from training.contract.errors import NodesError

NODES_FILE = "nodes.yaml"
_HOST = "{host}"
_LISTING_SECONDS = 30


def _split(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _plain(value: str) -> str:
    if shlex.quote(value) != value:
        raise ValueError("a shell would not take this path as it is; give one of plain characters, such as a link")
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]
Python = Annotated[str, AfterValidator(_plain), Field(validate_default=True)]
Port = Annotated[int, Field(ge=1, lt=2**16)]
_EXAMPLE = """\
    nodes:
      - address: 10.0.0.1                          # this machine; the address at which the others reach it
      - {run: ssh -T gpu-2, address: 10.0.0.2}"""


class Node(ConfigSection):
    """A machine: how to run a command there, where the other machines reach it, and its Python of this environment."""

    run: Words = ()
    address: Address
    python: Python = sys.executable

    def __str__(self) -> str:
        return f"`{shlex.join(self.run)}`" if self.run else "this machine"


class Hosts(ConfigSection):
    """Machines that differ by their names, which the command `listed_by` prints; {host} stands for each of them."""

    listed_by: Annotated[Words, Field(min_length=1)]
    run: Words
    address: str = _HOST
    python: Python = sys.executable

    @field_validator("run")
    @classmethod
    def _differing(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not any(_HOST in word for word in value):
            raise ValueError(f"expected {_HOST} in it, which stands for the name of each host")
        return value

    def machines(self) -> tuple[Node, ...]:
        """In the order of the names. Raises NodesError if there is none, ValidationError for an impossible name."""
        return tuple(
            Node(
                run=tuple(word.replace(_HOST, name) for word in self.run),
                address=self.address.replace(_HOST, name),
                python=self.python,
            )
            for name in self._names()
        )

    def _names(self) -> list[str]:
        command = f"`{shlex.join(self.listed_by)}`, which should list the hosts,"
        try:
            done = subprocess.run(
                self.listed_by,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LISTING_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodesError(f"{command} does not run: {error}") from error
        names = list(dict.fromkeys(done.stdout.split()))  # some list a host once for each of its slots
        if done.returncode or not names:
            said = done.stderr.strip() or "nothing"
            raise NodesError(
                f"{command} ended with status {done.returncode} and listed {len(names)}; it said: {said}. The hosts of "
                "an allocation can be listed only within it"
            )
        return names


class Nodes(StrictModel):
    """Machines in the order of their ranks; torchrun's processes meet at `port` of the first one."""

    port: Port
    nodes: tuple[Node, ...]


class NodesFile(ConfigSection):
    """The content of the file: machines one by one, or a command that lists their names."""

    port: Port = 29400
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)] = ()
    hosts: Hosts | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.nodes) == (self.hosts is not None):
            raise ValueError("expected either `nodes` or `hosts`")
        return self


def take_nodes(path: Path, count: int) -> Nodes:
    """The first `count` machines in the file. Raises NodesError if there are fewer, or the file is missing or wrong."""
    nodes = _read(path, count)
    if len(nodes.nodes) < count:
        listed = ", ".join(map(str, nodes.nodes))
        raise NodesError(
            f"`compute.nodes: {count}`, but {path} lists {len(nodes.nodes)} ({listed}); list another one there, "
            f"or set `compute.nodes` to at most {len(nodes.nodes)}"
        )
    return nodes.model_copy(update={"nodes": nodes.nodes[:count]})


def _read(path: Path, count: int) -> Nodes:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NodesError(
            f"`compute.nodes: {count}` needs machines, and there is no {path}; write it, for example\n{_EXAMPLE}"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NodesError(f"{path} cannot be read: {error}") from error
    try:
        file = NodesFile.model_validate(content)
        return Nodes(port=file.port, nodes=file.hosts.machines() if file.hosts else file.nodes)
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["input"], fault["msg"]) for fault in error.errors())
        raise NodesError(f"{path}: {faults}. Expected for example\n{_EXAMPLE}") from None


def _fault(place: tuple[int | str, ...], value: Any, message: str) -> str:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    told = message if message == "Field required" else f"{value!r}: {message}"
    return f"`{field}`: {told}" if field else told
