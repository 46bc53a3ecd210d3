"""A recipe with model, tokenizer and data from a hub: first run, changes on the hub, and runs without a network."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from assets.pipeline.graph import GRAPH
from tests.hub.conftest import TOKEN, Resident, environment
from tests.hub.server import Fault, Hub
from tests.workflows.homes import PEDIGREE

pytestmark = pytest.mark.slow  # all but the last depend on the first run

CARD = """---
configs:
- config_name: good
  data_files:
  - {split: train, path: "g/*.jsonl"}
  - {split: test, path: t.jsonl}
- config_name: other
  data_files: o.jsonl
---
# Pairs
"""
SOURCES = [
    {"hub": "org/lines", "config": "good", "split": "train"},
    {"hub": "org/columns", "split": "train"},
    {"hub": "org/table", "split": "train"},
]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(rows: list[dict[str, Any]], place: Path) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), place)
    return place.read_bytes()


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(
    hub: Hub, resident: Resident, inputs: Path, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Run a recipe of three data sets and a sharded model with a tokenizer of its own, all on the hub."""
    place = tmp_path_factory.mktemp("made")
    model = AutoModelForCausalLM.from_pretrained(inputs / "base")
    model.save_pretrained(place / "sharded", max_shard_size="8KB")
    model.save_pretrained(place / "whole")
    others = {"original/consolidated.safetensors": b"-", "a.bin": b"-"}
    hub.commit("models/org/sharded", {**folder_files(place / "sharded"), **others})
    tokenizer = {name: data for name, data in folder_files(inputs / "base").items() if "model" not in name}
    hub.commit("models/org/tokenizer", tokenizer)
    strings = [{name: row[name][-1]["content"] for name in ("prompt", "chosen", "rejected")} for row in rows[:4]]
    halves = {"g/1.jsonl": lines(rows[:6]), "g/2.jsonl": lines(rows[6:10])}
    hub.commit("datasets/org/lines", {"README.md": CARD, **halves, "t.jsonl": "{}", "o.jsonl": "{}"})
    columns = {"train": parquet(rows[10:20], place / "rows"), "test": b"-"}
    named = {f"data/{split}-00000-of-00001.parquet": data for split, data in columns.items()}
    hub.commit("datasets/org/columns", {**named, "dataset_infos.json": "{}"})
    csv = "prompt,chosen,rejected\n" + "".join(",".join(f'"{text}"' for text in row.values()) + "\n" for row in strings)
    hub.commit("datasets/org/table", {"train.csv": csv + '"Say nothing.",null,NA\n'})
    return place


@pytest.fixture
def whole(recipe: Callable[..., Path]) -> Path:
    return recipe("org/sharded", SOURCES, tokenization={"tokenizer": "org/tokenizer"})


def test_a_whole_recipe(hub: Hub, resident: Resident, made: Path, whole: Path):
    """Rows by hand: 6 + 4 of one config's split, 10 of a Parquet file, 4 + 1 of a CSV file, in which `null` is a text."""
    looked = resident.found("status", whole)
    assert {state for state, *_ in looked.values()} == {"missing"}
    assert not hub.asked(".safetensors"), "a status downloads no weights"
    planned = resident.ask("plan", whole)
    assert planned["found"]["raw_preferences"] == "reuse" and planned["found"]["policy"] == "compute"
    phases = [event["phase"] for event in planned["events"] if event["event"] == "phase"]
    assert any(phase.startswith("downloading org/sharded at ") for phase in phases), phases
    assert set(resident.outcomes(whole)) == set(GRAPH)
    verified = resident.found("verify", whole)
    assert verified["ok"] and len(verified["rescored"]) == 2, verified
    for unneeded in ("consolidated", "a.bin", "data/test", "t.jsonl", "o.jsonl"):
        assert not hub.asked(f"/{unneeded}"), unneeded
    [read] = (resident.home / "store" / "raw_preferences").glob("*/preferences.parquet")
    assert Counter(row["source"] for row in pq.read_table(read).to_pylist()) == {
        "org/lines/g/1.jsonl": 6,
        "org/lines/g/2.jsonl": 4,
        "org/columns/data/train-00000-of-00001.parquet": 10,
        "org/table/train.csv": 5,
    }
    assert all(state == "fresh" for state, *_ in resident.found("status", whole).values())


def test_another_text_on_the_card_changes_nothing(hub: Hub, resident: Resident, made: Path, whole: Path):
    hub.amend("datasets/org/lines", {"README.md": CARD + "More words.\n", "LICENSE": "MIT"})
    commit = hub.amend("models/org/sharded", {"README.md": "A model."})
    looked = resident.found("status", whole)
    [state, cause] = looked["base_model"]
    assert state == "stale" and "org/sharded" in cause and f" {commit[:12]}" in cause
    assert looked["policy"] == ["stale", f"base_model: {cause}"]
    assert looked["preference_source"] == ["fresh"] and looked["raw_preferences"] == ["fresh"]
    hub.requests.clear()
    assert set(resident.outcomes(whole).values()) == {"reused"}
    assert hub.asked("/blobs/") == [], "a cached file is not downloaded again for another commit"
    assert_each_branch_was_asked_for_once(hub)
    hub.requests.clear()
    assert resident.found("run by Dagster", whole), "a branch that moves during a run counts for the next run"
    assert_each_branch_was_asked_for_once(hub)


def assert_each_branch_was_asked_for_once(hub: Hub) -> None:
    """Check that the branches of three data sets, the model and the tokenizer were each requested once."""
    branches = Counter(request for request in hub.asked() if re.fullmatch(r"GET /api/\w+/org/\w+", request))
    assert len(branches) == 5 and set(branches.values()) == {1}, branches


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"config": "other"}, "hub data set 1.config good -> other"),
        ({"split": "test"}, "hub data set 1.split train -> test"),
        (
            {"README.md": CARD.replace("g/*", "g/1")},
            "hub data set 1.configs[0].data_files[0].path g/*.jsonl -> g/1.jsonl",
        ),
        ({".huggingface.yaml": "configs: []"}, ".huggingface.yaml added"),
    ],
)
def test_other_rows_of_the_same_files_are_other_data(
    hub: Hub, resident: Resident, made: Path, recipe: Callable[..., Path], change: dict[str, str], difference: str
):
    """Change the rows by the recipe's fields, and by either file that lists a data set's configs and splits."""
    repository = hub.repositories["datasets/org/lines"]
    before, of_recipe = repository.head, change.keys() <= {"config", "split"}
    if not of_recipe:
        hub.amend("datasets/org/lines", change)
    source = SOURCES[0] | change if of_recipe else SOURCES[0]
    edited = recipe("org/sharded", [source, *SOURCES[1:]], tokenization={"tokenizer": "org/tokenizer"})
    looked = resident.found("status", edited)
    repository.head = before
    [state, cause] = looked["preference_source"]
    assert state == "stale" and difference in cause
    assert looked["raw_preferences"] == ["stale", f"preference_source: {cause}"]


def test_data_of_another_split_are_read_without_effect(hub: Hub, resident: Resident, made: Path, whole: Path):
    hub.amend("datasets/org/lines", {"o.jsonl": "{} "})
    outcomes = resident.outcomes(whole)
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} == {
        "preference_source",
        "raw_preferences",
    }


def test_new_rows_and_new_weights_are_causes_with_commits(hub: Hub, resident: Resident, made: Path, whole: Path):
    old = hub.repositories["datasets/org/table"].head
    table = hub.repositories["datasets/org/table"].commits[old]["train.csv"].decode()
    new = hub.amend("datasets/org/table", {"train.csv": table + '"Say more.",Much.,Little.\n'})
    causes = resident.found("status", whole)
    [state, cause] = causes["preference_source"]
    assert state == "stale" and cause.startswith(f"org/table at commit {new[:12]}: train.csv ")
    assert causes["policy"] == ["stale", f"preference_source: {cause}"]
    assert causes["base_model"] == ["fresh"]
    weights = load((made / "whole" / "model.safetensors").read_bytes())
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    config = (made / "whole" / "config.json").read_text()
    hub.commit("models/org/sharded", {"config.json": config, "model.safetensors": save(weights, {"format": "pt"})})
    outcomes = resident.outcomes(whole, select="reference_logprobs")
    assert {asset for asset, outcome in outcomes.items() if outcome == "reused"} == {"tokenization_spec"}
    looked = resident.found("status", whole)
    assert {asset for asset in outcomes if looked[asset] != ["fresh"]} == set()
    assert looked["evaluation"][0] == "stale"


def test_cached_files_are_used_without_a_network(
    hub: Hub, resident: Resident, made: Path, whole: Path, recipe: Callable[..., Path]
):
    """A pinned recipe requests nothing; a branch keeps its last known commit; HF_HUB_OFFLINE does the same on purpose."""
    resident.outcomes(whole, select="tokenized_pairs")
    looked = resident.found("status", whole)
    heads = {name: repository.head for name, repository in hub.repositories.items()}
    pinned = recipe(
        "org/sharded",
        [{**source, "revision": heads[f"datasets/{source['hub']}"]} for source in SOURCES],
        name="pinned",
        reference={"revision": heads["models/org/sharded"]},
        tokenization={"tokenizer": "org/tokenizer", "revision": heads["models/org/tokenizer"]},
    )
    hub.requests.clear()
    assert set(resident.outcomes(pinned, select="tokenized_pairs").values()) == {"reused"}
    assert {state for state, *_ in resident.found("status", pinned).values()} == {"fresh", "missing"}
    assert [request for request in hub.asked() if "agent-harnesses" not in request] == []
    with hub.out_of_reach():
        assert resident.found("status", whole) == looked
    assert "Using cached commit hash for 'org/table'" in (resident.home / "stderr.log").read_text()
    for status in (503, 429):
        hub.faults[:] = [Fault("/api/", times=100, status=status)]
        assert resident.found("status", whole) == looked
    assert re.search(r"\(429\).* org/table ", (resident.home / "stderr.log").read_text())
    hub.faults[:] = [Fault("/api/", times=100, status=403)]
    assert "403" in resident.ask("status", whole)["error"], "without permission the run fails"
    hub.faults.clear()
    hub.requests.clear()
    assert resident.found("status", whole, offline=True) == looked
    assert set(resident.outcomes(whole, select="tokenized_pairs", offline=True).values()) == {"reused"}
    never = resident.ask("status", recipe("org/never", SOURCES[0], name="never"), offline=True)
    assert "org/never (main)" in never["error"] and "HF_HUB_OFFLINE" in never["error"]
    assert never["error"].endswith(" [hub-offline]")
    assert hub.asked() == []


def test_token_opens_private_repositories_and_is_not_stored(
    hub: Hub, rows: list[dict[str, Any]], recipe: Callable[..., Path], tmp_path: Path
):
    """Check the command and a job's process. The host of large files, another one, must not get the token."""
    hub.commit("datasets/org/private", {"train-00000-of-00001.parquet": parquet(rows, tmp_path / "rows")})
    hub.repositories["datasets/org/private"].token = TOKEN
    folder, home = recipe("org/sharded", {"hub": "org/private", "split": "train"}), tmp_path / "home"
    hub.requests.clear()
    own = environment(hub, tmp_path / "hf", HF_TOKEN=TOKEN, PEDIGREE_HOME=str(home))
    command = [PEDIGREE, "run", str(folder), "--select", "raw_preferences", "--json"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    sent = [(request.authorization, "/blobs/" in request.path) for request in hub.requests if "/org/" in request.path]
    assert set(sent) == {(f"Bearer {TOKEN}", False)}
    assert {request.authorization for request in hub.requests if "/blobs/" in request.path} == {None}
    assert TOKEN not in done.stdout + done.stderr
    written = [path for path in home.rglob("*") if path.is_file() and not path.is_socket()]
    assert (home / "jobs") in {path.parents[1] for path in written}
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
