"""Other versions of the libraries: what they change is made again, with the reason, and what they do not change is used again.

A stand-in for a changed library calls itself by another version and gives another result, as a release that mends a bug would.
That versions which change nothing recompute nothing is in the truth table.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from assets.pipeline.pipeline import Services
from tests.workflows.edits import World, another_device, software
from tests.workflows.in_process import PAIRS, Ground, run_in
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.protocol.events import Event
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

FEW = {**PLAIN, "training": {**PLAIN["training"], "max_steps": 1}}
BELOW = ("policy", "evaluation", "released_model")


@pytest.fixture
def ground(tmp_path_factory: pytest.TempPathFactory, demo_maker: ModuleType) -> Iterator[Ground]:
    with run_in(tmp_path_factory.mktemp("upgraded"), demo_maker, {"plain": FEW}) as made:
        yield made


@pytest.fixture
def world(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    shutil.rmtree(ground.home / "names", ignore_errors=True)
    return World(Path(shutil.copytree(ground.folders["plain"], tmp_path / "plain")), ground.home, monkeypatch)


def run(ground: Ground, world: World) -> tuple[dict[str, tuple[str, bool]], str]:
    """For each asset its outcome, and whether it is another artifact than before; and all notes of the jobs."""
    heard: list[Event] = []
    services: Services = replace(ground.services, listener=heard.append)
    report = materialize(load_recipe(world.folder), services, ground.instance)
    assert report.succeeded, report
    before = ground.fingerprints["plain"]
    outcomes = {asset.asset: (str(asset.outcome), asset.fingerprint != before[asset.asset]) for asset in report.assets}
    return outcomes, "\n".join(event["text"] for event in heard if event["event"] == "note")


def other_ids(world: World, word: str) -> None:
    """A tokenizer of a new release: the last token of `word` is another than it was."""
    words = PreTrainedTokenizerFast.from_pretrained(world.base)
    old = words(word, add_special_tokens=False)["input_ids"][-1]
    new, call = words.convert_tokens_to_ids("Q"), PreTrainedTokenizerFast.__call__

    def changed(self: PreTrainedTokenizerFast, *args: Any, **kwargs: Any) -> Any:
        encoded = call(self, *args, **kwargs)
        ids = encoded["input_ids"]
        each = ids if ids and isinstance(ids[0], list) else [ids]
        for found in each:
            found[:] = [new if id_ == old else id_ for id_ in found]
        return encoded

    world.patch.setattr(PreTrainedTokenizerFast, "__call__", changed)
    software("tokenizers")(world)


def test_upgrade_that_gives_other_tokens_tokenizes_again_and_trains_on_them(ground: Ground, world: World) -> None:
    other_ids(world, " capital")
    outcomes, notes = run(ground, world)
    assert "give other tokens than" in notes and "all pairs are tokenized again" in notes
    assert "the chosen response of row 16 (preferences.jsonl, line 17)" in notes  # the first pair of a capital
    changed = ("tokenized_pairs", "reference_logprobs", *BELOW)
    assert {name: outcomes[name] for name in changed} == dict.fromkeys(changed, ("computed", True))
    assert outcomes["tokenization_spec"] == ("computed", False)


def test_upgrade_that_gives_other_log_probs_scores_and_trains_again(ground: Ground, world: World) -> None:
    forward = LlamaRMSNorm.forward
    world.patch.setattr(LlamaRMSNorm, "forward", lambda self, states: 1.02 * forward(self, states))
    software("torch")(world)
    outcomes, notes = run(ground, world)
    assert "give other log-probs than those it was made with" in notes and "Its sequences are scored again" in notes
    changed = ("reference_logprobs", *BELOW)
    assert {name: outcomes[name] for name in changed} == dict.fromkeys(changed, ("computed", True))
    assert outcomes["tokenized_pairs"] == ("reused", False)
    assert len(list((ground.home / "store" / "corrupt" / "memo").iterdir())) == 1


def test_status_and_plan_after_an_upgrade_name_the_versions(ground: Ground, world: World) -> None:
    another_device(world)
    pipeline = load_recipe(world.folder).pipeline
    states = {asset.asset: asset for asset in status(pipeline, ground.services, ground.instance)}
    assert states["tokenized_pairs"].state == "fresh"
    words = "device cpu -> NVIDIA H100 80GB HBM3"
    assert states["reference_logprobs"].causes == (words,)
    assert all(states[name].causes == (f"reference_logprobs: {words}",) for name in BELOW)
    planned = {asset.asset: asset for asset in plan(pipeline, ground.services, ground.instance)}
    table = planned["reference_logprobs"]
    assert (table.action, table.work) == ("compute", {"sequences": 2 * PAIRS, "missing": 0, "compared": 2 * PAIRS})
    assert {planned[name].action for name in BELOW} == {"reuse"}
    outcomes, notes = run(ground, world)
    assert (
        f"{2 * PAIRS} sequences that other versions of the libraries, or another device, scored have the same" in notes
    )
    assert outcomes["reference_logprobs"] == ("computed", False)
    assert {outcomes[name] for name in BELOW} == {("reused", False)}
    assert {asset.state for asset in status(pipeline, ground.services, ground.instance)} == {"fresh"}
    _, notes = run(ground, world)
    assert "sequences that other versions" not in notes, "once for each artifact"


def test_home_in_which_no_versions_were_recorded_is_compared_once_and_trains_nothing(
    ground: Ground, world: World
) -> None:
    """As it was made before versions counted: of the tokens and log-probs only the records without them are there."""
    store = ground.services.store
    for kind in ("tokenized_pairs", "reference_logprobs"):
        for file in (store.root / "keys" / kind).iterdir():
            record = store.record(kind, file.stem)
            if record is not None and "software" in record.derivation.settings:
                file.unlink()
    pipeline = load_recipe(world.folder).pipeline
    planned = {asset.asset: asset for asset in plan(pipeline, ground.services, ground.instance)}
    assert planned["tokenized_pairs"].action == "reuse", "the plan has compared them"
    assert {planned[name].action for name in BELOW} == {"reuse"}
    outcomes, notes = run(ground, world)
    assert {outcomes[name] for name in BELOW} == {("reused", False)}
    assert outcomes["reference_logprobs"] == ("computed", False)
    assert "to score" in notes and f"{2 * PAIRS} known, 0 to score" in notes
