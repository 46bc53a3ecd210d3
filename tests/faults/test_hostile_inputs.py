"""Inputs that try to exhaust memory or time, to run code, or to write elsewhere. Each is refused with a code."""

import gzip
import json
import os
import pickle
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from assets.pipeline.pipeline import Services
from tests.factories import write_inputs
from tests.workflows.homes import write_recipe
from tests.workflows.in_process import services_in
from training.contract.errors import PedigreeError, code_of
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.long

RECIPE: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}], "validation_fraction": 0.3},
    "reference": {"model": "./base"},
    "release": {"model_name": "hostile"},
    "compute": {"device": "cpu"},
}
GIB = 1 << 30
MOST_MIB = 2500  # of the process with the job, which takes 600 before it, and of each child
MARK = "executed"


@dataclass(frozen=True)
class Hostile:
    """`write` changes the folder of a valid recipe. `code`: of the error; `dropped`: the row's reason, if the run succeeds."""

    write: Callable[[Path], object]
    code: str = ""
    dropped: str = ""


def rows(content: bytes) -> Callable[[Path], None]:
    """Return a writer of a data file of these lines after 24 valid pairs."""

    def write(folder: Path) -> None:
        with open(folder / "preferences.jsonl", "ab") as file:
            file.write(content + b"\n")

    return write


def data(name: str, content: bytes) -> Callable[[Path], None]:
    """Return a writer of a recipe whose only data file is `name`."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)
        write_recipe(folder, RECIPE | {"data": {"sources": [{"path": name}]}})

    return write


def huge_row(folder: Path) -> None:
    """Write a row of a gibibyte between valid pairs, 5 MB when compressed."""
    with gzip.open(folder / "huge.jsonl.gz", "wb", compresslevel=1) as file:
        file.write((folder / "preferences.jsonl").read_bytes())
        file.write(b'{"prompt": "Why?", "chosen": "')
        for _ in range(GIB >> 20):
            file.write(b"a" * (1 << 20))
        file.write(b'", "rejected": "No."}\n')
    write_recipe(folder, RECIPE | {"data": {"sources": [{"path": "huge.jsonl.gz"}], "validation_fraction": 0.3}})


def nul_bomb(folder: Path) -> None:
    with gzip.open(folder / "nul.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(GIB >> 20):
            file.write(bytes(1 << 20))
    write_recipe(folder, RECIPE | {"data": {"sources": [{"path": "nul.jsonl.gz"}]}})


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "base/chat_template.jinja").write_text(text)


def defs(text: str) -> Callable[[Path], None]:
    """Return a writer of a recipe of this text; RECIPE stands for a valid one."""

    def write(folder: Path) -> None:
        valid = (folder / "defs.yaml").read_text()
        (folder / "defs.yaml").write_text(text.replace("RECIPE", valid))

    return write


def attributes(**sections: Any) -> Callable[[Path], object]:
    return lambda folder: write_recipe(folder, RECIPE | sections)


def weights(change: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: change(folder / "base/model.safetensors")


def wrong_header_length(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 1 << 50) + file.read_bytes()[8:])


def wrong_offsets(file: Path) -> None:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"] = [0, 1 << 40]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def not_finite(file: Path) -> None:
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor.flat[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


def without_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file, metadata={"format": "pt"})


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


def pickled(folder: Path) -> None:
    (folder / "base/model.safetensors").unlink()
    (folder / "base/pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))


def own_code(folder: Path) -> None:
    config = json.loads((folder / "base/config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["Own"],
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "base/config.json").write_text(json.dumps(config))
    (folder / "base/own.py").write_text(f"open({MARK!r}, 'w').close()\n")


def enormous_model(folder: Path) -> None:
    config = json.loads((folder / "base/config.json").read_text())
    config |= {"hidden_size": 1 << 20, "intermediate_size": 1 << 22}
    (folder / "base/config.json").write_text(json.dumps(config))


def link_loop(folder: Path) -> None:
    (folder / "loop").mkdir()
    (folder / "loop/loop").symlink_to(folder / "loop")
    shutil.copy(folder / "preferences.jsonl", folder / "loop/a.jsonl")
    write_recipe(folder, RECIPE | {"data": {"sources": [{"path": "loop"}], "validation_fraction": 0.3}})


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    write_recipe(folder, RECIPE | {"data": {"sources": [{"path": "pipe.jsonl"}]}})


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
PAIR = b'{"prompt": %s, "chosen": "Yes.", "rejected": "No."}'
LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLING = "{% set n = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}"
CELLS = b"prompt,chosen,rejected\n" + b"Why?,Yes.,No.\n" * 30
FAULTS = {
    # Data
    "a row of 1 GiB in a .jsonl.gz": Hostile(huge_row, dropped="enormous text"),
    "1 GiB of NUL in a .jsonl.gz": Hostile(nul_bomb, "no-readable-row"),
    "a text of 5 million characters": Hostile(rows(PAIR % (b'"' + b"x" * 5_000_000 + b'"')), dropped="enormous text"),
    "JSON nested 100,000 times": Hostile(rows(PAIR % (b"[" * 100_000 + b"]" * 100_000)), dropped="bad JSON"),
    "a number of a million digits": Hostile(rows(PAIR % (b"9" * 1_000_000)), dropped="bad JSON"),
    "a key that appears twice": Hostile(
        rows(b'{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}'), dropped="duplicate key"
    ),
    "NaN in a row": Hostile(rows(PAIR % b"NaN"), dropped="bad JSON"),
    "a lone surrogate": Hostile(rows(PAIR % b'"\\ud800"'), dropped="invalid unicode"),
    "bytes that are not UTF-8": Hostile(rows(PAIR % b'"\xff\xfe"'), dropped="invalid unicode"),
    "a NUL character": Hostile(rows(PAIR % b'"a\\u0000b"'), dropped="NUL character"),
    "a truncated .gz": Hostile(data("cut.jsonl.gz", gzip.compress(os.urandom(100_000))[:5000]), "unreadable-file"),
    "a .gz that is none": Hostile(data("no.jsonl.gz", b"not compressed at all, only text\n" * 9), "unreadable-file"),
    "a corrupt .parquet": Hostile(data("bad.parquet", b"PAR1" + os.urandom(4000) + b"PAR1"), "unreadable-table"),
    "an .arrow that states a huge length": Hostile(
        data("bad.arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64)), "unreadable-table"
    ),
    "a CSV cell with an open quote": Hostile(data("bad.csv", CELLS + b'"' + b"x" * 1_000_000), "invalid-csv"),
    "a JSON list that ends early": Hostile(
        data("bad.json", b'[{"prompt": "a", "chosen": "b", "rejected": "c"},'), "incomplete-json"
    ),
    "a folder that links to itself": Hostile(link_loop),
    "a pipe instead of a file": Hostile(pipe, "no-files"),
    # Templates
    "a template with three nested loops": Hostile(template(LOOPS), "template-limit"),
    "a template of 10 billion characters": Hostile(template("{{ 'a' * 10**10 }}"), "template-limit"),
    "a template that doubles a text 60 times": Hostile(template(DOUBLING), "template-limit"),
    "a template with range(10**9)": Hostile(template("{% for i in range(10**9) %}{% endfor %}"), "template-fails"),
    "a template that reads `__class__.__mro__`": Hostile(template("{{ ''.__class__.__mro__ }}"), "template-fails"),
    "a template that includes a file": Hostile(template("{% include '/etc/passwd' %}"), "template-fails"),
    "a template that takes the time": Hostile(template("{{ strftime_now('%f') }}{{ messages }}"), "template-random"),
    # Recipes
    "aliases of 9**12 items": Hostile(defs(ALIASES + "RECIPE"), "too-many-values"),
    "aliases of 9**12 items in `attributes`": Hostile(
        defs("RECIPE  bomb:\n" + "".join(f"    {line}\n" for line in ALIASES.splitlines())), "too-many-values"
    ),
    "`!!python/object` in a recipe": Hostile(
        defs(f"RECIPE  bomb: !!python/object/apply:os.system ['touch {MARK}']\n"), "wrong-yaml-tag"
    ),
    "a second YAML document": Hostile(defs("RECIPE---\ntype: other\n"), "foreign-content"),
    "lists nested 10,000 times": Hostile(
        defs("RECIPE  bomb: " + "[" * 10_000 + "]" * 10_000 + "\n"), "nested-too-deep"
    ),
    "model_name: ../../../evil": Hostile(attributes(release={"model_name": "../../../evil"}), "invalid-value"),
    "a source named `..`": Hostile(
        attributes(data={"sources": [{"path": "preferences.jsonl", "name": ".."}]}), "invalid-value"
    ),
    # Models
    "weights as a pickle": Hostile(pickled, "no-weights"),
    "a model with code of its own": Hostile(own_code, "custom-code"),
    "a header of 2**50 bytes": Hostile(weights(wrong_header_length), "bad-safetensors"),
    "offsets beyond the file": Hostile(weights(wrong_offsets), "bad-safetensors"),
    "a weights file cut in half": Hostile(
        weights(lambda file: os.truncate(file, file.stat().st_size // 2)), "bad-safetensors"
    ),
    "weights that are not finite": Hostile(weights(not_finite), "non-finite-logprob"),
    "weights without a tensor": Hostile(weights(without_a_tensor), "weights-mismatch"),
    "a config that states another size": Hostile(enormous_model, "model-load"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (recipe := tmp_path / "hostile").mkdir()
    write_inputs(recipe)
    write_recipe(recipe, RECIPE)
    monkeypatch.chdir(tmp_path)  # of code that should not be executed
    return recipe


@pytest.mark.parametrize("name", FAULTS)
def test_hostile_input_is_refused(name: str, folder: Path, tmp_path: Path, record: Callable[..., None]) -> None:
    hostile = FAULTS[name]
    hostile.write(folder)
    services, started = services_in(tmp_path / "home"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests
    message = dropped = ""
    try:
        with dg.DagsterInstance.ephemeral() as instance:
            report = materialize(load_recipe(folder), services, instance, "reference_logprobs")
        message = next((str(asset.error) for asset in report.assets if asset.error), "")
        dropped = _quarantined(services, report.assets)
    except PedigreeError as error:
        message = str(error)
    assert code_of(message) == (hostile.code or None), message
    assert hostile.dropped in dropped
    assert not (tmp_path / MARK).exists() and not list(folder.rglob(MARK))
    assert _peak_mib() < MOST_MIB
    outcome = (
        f"`[{hostile.code}]`" if hostile.code else f"row dropped: {hostile.dropped}" if hostile.dropped else "read once"
    )
    record("inputs", name, outcome, time.monotonic() - started)


def _quarantined(services: Services, assets: Any) -> str:
    fingerprint = next((a.fingerprint for a in assets if a.asset == "raw_preferences"), None)
    return str(services.store.open("raw_preferences", fingerprint).stored_details) if fingerprint else ""


def _peak_mib() -> int:
    """Return the largest peak of memory of this process and of its ended children, in MiB."""
    own = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) >> 10


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no child outlives the test."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
