"""Edits of a recipe and its surroundings by a user or a machine. Each is a function that changes a `Sandbox`."""

import json
import locale
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import training.contract.identity.software
from assets.pipeline.graph import GRAPH
from training.contract.protocol import prequential as prequential_settings
from training.contract.protocol import settings as settings_models
from training.contract.store import logprob_cache


@dataclass
class Sandbox:
    """A copy of the recipe's folder that may be changed, its home, and the environment of the process."""

    folder: Path
    home: Path
    patch: pytest.MonkeyPatch

    @property
    def data(self) -> Path:
        return self.folder / "preferences.jsonl"

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def set(self, field: str, value: Any) -> None:
        """Write `value` into the recipe's file at the dotted name `field`."""
        path = self.folder / "defs.yaml"
        recipe = yaml.safe_load(path.read_text())
        *sections, name = field.split(".")
        at = recipe["attributes"]
        for section in sections:
            at = at[int(section)] if isinstance(at, list) else at.setdefault(section, {})
        at[name] = value
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))


Edit = Callable[[Sandbox], None]


@dataclass(frozen=True)
class SetFields:
    """An edit that sets fields of the recipe, by their dotted names."""

    values: dict[str, Any]

    def __call__(self, sandbox: Sandbox) -> None:
        for name, value in self.values.items():
            sandbox.set(name, value)


def field(name: str, value: Any) -> SetFields:
    return SetFields({name: value})


def fields(section: str, values: dict[str, Any]) -> SetFields:
    """Set several fields of a section."""
    return SetFields({f"{section}.{name}": value for name, value in values.items()})


def both(first: Edit, second: Edit) -> Edit:
    def edit(sandbox: Sandbox) -> None:
        first(sandbox)
        second(sandbox)

    return edit


def code_version(asset: str, version: str = "another") -> Edit:
    return lambda sandbox: sandbox.patch.setitem(GRAPH, asset, replace(GRAPH[asset], version=version))


def another_scoring(sandbox: Sandbox) -> None:
    """Change the version of scoring wherever it was imported, as a release with another forward pass does."""
    for module in (logprob_cache, prequential_settings, settings_models):
        sandbox.patch.setattr(module, "SCORING_VERSION", "another")


# Preference data


def data_lines(change: Callable[[list[str]], list[str]]) -> Edit:
    def edit(sandbox: Sandbox) -> None:
        sandbox.data.write_text("".join(change(sandbox.data.read_text().splitlines(keepends=True))))

    return edit


def conversation(prompt: str, chosen: str, rejected: str) -> str:
    sides = {"prompt": ("user", prompt), "chosen": ("assistant", chosen), "rejected": ("assistant", rejected)}
    return json.dumps({side: [{"role": role, "content": text}] for side, (role, text) in sides.items()}) + "\n"


def reword(number: int) -> Callable[[list[str]], list[str]]:
    """Change the rejected answer of row `number`."""

    def change(lines: list[str]) -> list[str]:
        row = json.loads(lines[number])
        row["rejected"][0]["content"] += " Or so."
        return [*lines[:number], json.dumps(row) + "\n", *lines[number + 1 :]]

    return change


def swap_sides(number: int) -> Callable[[list[str]], list[str]]:
    """Swap the chosen and the rejected answer of row `number`."""

    def change(lines: list[str]) -> list[str]:
        row = json.loads(lines[number])
        swapped = {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]}
        return [*lines[:number], json.dumps(swapped) + "\n", *lines[number + 1 :]]

    return change


def rename_data(sandbox: Sandbox) -> None:
    sandbox.data.rename(sandbox.folder / "others.jsonl")
    sandbox.set("data.sources.0.path", "others.jsonl")


def rename_extension(sandbox: Sandbox) -> None:
    """Keep the bytes. The rows stay the same here; a JSON list that is read by lines would give other rows."""
    sandbox.data.rename(sandbox.folder / "preferences.json")
    sandbox.set("data.sources.0.path", "preferences.json")


def move_data(sandbox: Sandbox) -> None:
    (sandbox.folder / "deep" / "down").mkdir(parents=True)
    sandbox.data.rename(sandbox.folder / "deep" / "down" / sandbox.data.name)
    sandbox.set("data.sources.0.path", "deep/**/*.jsonl")


def rewrite_data(sandbox: Sandbox) -> None:
    rows = [json.loads(line) for line in sandbox.data.read_text().splitlines()]
    sandbox.data.write_text("".join(json.dumps(dict(reversed(row.items())), indent=None) + " \n" for row in rows))


def touch_data(sandbox: Sandbox) -> None:
    os.utime(sandbox.data, (1, 1))


def data_as_parquet(sandbox: Sandbox) -> None:
    rows = [json.loads(line) for line in sandbox.data.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), sandbox.folder / "preferences.parquet")
    sandbox.set("data.sources.0.path", "preferences.parquet")


def split_data(sandbox: Sandbox) -> None:
    lines = sandbox.data.read_text().splitlines(keepends=True)
    (sandbox.folder / "parts").mkdir()
    for name, part in (("1.jsonl", lines[:10]), ("2.jsonl", lines[10:])):
        (sandbox.folder / "parts" / name).write_text("".join(part))
    sandbox.set("data.sources.0.path", "parts")


def hold_out_a_file(sandbox: Sandbox) -> None:
    split_data(sandbox)
    sandbox.set("data.sources", [{"path": "parts/1.jsonl"}, {"path": "parts/2.jsonl", "held_out": True}])


# Tokenizer and chat template


def move_tokenizer(sandbox: Sandbox) -> None:
    (sandbox.folder / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (sandbox.base / name).rename(sandbox.folder / "words" / name)
    sandbox.set("tokenization.tokenizer", "words")


def respell_tokenizer(sandbox: Sandbox) -> None:
    path = sandbox.base / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=None, sort_keys=True))


def retokenizer(change: Callable[[PreTrainedTokenizerFast], None]) -> Edit:
    """Load the tokenizer, change it, and save it again."""

    def edit(sandbox: Sandbox) -> None:
        tokenizer = AutoTokenizer.from_pretrained(sandbox.base)
        change(tokenizer)
        tokenizer.save_pretrained(sandbox.base)

    return edit


def pad_with_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = "<|end|>"


def add_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)


def end_with_the_user(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = "<|user|>"


def template(change: Callable[[str], str]) -> Edit:
    def edit(sandbox: Sandbox) -> None:
        path = sandbox.base / "chat_template.jinja"
        path.write_text(change(path.read_text()))

    return edit


def space_after_roles(text: str) -> str:
    return text.replace("+ '|>' }}", "+ '|> ' }}")


def space_after(word: str) -> Callable[[str], str]:
    """Add a space to the end of every message that contains `word`."""
    spaced = f"message['content'] + (' ' if '{word}' in message['content'] else '') +"
    return lambda text: text.replace("message['content'] +", spaced)


def template_in_a_file(sandbox: Sandbox) -> None:
    shutil.copy(sandbox.base / "chat_template.jinja", sandbox.folder / "own.jinja")
    sandbox.set("tokenization.chat_template", "own.jinja")


# The base model


def config(name: str, value: Any) -> Edit:
    def edit(sandbox: Sandbox) -> None:
        path = sandbox.base / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}, indent=2))

    return edit


def flip_a_bit(sandbox: Sandbox) -> None:
    """Flip the lowest bit of the last weight in the file, a little-endian float32: one part in ten million."""
    path = sandbox.base / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def move_model(sandbox: Sandbox) -> None:
    sandbox.base.rename(sandbox.folder / "elsewhere")
    sandbox.set("reference.model", "./elsewhere")


def reshard(sandbox: Sandbox) -> None:
    model = AutoModelForCausalLM.from_pretrained(sandbox.base)
    (sandbox.base / "model.safetensors").unlink()
    model.save_pretrained(sandbox.base, max_shard_size="12KB")
    assert len(list(sandbox.base.glob("*.safetensors"))) > 1


def rewrite_weights(sandbox: Sandbox) -> None:
    """Save the same tensors in another order, with other metadata: other bytes, the same model."""
    path = sandbox.base / "model.safetensors"
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), path, metadata={"format": "pt", "saved_by": "someone else"})


def halve_precision(sandbox: Sandbox) -> None:
    path = sandbox.base / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def rename_model(sandbox: Sandbox) -> None:
    """Change the names and versions that transformers writes into a config, and add a file that is not part of the model."""
    for name, value in (("_name_or_path", "somebody/else"), ("use_cache", False)):
        config(name, value)(sandbox)
    (sandbox.base / "README.md").write_text("a model\n")


def edit_generation(sandbox: Sandbox) -> None:
    """Make every token an end token and sample answers, in the file that only generation reads."""
    change_json(sandbox.base / "generation_config.json", do_sample=True, temperature=3.0, eos_token_id=list(range(200)))


def edit_sampling(sandbox: Sandbox) -> None:
    change_json(sandbox.base / "generation_config.json", do_sample=True, temperature=0.7)


def edit_padding(sandbox: Sandbox) -> None:
    change_json(sandbox.base / "generation_config.json", pad_token_id=1)


def add_processor(sandbox: Sandbox) -> None:
    (sandbox.base / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor", "size": 224}'
    )


def shorten_model_max_length(sandbox: Sandbox) -> None:
    change_json(sandbox.base / "tokenizer_config.json", model_max_length=128)


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


# Libraries and devices


def software(name: str) -> Edit:
    """Give a library another version without another behaviour."""

    def edit(sandbox: Sandbox) -> None:
        known = training.contract.identity.software._version
        called = {name: "99.0.0"}
        sandbox.patch.setattr(
            training.contract.identity.software, "_version", lambda library: called.get(library) or known(library)
        )

    return edit


def another_device(sandbox: Sandbox) -> None:
    sandbox.patch.setattr(training.contract.identity.software, "accelerator", lambda device: "NVIDIA H100 80GB HBM3")


# The environment of the process


def another_folder(sandbox: Sandbox) -> None:
    target = sandbox.folder.parent / "far" / "away" / sandbox.folder.name
    target.parent.mkdir(parents=True)
    sandbox.folder = sandbox.folder.rename(target)


def another_name(sandbox: Sandbox) -> None:
    sandbox.folder = sandbox.folder.rename(sandbox.folder.with_name("renamed"))


def another_home(sandbox: Sandbox) -> None:
    sandbox.home = Path(shutil.copytree(sandbox.home, sandbox.folder.parent / "other-home"))


def another_process(sandbox: Sandbox) -> None:
    """Be another user in another folder, a year later, in another time zone, with ASCII as the encoding of text."""
    sandbox.patch.setenv("HOME", str(sandbox.folder.parent))
    sandbox.patch.setenv("USER", "somebody")
    sandbox.patch.chdir(sandbox.folder.parent)
    sandbox.patch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    now = time.time
    sandbox.patch.setattr(time, "time", lambda: now() + 400 * 24 * 3600)
    sandbox.patch.setenv("LC_ALL", "C")
    sandbox.patch.setattr(locale, "getpreferredencoding", lambda do_setlocale=True: "ascii")


def rewrite_recipe(sandbox: Sandbox) -> None:
    """Add a comment, and reverse the order of the fields."""
    path = sandbox.folder / "defs.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["attributes"] = dict(reversed(recipe["attributes"].items()))
    path.write_text("# rewritten\n" + yaml.safe_dump(recipe, default_flow_style=True))
