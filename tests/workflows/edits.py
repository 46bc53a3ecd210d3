"""Edits of a recipe and its surroundings, each as a person or a machine would make it: a function that changes a `World`."""

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

import assets.pipeline.graph
import training.contract.identity.software
from assets.pipeline.graph import GRAPH
from training.contract.store import logprob_cache


@dataclass
class World:
    """A copy of the recipe's folder that may be changed, the home it is run in, and what else a process stands in."""

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


Edit = Callable[[World], None]


@dataclass(frozen=True)
class SetFields:
    """Other values for fields of the recipe, by their dotted names."""

    values: dict[str, Any]

    def __call__(self, world: World) -> None:
        for name, value in self.values.items():
            world.set(name, value)


def field(name: str, value: Any) -> SetFields:
    return SetFields({name: value})


def fields(section: str, values: dict[str, Any]) -> SetFields:
    """Several fields of a section at once."""
    return SetFields({f"{section}.{name}": value for name, value in values.items()})


def both(first: Edit, second: Edit) -> Edit:
    def edit(world: World) -> None:
        first(world)
        second(world)

    return edit


def code_version(asset: str, version: str = "another") -> Edit:
    return lambda world: world.patch.setitem(GRAPH, asset, replace(GRAPH[asset], version=version))


def another_scoring(world: World) -> None:
    """What a release does whose forward pass gives other figures: the constant, and what is read from it on import."""
    for module in (logprob_cache, assets.pipeline.graph):
        world.patch.setattr(module, "SCORING_VERSION", "another")


# Preference data


def data_lines(change: Callable[[list[str]], list[str]]) -> Edit:
    def edit(world: World) -> None:
        world.data.write_text("".join(change(world.data.read_text().splitlines(keepends=True))))

    return edit


def conversation(prompt: str, chosen: str, rejected: str) -> str:
    sides = {"prompt": ("user", prompt), "chosen": ("assistant", chosen), "rejected": ("assistant", rejected)}
    return json.dumps({side: [{"role": role, "content": text}] for side, (role, text) in sides.items()}) + "\n"


def reword(number: int) -> Callable[[list[str]], list[str]]:
    """Another rejected answer in row `number`."""

    def change(lines: list[str]) -> list[str]:
        row = json.loads(lines[number])
        row["rejected"][0]["content"] += " Or so."
        return [*lines[:number], json.dumps(row) + "\n", *lines[number + 1 :]]

    return change


def swap_sides(number: int) -> Callable[[list[str]], list[str]]:
    """What was chosen in row `number` is rejected, and the other way round."""

    def change(lines: list[str]) -> list[str]:
        row = json.loads(lines[number])
        swapped = {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]}
        return [*lines[:number], json.dumps(swapped) + "\n", *lines[number + 1 :]]

    return change


def rename_data(world: World) -> None:
    world.data.rename(world.folder / "others.jsonl")
    world.set("data.sources.0.path", "others.jsonl")


def rename_extension(world: World) -> None:
    """The bytes are the same, and so are the rows here; those of a JSON list that is read by lines would not be."""
    world.data.rename(world.folder / "preferences.json")
    world.set("data.sources.0.path", "preferences.json")


def move_data(world: World) -> None:
    (world.folder / "deep" / "down").mkdir(parents=True)
    world.data.rename(world.folder / "deep" / "down" / world.data.name)
    world.set("data.sources.0.path", "deep/**/*.jsonl")


def rewrite_data(world: World) -> None:
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    world.data.write_text("".join(json.dumps(dict(reversed(row.items())), indent=None) + " \n" for row in rows))


def touch_data(world: World) -> None:
    os.utime(world.data, (1, 1))


def data_as_parquet(world: World) -> None:
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), world.folder / "preferences.parquet")
    world.set("data.sources.0.path", "preferences.parquet")


def split_data(world: World) -> None:
    lines = world.data.read_text().splitlines(keepends=True)
    (world.folder / "parts").mkdir()
    for name, part in (("1.jsonl", lines[:10]), ("2.jsonl", lines[10:])):
        (world.folder / "parts" / name).write_text("".join(part))
    world.set("data.sources.0.path", "parts")


def hold_out_a_file(world: World) -> None:
    split_data(world)
    world.set("data.sources", [{"path": "parts/1.jsonl"}, {"path": "parts/2.jsonl", "held_out": True}])


# Tokenizer and chat template


def move_tokenizer(world: World) -> None:
    (world.folder / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (world.base / name).rename(world.folder / "words" / name)
    world.set("tokenization.tokenizer", "words")


def respell_tokenizer(world: World) -> None:
    path = world.base / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=None, sort_keys=True))


def retokenizer(change: Callable[[PreTrainedTokenizerFast], None]) -> Edit:
    """Load the tokenizer, change it, and save it again."""

    def edit(world: World) -> None:
        tokenizer = AutoTokenizer.from_pretrained(world.base)
        change(tokenizer)
        tokenizer.save_pretrained(world.base)

    return edit


def pad_with_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = "<|end|>"


def add_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)


def end_with_the_user(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = "<|user|>"


def template(change: Callable[[str], str]) -> Edit:
    def edit(world: World) -> None:
        path = world.base / "chat_template.jinja"
        path.write_text(change(path.read_text()))

    return edit


def space_after_roles(text: str) -> str:
    return text.replace("+ '|>' }}", "+ '|> ' }}")


def space_after(word: str) -> Callable[[str], str]:
    """A space before the end of every message that has the word."""
    spaced = f"message['content'] + (' ' if '{word}' in message['content'] else '') +"
    return lambda text: text.replace("message['content'] +", spaced)


def template_in_a_file(world: World) -> None:
    shutil.copy(world.base / "chat_template.jinja", world.folder / "own.jinja")
    world.set("tokenization.chat_template", "own.jinja")


# The base model


def config(name: str, value: Any) -> Edit:
    def edit(world: World) -> None:
        path = world.base / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}, indent=2))

    return edit


def flip_a_bit(world: World) -> None:
    """The lowest bit of the last weight in the file, a little-endian float32: one part in ten million."""
    path = world.base / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def move_model(world: World) -> None:
    world.base.rename(world.folder / "elsewhere")
    world.set("reference.model", "./elsewhere")


def reshard(world: World) -> None:
    model = AutoModelForCausalLM.from_pretrained(world.base)
    (world.base / "model.safetensors").unlink()
    model.save_pretrained(world.base, max_shard_size="12KB")
    assert len(list(world.base.glob("*.safetensors"))) > 1


def rewrite_weights(world: World) -> None:
    """The same tensors in another order, under other metadata: other bytes, the same model."""
    path = world.base / "model.safetensors"
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), path, metadata={"format": "pt", "saved_by": "someone else"})


def halve_precision(world: World) -> None:
    path = world.base / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def rename_model(world: World) -> None:
    """What transformers writes down of names and versions, and a file that is no part of the model."""
    for name, value in (("_name_or_path", "somebody/else"), ("use_cache", False)):
        config(name, value)(world)
    (world.base / "README.md").write_text("a model\n")


def edit_generation(world: World) -> None:
    """Every token is made an end, and answers are drawn by lot: in the file that only generation reads."""
    change_json(world.base / "generation_config.json", do_sample=True, temperature=3.0, eos_token_id=list(range(200)))


def edit_sampling(world: World) -> None:
    change_json(world.base / "generation_config.json", do_sample=True, temperature=0.7)


def edit_padding(world: World) -> None:
    change_json(world.base / "generation_config.json", pad_token_id=1)


def add_processor(world: World) -> None:
    (world.base / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor", "size": 224}')


def shorten_model_max_length(world: World) -> None:
    change_json(world.base / "tokenizer_config.json", model_max_length=128)


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


# Libraries and devices


def software(name: str) -> Edit:
    """A version of a library that is called otherwise, and does the same."""

    def edit(world: World) -> None:
        known = training.contract.identity.software._version
        called = {name: "99.0.0"}
        world.patch.setattr(
            training.contract.identity.software, "_version", lambda library: called.get(library) or known(library)
        )

    return edit


def another_device(world: World) -> None:
    world.patch.setattr(training.contract.identity.software, "accelerator", lambda device: "NVIDIA H100 80GB HBM3")


# What a process stands in


def another_folder(world: World) -> None:
    target = world.folder.parent / "far" / "away" / world.folder.name
    target.parent.mkdir(parents=True)
    world.folder = world.folder.rename(target)


def another_name(world: World) -> None:
    world.folder = world.folder.rename(world.folder.with_name("renamed"))


def another_home(world: World) -> None:
    world.home = Path(shutil.copytree(world.home, world.folder.parent / "other-home"))


def another_process(world: World) -> None:
    """Another user in another folder, a year later, on the other side of the earth, where text is ASCII."""
    world.patch.setenv("HOME", str(world.folder.parent))
    world.patch.setenv("USER", "somebody")
    world.patch.chdir(world.folder.parent)
    world.patch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    now = time.time
    world.patch.setattr(time, "time", lambda: now() + 400 * 24 * 3600)
    world.patch.setenv("LC_ALL", "C")
    world.patch.setattr(locale, "getpreferredencoding", lambda do_setlocale=True: "ascii")


def rewrite_recipe(world: World) -> None:
    """A comment, and every field in another order."""
    path = world.folder / "defs.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["attributes"] = dict(reversed(recipe["attributes"].items()))
    path.write_text("# the same in other words\n" + yaml.safe_dump(recipe, default_flow_style=True))
