"""Other versions of libraries: changed results are recomputed, with the reason; unchanged results are reused.

A stand-in for a changed library has another version and gives another result, as a release with a bug fix would. The truth
table covers versions that change nothing.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from assets.pipeline.pipeline import Services
from tests.factories import PAIRS
from tests.workflows.edits import Sandbox, another_device, software
from tests.workflows.homes import check_values
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.protocol.events import Event
from training.data.tokenization.tokenize_pair import PairEncoder
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

FEW = {**PLAIN, "training": {**PLAIN["training"], "max_steps": 1}}
BELOW = ("policy", "evaluation", "released_model")


@pytest.fixture
def baseline(tmp_path_factory: pytest.TempPathFactory, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path_factory.mktemp("upgraded"), {"plain": FEW}) as made:
        yield made


@pytest.fixture
def sandbox(baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    shutil.rmtree(baseline.home / "names", ignore_errors=True)
    return Sandbox(Path(shutil.copytree(baseline.folders["plain"], tmp_path / "plain")), baseline.home, monkeypatch)


def run(baseline: Baseline, sandbox: Sandbox) -> tuple[dict[str, tuple[str, bool]], str]:
    """Run the recipe. Return the outcome of each asset and whether its artifact is another one, and all notes of the jobs."""
    events: list[Event] = []
    services: Services = replace(baseline.services, listener=events.append)
    report = materialize(load_recipe(sandbox.folder), services, baseline.instance)
    assert report.succeeded, report
    before = baseline.fingerprints["plain"]
    outcomes = {asset.asset: (str(asset.outcome), asset.fingerprint != before[asset.asset]) for asset in report.assets}
    return outcomes, "\n".join(event["text"] for event in events if event["event"] == "note")


def other_ids(sandbox: Sandbox, word: str) -> None:
    """Give a tokenizer of a new release: the last token of `word` has another id."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(sandbox.base)
    old = tokenizer(word, add_special_tokens=False)["input_ids"][-1]
    new, tokenize = tokenizer.convert_tokens_to_ids("Q"), PairEncoder._tokenize

    def changed(self: PairEncoder, texts: Any) -> Iterator[Any]:
        for tokens in tokenize(self, texts):
            yield replace(tokens, ids=[new if id_ == old else id_ for id_ in tokens.ids])

    sandbox.patch.setattr(PairEncoder, "_tokenize", changed)
    software("tokenizers")(sandbox)


def test_upgrade_that_gives_other_tokens_tokenizes_again_and_trains_on_them(
    baseline: Baseline, sandbox: Sandbox
) -> None:
    other_ids(sandbox, " capital")
    outcomes, notes = run(baseline, sandbox)
    check_values(notes, "other tokens", "row 16 (preferences.jsonl, line 17)")  # the first pair of a capital
    changed = ("tokenized_pairs", "reference_logprobs", *BELOW)
    assert {name: outcomes[name] for name in changed} == dict.fromkeys(changed, ("computed", True))
    assert outcomes["tokenization_spec"] == ("computed", False)


def test_upgrade_that_gives_other_log_probs_scores_and_trains_again(baseline: Baseline, sandbox: Sandbox) -> None:
    forward = LlamaRMSNorm.forward
    sandbox.patch.setattr(LlamaRMSNorm, "forward", lambda self, states: 1.02 * forward(self, states))
    software("torch")(sandbox)
    outcomes, notes = run(baseline, sandbox)
    assert "other log-probs" in notes
    changed = ("reference_logprobs", *BELOW)
    assert {name: outcomes[name] for name in changed} == dict.fromkeys(changed, ("computed", True))
    assert outcomes["tokenized_pairs"] == ("reused", False)
    assert len(list((baseline.home / "store" / "corrupt" / "memo").iterdir())) == 1


def test_status_and_plan_after_an_upgrade_name_the_versions(baseline: Baseline, sandbox: Sandbox) -> None:
    another_device(sandbox)
    pipeline = load_recipe(sandbox.folder).pipeline
    states = {asset.asset: asset for asset in status(pipeline, baseline.services, baseline.instance)}
    assert states["tokenized_pairs"].state == "fresh"
    change = "device cpu -> NVIDIA H100 80GB HBM3"
    assert states["reference_logprobs"].causes == (change,)
    assert all(states[name].causes == (f"reference_logprobs: {change}",) for name in BELOW)
    planned = {asset.asset: asset for asset in plan(pipeline, baseline.services, baseline.instance)}
    table = planned["reference_logprobs"]
    assert (table.action, table.work) == ("compute", {"sequences": 2 * PAIRS, "missing": 0, "compared": 2 * PAIRS})
    assert {planned[name].action for name in BELOW} == {"reuse"}
    outcomes, notes = run(baseline, sandbox)
    compared = f"{2 * PAIRS} sequences .* another device .* the same log-probs"
    assert re.search(compared, notes), notes
    assert outcomes["reference_logprobs"] == ("computed", False)
    assert {outcomes[name] for name in BELOW} == {("reused", False)}
    assert {asset.state for asset in status(pipeline, baseline.services, baseline.instance)} == {"fresh"}
    _, notes = run(baseline, sandbox)
    assert not re.search(compared, notes), "once for each artifact"


def test_home_in_which_no_versions_were_recorded_is_compared_once_and_trains_nothing(
    baseline: Baseline, sandbox: Sandbox
) -> None:
    """A home from before versions counted: it has only those records of tokens and log-probs that lack versions."""
    store = baseline.services.store
    for kind in ("tokenized_pairs", "reference_logprobs"):
        for file in (store.root / "keys" / kind).iterdir():
            record = store.record(kind, file.stem)
            if record is not None and "software" in record.derivation.settings:
                file.unlink()
    pipeline = load_recipe(sandbox.folder).pipeline
    planned = {asset.asset: asset for asset in plan(pipeline, baseline.services, baseline.instance)}
    assert planned["tokenized_pairs"].action == "reuse", "the plan has compared them"
    assert {planned[name].action for name in BELOW} == {"reuse"}
    outcomes, notes = run(baseline, sandbox)
    assert {outcomes[name] for name in BELOW} == {("reused", False)}
    assert outcomes["reference_logprobs"] == ("computed", False)
    assert f"{2 * PAIRS} known, 0 to score" in notes
