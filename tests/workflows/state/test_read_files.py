"""Every file that is read or shipped is in the table of the documentation, and so in a key.

The oracle is the kernel: inotify reports every opening of a file by any process and any library.
"""

import ctypes
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from assets.pipeline.graph import GRAPH
from tests.factories import write_inputs
from tests.workflows.homes import ROOT, write_recipe
from tests.workflows.in_process import run_in
from tests.workflows.state.test_truth_table import PLAIN

pytestmark = pytest.mark.slow

_OPENED, _NONBLOCK = 0x20, 0o4000  # IN_OPEN, IN_NONBLOCK of inotify(7)
_HEAD = struct.Struct("iIII")
# Other files of published folders. None of them may have an effect.
OTHERS = (
    "README.md", "LICENSE", "pytorch_model.bin", "training_args.bin", "optimizer.pt", "trainer_state.json", "model.onnx",
    "consolidated.safetensors.txt", "modeling_own.py", "tokenizer.py", "params.json", "special.jinja", "flax_model.msgpack",
)  # fmt: skip


def table() -> dict[str, tuple[str, set[str]]]:
    """Return, for each file name or pattern: its effect, and the assets with the file in their keys."""
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    found: dict[str, tuple[str, set[str]]] = {}
    for files, effect, keys in re.findall(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE):
        for name in re.findall(r"`([^`]+\.(?:json|safetensors|txt|model|jinja))`", files):
            effects, before = found.get(name, ("", set()))
            found[name] = effects + effect, before | (set(re.findall(r"`(\w+)`", keys)) & GRAPH.keys())
    return found


@contextmanager
def opened(folders: list[Path]) -> Iterator[set[str]]:
    """Return the relative names of all files in `folders` that are opened within the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_NONBLOCK)
    watches = {libc.inotify_add_watch(descriptor, os.fsencode(each), _OPENED): each for each in folders}
    assert -1 not in watches, os.strerror(ctypes.get_errno())
    names: set[str] = set()
    try:
        yield names
        for watch, name in _events(descriptor):
            if name and (watches[watch] / name).is_file():
                names.add((watches[watch] / name).relative_to(folders[0]).as_posix())
    finally:
        os.close(descriptor)


def _events(descriptor: int) -> Iterator[tuple[int, str]]:
    while True:
        try:
            content = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return
        at = 0
        while at < len(content):
            watch, _, _, size = _HEAD.unpack_from(content, at)
            at += _HEAD.size
            yield watch, content[at : at + size].split(b"\0")[0].decode()
            at += size


def write_everything(folder: Path) -> None:
    """Write a base in several files, with every kind of file of the table, and with other files."""
    write_inputs(folder)
    base = folder / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="12KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    for name, content in {
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "processor_config.json": "{}",
    }.items():
        (base / name).write_text(content)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for name in OTHERS:
        (base / name).write_text("{}")


def test_every_opened_file_is_in_the_table(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("read")
    attributes = {**PLAIN, "training": {**PLAIN["training"], "max_steps": 1}}
    folder = write_recipe(place / "recipes" / "every", attributes)
    write_everything(folder)
    base = folder / "base"
    with (
        opened([base, base / "additional_chat_templates"]) as names,
        run_in(place, {"every": attributes}, write=lambda folder: None) as baseline,
    ):
        version = baseline.services.registry.resolve("models:/plain/1")
        shipped = {path.relative_to(version).as_posix() for path in version.rglob("*") if path.is_file()}
    known = table()
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in known)} == set()
    assert {"config.json", "tokenizer.json", "processor_config.json", "generation_config.json"} <= names
    assert "additional_chat_templates/rag.jinja" in names, "the watch includes folders below"
    for name in shipped - {"README.md"}:  # the model card is made anew
        effects = " ".join(effect for pattern, (effect, _) in known.items() if fnmatch(name, pattern))
        assert "shipped" in effects or "weights" in effects, name
    assert (shipped - {"README.md"}).isdisjoint(OTHERS) and "processor_config.json" in shipped


def test_every_file_of_the_table_is_in_a_key() -> None:
    known = table()
    assert len(known) > 15 and all(keys for _, keys in known.values())
    assert known["generation_config.json"][1] == {"evaluation_spec", "release_spec"}


def test_inotify_reports_files_opened_by_native_libraries(tmp_path: Path) -> None:
    """A watch that sees nothing would make the test above pass."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    with opened([tmp_path]) as names, pytest.raises(Exception, match="Model missing"):
        Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert names == {"tokenizer.json"}
