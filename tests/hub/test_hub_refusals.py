"""Errors of a hub: each message names the place, the value found, the value expected, and the remedy."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from assets.pipeline.graph import GRAPH
from tests.hub.conftest import Resident
from tests.hub.server import Fault, Hub
from tests.hub.test_hub_recipe import folder_files, lines

SOURCE = {"hub": "org/small", "split": "train"}


@pytest.fixture(scope="module", autouse=True)
def repositories(hub: Hub, inputs: Path, rows: list[dict[str, object]]) -> None:
    base = folder_files(inputs / "base")
    hub.commit("models/org/model", base)
    hub.commit("datasets/org/small", {"train.jsonl": lines(rows), "test.jsonl": lines(rows)})
    hub.commit("models/org/gated", base)
    hub.repositories["models/org/gated"].gated = True
    hub.repositories["models/org/gated"].token = "another token"
    hub.commit("models/org/pickled", {"config.json": base["config.json"], "pytorch_model.bin": b"-"})
    hub.commit("models/org/adapter", {"adapter_config.json": "{}", "adapter_model.safetensors": b"-"})
    card = "---\nconfigs:\n- {config_name: one, data_files: 1.jsonl}\n- {config_name: two, data_files: 2.jsonl}\n---\n"
    hub.commit("datasets/org/two", {"README.md": card, "1.jsonl": lines(rows), "2.jsonl": lines(rows)})
    hub.commit("datasets/org/script", {"script.py": "raise SystemExit", "train.jsonl": lines(rows)})
    hub.commit("datasets/org/text", {"train.txt": b"-"})
    hub.commit("datasets/org/empty", {"README.md": "Nothing yet."})
    (inputs / "elsewhere.jsonl").write_text(lines(rows))
    card = f"---\nconfigs:\n- {{config_name: default, data_files: {inputs}/elsewhere.jsonl}}\n---\n"
    hub.commit("datasets/org/elsewhere", {"README.md": card, "train.jsonl": lines(rows)})


@pytest.fixture(autouse=True)
def nothing_goes_wrong_afterwards(hub: Hub) -> Iterator[None]:
    yield
    hub.faults.clear()


@pytest.mark.parametrize(
    ("model", "source", "field", "value", "code"),
    [
        ("org/none", SOURCE, "reference.model: org/none", "HF_TOKEN", "no-repository"),
        ("a/b/c", SOURCE, "reference.model: a/b/c", "organization/name", "bad-hub-id"),
        ("org/gated", SOURCE, "reference.model: org/gated", "HF_TOKEN", "gated-repository"),
        ("org/model", {**SOURCE, "revision": "v9"}, "data.sources.0.hub: org/small", "v9", "no-revision"),
        ("org/model", {**SOURCE, "revision": "0" * 40}, "data.sources.0.hub: org/small", "0" * 40, "no-revision"),
        ("org/model", {**SOURCE, "hub": "org/nothing"}, "data.sources.0.hub: org/nothing", "HF_TOKEN", "no-repository"),
    ],
)  # fmt: skip
def test_missing_repository_is_reported_by_every_command(
    resident: Resident, recipe: Callable[..., Path], model, source, field, value, code
):
    error = resident.ask("status", recipe(model, source))["error"]
    assert f": {field}: " in error and value in error and error.endswith(f" [{code}]")
    assert "Traceback" not in error and "\n" not in error


@pytest.mark.parametrize(
    ("model", "value", "code"),
    [
        ("org/pickled", "pytorch_model.bin", "no-weights"),
        ("org/adapter", "adapter_config.json", "adapter-beside-model"),
    ],
)
def test_repository_without_a_model_is_refused(resident: Resident, recipe: Callable[..., Path], model, value, code):
    error = resident.refusal(recipe(model, SOURCE), "base_model")
    assert f"reference.model: {model}: " in error and value in error and error.endswith(f" [{code}]")


@pytest.mark.parametrize(
    ("source", "values", "code"),
    [
        ({**SOURCE, "split": "dev"}, ["'dev'", "'default'", "train, test"], "data-set-split"),
        ({**SOURCE, "config": "en"}, ["'en'", "`default`"], "data-set-config"),
        ({"hub": "org/two", "split": "train"}, ["one, two"], "data-set-config"),
        ({"hub": "org/script", "split": "train"}, ["script.py"], "data-set-script"),
        ({"hub": "org/text", "split": "train"}, ["train.txt", ".jsonl"], "data-suffix"),
        ({"hub": "org/empty", "split": "train"}, ["README.md"], "data-set-layout"),
        ({"hub": "org/elsewhere", "split": "train"}, ["README.md", "elsewhere.jsonl"], "data-set-file-missing"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused(
    resident: Resident, recipe: Callable[..., Path], source, values, code
):
    error = resident.refusal(recipe("org/model", source), "raw_preferences")
    assert f"the data set {source['hub']}" in error and error.endswith(f" [{code}]")
    assert all(value in error for value in values), error
    assert "Traceback" not in error


def test_a_hub_in_trouble_is_named_with_its_answer(hub: Hub, resident: Resident, recipe: Callable[..., Path]):
    """Nothing of the repository is cached. The second time the download meets the fault, and waits as the hub requests."""
    for status, reason in ((429, "Too Many Requests"), (503, "Service Unavailable")):
        hub.faults[:] = [Fault("org/model", times=9, status=status)]
        error = resident.ask("status", recipe("org/model", SOURCE))["error"]
        assert f" {status} ({reason}) " in error and error.endswith(" [hub-http-error]")
    with hub.out_of_reach():
        error = resident.ask("status", recipe("org/model", SOURCE))["error"]
    assert f"the model org/model (main) is not in the cache and cannot be fetched from {hub.endpoint}" in error
    assert error.endswith(" [hub-unreachable]") and "\n" not in error
    hub.faults[:] = [Fault("resolve", times=1, status=429, headers={"Retry-After": "0"})]
    resident.outcomes(recipe("org/model", SOURCE), select="base_model")


def test_unwritable_cache_is_named(hub: Hub, resident: Resident, inputs: Path, recipe: Callable[..., Path]):
    """The network is not to blame. A file in place of a folder fails for root too, as missing permissions do for a user."""
    hub.commit("models/org/blocked", folder_files(inputs / "base"))
    (resident.cache / "hub" / "models--org--blocked").write_text("")
    error = resident.refusal(recipe("org/blocked", SOURCE), "base_model")
    assert f"cannot download the model org/blocked in {resident.cache / 'hub'} (" in error
    assert "bytes free" in error and "HF_ENDPOINT" not in error


def test_partial_cache_of_another_program_is_completed(
    hub: Hub, resident: Resident, inputs: Path, recipe: Callable[..., Path]
):
    """transformers downloads file by file and keeps no list of a commit's files. Without a hub the cached files are used."""
    files = folder_files(inputs / "base")
    for name, left in (("some", ["config.json"]), ("all", files)):
        commit = hub.commit(f"models/org/{name}", files)
        cache = resident.cache / "hub" / f"models--org--{name}"
        (place := cache / "snapshots" / commit).mkdir(parents=True)
        for file in left:
            (place / file).write_bytes(files[file])
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(commit)
    assert resident.outcomes(recipe("org/all", SOURCE), select="base_model", offline=True)
    assert f"{place} is taken to be whole" in (resident.home / "stderr.log").read_text()
    some = recipe("org/some", SOURCE)
    assert len(resident.found("status", some)) == len(GRAPH), "a status finds the tokenizer, which was missing"
    assert resident.outcomes(some, select="base_model") == {"base_model": "reused"}


def test_name_of_a_local_file_is_not_its_hash(
    resident: Resident, inputs: Path, recipe: Callable[..., Path], tmp_path: Path
):
    """The name of a symlink's target looks like a hash, but is not the hash of the file."""
    shutil.copytree(inputs / "base", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.replace(tmp_path / ("0" * 64))
    weights.symlink_to(tmp_path / ("0" * 64))
    weights.resolve().write_bytes(save({**load(weights.read_bytes()), "another": torch.ones(1)}))
    folder = recipe(str(tmp_path / "model"), SOURCE, name="linked")
    assert resident.outcomes(folder, select="base_model") == {"base_model": "computed"}


def test_broken_download_is_resumed(hub: Hub, resident: Resident, inputs: Path, recipe: Callable[..., Path]):
    hub.commit("models/org/cut", folder_files(inputs / "base"))
    hub.requests.clear()
    hub.faults[:] = [Fault("/blobs/", times=1, cut=1000)]
    answer = resident.ask("run", recipe("org/cut", SOURCE), select="base_model")
    assert answer["found"]["succeeded"], answer
    progress = [event for event in answer["events"] if event["event"] == "progress"]
    assert progress and all(event["asset"] == "base_model" and event["unit"] == "MB" for event in progress)
    assert len(hub.asked("/blobs/")) == 2, "the client keeps whole chunks of 10 MB, and this file has one"


def test_corrupt_cached_file_is_refused(hub: Hub, resident: Resident, inputs: Path, recipe: Callable[..., Path]):
    commit = hub.commit("models/org/spoilt", folder_files(inputs / "base"))
    folder = recipe("org/spoilt", SOURCE)
    resident.outcomes(folder, select="base_model")
    [weights] = resident.cache.glob("hub/models--org--spoilt/snapshots/*/model.safetensors")
    blob = weights.resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x00")
    assert resident.found("status", folder)["base_model"] == [
        "stale",
        f"model.safetensors differs at commit {commit[:12]}",
    ]
    error = resident.refusal(folder, "base_model")
    assert str(weights) in error and str(blob) in error and error.endswith(" [corrupt-download]")
    blob.unlink()
    assert resident.outcomes(folder, select="base_model") == {"base_model": "reused"}


def test_corrupt_cached_rows_are_refused(
    hub: Hub, resident: Resident, rows: list[dict[str, object]], recipe: Callable[..., Path]
):
    hub.commit("datasets/org/spoilt", {"train.jsonl": lines(rows)})
    source = {"hub": "org/spoilt", "split": "train"}
    resident.outcomes(recipe("org/model", source), select="raw_preferences")
    [file] = resident.cache.glob("hub/datasets--org--spoilt/snapshots/*/train.jsonl")
    file.resolve().write_text(file.read_text().replace("opposite", "contrary"))
    again = recipe("org/model", {**source, "format": "implicit_prompt"})
    error = resident.refusal(again, "raw_preferences")
    assert str(file) in error and error.endswith(" [corrupt-download]")


def test_code_of_a_repository_is_never_run(
    hub: Hub, resident: Resident, inputs: Path, recipe: Callable[..., Path], tmp_path: Path
):
    files = folder_files(inputs / "base")
    bomb = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    hub.commit(
        "models/org/code", {**files, "mine.py": bomb, "config.json": json.dumps(json.loads(files["config.json"]) | own)}
    )
    plain = {"hub": "org/small", "split": "test"}
    error = resident.refusal(recipe("org/code", plain, tokenization={"tokenizer": "org/model"}), "reference_logprobs")
    assert error.endswith(" [custom-code]")
    mine = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.T", "mine.T"]}}
    about = json.dumps(json.loads(files["tokenizer_config.json"]) | mine)
    hub.commit("models/org/tokens", {**files, "mine.py": bomb, "tokenizer_config.json": about})
    error = resident.refusal(recipe("org/model", plain, tokenization={"tokenizer": "org/tokens"}), "tokenization_spec")
    assert "needs code" in error and error.endswith(" [unloadable-tokenizer]")
    assert not (tmp_path / "ran").exists() and not hub.asked("mine.py")


@pytest.mark.parametrize("configs", ["&all [*all]", "{2026-11-22: a.jsonl}", "2026-22-11", '"\\ud800"'])
def test_card_with_aliases_is_kept_as_text(hub: Hub, resident: Resident, recipe, configs):
    """JSON has no aliases. With YAML's aliases a card of 421 bytes could expand to six gigabytes."""
    hub.commit("datasets/org/odd", {"README.md": f"---\nconfigs: {configs}\n---\n", "train.jsonl": "{}"})
    looked = resident.found("status", recipe("org/model", {"hub": "org/odd", "split": "train"}, name="odd"))
    assert looked["preference_source"] == ["missing", "never materialized"]
