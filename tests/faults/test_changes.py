"""Files that change or disappear while a stage writes its result. The next run finds them as they were."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.disturbed import CommandHost, Undisturbed, check_fingerprints, check_next_run

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Change:
    """A command of the shell, run in the recipe's folder when `stage` is at a point; `says`: a pattern of the output.

    Without `says` the run must succeed with the undisturbed run's artifacts. `{home}` is the home.
    """

    stage: str
    do: str
    says: str = ""
    at: str = "write"


APPEND = "tail -n 1 preferences.jsonl >> preferences.jsonl"
SAME_BYTES = "cp base/model.safetensors copy && cat copy > base/model.safetensors"
FAULTS = {
    "a pair is appended to the data file before it is read": Change(
        "raw_preferences", APPEND, r"\[file-changed\]", "read preferences.jsonl"
    ),
    "a pair is appended to the data file after it was read": Change("raw_preferences", APPEND),
    "the data file is deleted before it is read": Change(
        "raw_preferences", "rm preferences.jsonl", r"\[\S+\]", "read preferences.jsonl"
    ),
    "the data file is deleted after it was read": Change("raw_preferences", "rm preferences.jsonl"),
    "the data file is deleted, after its rows were stored": Change("tokenized_pairs", "rm preferences.jsonl"),
    "the tokenizer is deleted before it is read": Change(
        "tokenization_spec", "rm base/tokenizer.json", r"\[\S+\]", "read base/tokenizer_config.json"
    ),
    "the tokenizer is deleted after it was read": Change("tokenization_spec", "rm base/tokenizer.json"),
    "the base weights are written again with the same bytes": Change("reference_model", SAME_BYTES),
    "the base weights are deleted, after the SFT": Change("policy", "rm base/model.safetensors"),
    "the recipe is replaced by an invalid one": Change("policy", "echo garbage > defs.yaml"),
    "the tokenized pairs are cut in half": Change(
        "policy", "for f in {home}/store/tokenized_pairs/*/pairs.arrow; do truncate -s 9000 $f; done", r"\[\S+\]"
    ),
    "the reference model is changed": Change(
        "policy",
        "for f in {home}/store/reference_model/*/model.safetensors; do printf x | dd of=$f bs=1 seek=9000 conv=notrunc; done",
    ),
    "the policy is deleted": Change("evaluation", "rm -r {home}/store/policy", r"\[\S+\]"),
    "the folder of checkpoints is deleted": Change("policy", "rm -r {home}/jobs/*/checkpoints", at="publish"),
    "the folder of the job is deleted": Change(
        "policy", "rm -r {home}/jobs", r"was removed while .*\[job-folder-removed\]", "checkpoint"
    ),
    "the staging folder is deleted": Change("policy", "rm -r {home}/store/staging/*", r"\[\S+\]"),
    "the home is deleted": Change("policy", "rm -r {home}", r"\[home-removed\]", "checkpoint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_changed_file_gives_an_error_or_the_same_bits(
    name: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    change, recipe = FAULTS[name], tmp_path / "small"
    shutil.copytree(undisturbed.recipe, recipe)
    moved = Undisturbed(recipe, undisturbed.home, undisturbed.fingerprints)
    home = undisturbed.without(change.stage, tmp_path / "home")
    shutil.rmtree(home.path / "names")  # the copy of the recipe has its name
    do = f"cd {recipe} && {change.do.format(home=home.path)}"
    fault = {"of": change.stage, "at": change.at, "reached": str(tmp_path / "reached"), "do": do}
    command = host.start(home, "run", str(recipe), "--json", fault=fault)
    status, text = command.wait(), command.output
    assert (tmp_path / "reached").exists(), text
    seconds = command.seconds_until_nothing_is_left()
    assert "Traceback" not in text
    outcome = "goes on with what was read"
    if change.says:
        assert status == 1 and re.search(change.says, text), text
        codes = re.findall(r"\[[a-z-]+\]", text)
        outcome = f"`{codes[-1]}`"
    else:
        assert status == 0, text
        check_fingerprints(text, undisturbed)
    shutil.rmtree(recipe)
    shutil.copytree(undisturbed.recipe, recipe)
    if home.path.exists():  # a trained model that was changed is refused until it is restored
        shutil.rmtree(home.path / "store/reference_model")
        shutil.copytree(undisturbed.home.path / "store/reference_model", home.path / "store/reference_model")
    check_next_run(host, home, moved)
    record(change.stage, name, outcome, seconds, same=True)
