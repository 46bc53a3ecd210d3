"""The machines a job can run on: `nodes.yaml` in PEDIGREE_HOME. They are the platform's; a recipe says only how many.

    nodes:
      - address: 10.0.0.1                                 # this machine
      - {run: ssh -T gpu-2, address: 10.0.0.2}

A node is a *command prefix*: in front of a command, it runs that command on the machine, with standard input and output
connected. `ssh -T gpu-2`, `srun --nodes=1 --ntasks=1 --nodelist=gpu-2`, `docker exec -i trainer` are such prefixes. Some give
their arguments to a shell, joined by spaces, others do not; so what follows one is plain words only.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StringConstraints, ValidationError, field_validator

from training.contract.errors import NodesError
from training.contract.fields import Section

NODES_FILE = "nodes.yaml"
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]
_EXAMPLE = """\
    nodes:
      - address: 10.0.0.1                          # this machine; the address at which the others reach it
      - {run: ssh -T gpu-2, address: 10.0.0.2}"""


class Node(Section):
    """A machine: how to run a command there, where the other machines reach it, and its Python of this environment."""

    run: tuple[str, ...] = ()
    address: Address
    python: Annotated[str, Field(validate_default=True)] = sys.executable

    @field_validator("run", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("python")
    @classmethod
    def _plain(cls, value: str) -> str:
        if shlex.quote(value) != value:
            raise ValueError("a shell would not take this path as it is; give one of plain characters, such as a link")
        return value

    def __str__(self) -> str:
        return f"`{shlex.join(self.run)}`" if self.run else "this machine"


class Nodes(Section):
    """Machines in the order of their ranks; torchrun's processes meet at `port` of the first one."""

    port: Annotated[int, Field(ge=1, lt=2**16)] = 29400
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]


def take_nodes(path: Path, count: int) -> Nodes:
    """The first `count` machines in the file. Raises NodesError if there are fewer, or the file is none or not right."""
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
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NodesError(f"{path} cannot be read: {error}") from error
    try:
        return Nodes.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["input"], fault["msg"]) for fault in error.errors())
        raise NodesError(f"{path}: {faults}. Expected for example\n{_EXAMPLE}") from None


def _fault(place: tuple[int | str, ...], value: Any, message: str) -> str:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    told = message if message == "Field required" else f"{value!r}: {message}"
    return f"`{field}`: {told}" if field else told
