"""The gate `anytime` over weeks: pairs arrive, candidates wait, become champion, retire, and are rolled back."""

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient

from assets.bodies.release.hypotheses import Hypotheses
from assets.comparison.contestants import WAITING
from assets.comparison.evidence import evidence_problem
from model_registry.gate.history import model_history
from model_registry.gate.ledger import MOST_BETS, Hypothesis, Ledger, State
from tests.factories import write_inputs
from tests.workflows import edits
from tests.workflows.homes import check_values, flip, latest, write_recipe
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.question_pairs import pairs, write_data
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import RegistryError
from training.contract.protocol.artifacts import PREQUENTIAL_SCORES
from training.contract.store.artifact import Artifact
from workflows.commands.gc import collect
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

WEEK = 60  # pairs
SHORT, LONG = {"max_steps": 1}, {"max_steps": 12}
TRAINING = {"batch_size": 8, "optimizer": {"learning_rate": 1e-2}}
RECIPE: dict[str, Any] = {
    **PLAIN,
    "data": {**PLAIN["data"], "validation_fraction": 0.2},
    "training": {**TRAINING, **SHORT},
    "release": {"model_name": "weekly"},
}
ROWS = list(itertools.islice(pairs(), 0, 18 * WEEK, 3))


def rows_of(*weeks: int) -> list[dict[str, Any]]:
    """Return the pairs of some weeks, counted from 0."""
    return [row for week in weeks for row in ROWS[week * WEEK : (week + 1) * WEEK]]


def write_first_week(folder: Path) -> None:
    """The tokenizer knows the words of all weeks."""
    write_inputs(folder)
    write_data(folder, ROWS)
    write_rows(folder, rows_of(0))


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def home(tmp_path: Path, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    """A home whose champion was trained for one step on the pairs of the first week."""
    with prepared_homes.copied_to(tmp_path, {"weekly": RECIPE}, write_first_week) as made:
        yield made


def run(home: Baseline, *weeks: int, training: dict[str, Any] = LONG, **sections: dict[str, Any]) -> RunReport:
    """Run the recipe on the pairs of these weeks."""
    folder = home.folders["weekly"]
    write_rows(folder, rows_of(*weeks))
    edited = {name: {**RECIPE.get(name, {}), **fields} for name, fields in sections.items()}
    write_recipe(folder, {**RECIPE, "training": {**TRAINING, **training}, **edited})
    report = materialize(load_recipe(folder), home.services, home.instance)
    assert report.succeeded, report
    return report


def ledger(home: Baseline) -> Ledger:
    return Ledger.read(home.services.registry.connection, "weekly")


def champion(home: Baseline) -> int:
    found = home.services.registry.champion("weekly")
    assert found is not None
    return found.number


def scores(home: Baseline, report: RunReport) -> Artifact[Any]:
    [found] = [asset.fingerprint for asset in report.assets if asset.asset == PREQUENTIAL_SCORES.name]
    return home.services.store.open(PREQUENTIAL_SCORES, str(found))


def evidence_by_hand(table: pd.DataFrame, entry: Hypothesis) -> float:
    """Return the capital after bets on each prompt, in plain floats, from the losses of both policies."""
    by_policy = {policy: rows.set_index("row") for policy, rows in table.groupby("policy")}
    candidate, other = by_policy[entry.policy], by_policy[entry.champions_policy]
    shared = sorted(set(candidate.index) & set(other.index))
    gains: dict[str, list[float]] = {}
    for row in shared:
        gains.setdefault(candidate.loc[row, "prompt"], []).append(other.loc[row, "loss"] - candidate.loc[row, "loss"])
    capitals = []
    for share in [(2 * k + 1) / 40 for k in range(20)]:
        capital = 1.0
        for values in gains.values():
            difference = sum(values) / len(values) / (entry.clip or math.nan)
            capital *= 1 + share * max(-1.0, min(1.0, difference))
        capitals.append(capital)
    return sum(capitals) / len(capitals)


def test_candidate_waits_until_arriving_pairs_show_that_it_is_better(home: Baseline):
    """Ten held-out prompts choose the clip only. Oracle: the capital by hand, from the table of scores."""
    waits = run(home, 0)
    assert (waits.model_version, waits.is_champion, champion(home)) == ("2", False, 1)
    check_values(waits.reasons, "it waits: ", " of the 32.9 needed ", " on no prompt yet")
    again = run(home, 0)
    assert {asset.outcome for asset in again.assets} == {"reused"} and again.reasons == waits.reasons
    report = run(home, 0, 1)
    [entry] = [entry for entry in ledger(home).entries if entry.candidate == 2]
    found = scores(home, report)
    table = pd.read_parquet(found.file("scores.parquet"))
    by_hand = evidence_by_hand(table, entry)
    assert math.exp(entry.log_evidence) == pytest.approx(by_hand, rel=1e-9)
    assert (entry.state, entry.level) == (State.PROMOTED, pytest.approx(0.05 * 6 / math.pi**2)) and by_hand > 32.9
    assert champion(home) == 2 and not report.is_champion
    check_values(report.reasons, "it waits: ", "version 2 became champion: evidence ")
    version = home.services.registry.champion("weekly")
    assert version is not None and version.tags["pedigree.champion"] == "yes"
    assert version.tags["pedigree.previous_champion"] == "1"
    pipeline = load_recipe(home.folders["weekly"]).pipeline
    verified = verify(pipeline, home.services, home.instance, rows=0)
    assert verified.ok and verified.artifacts[-1].asset == "released_model/hypothesis-1"
    [waiting] = ledger(home).waiting("weekly")
    assert (waiting.candidate, waiting.champion) == (3, 2)
    released, planned = status(pipeline, home.services, home.instance)[-1], plan(pipeline, home.services, home.instance)
    assert {asset.action for asset in planned} == {"reuse"} and released.state == "fresh"
    for [note] in (released.notes, planned[-1].notes):
        check_values(note, "version 3 of weekly waits: evidence ", " of the 65.8 needed ")


def test_only_pairs_that_a_policy_has_not_seen_are_scored_and_each_sequence_once(home: Baseline):
    """The candidate becomes champion on the second week. On the third one it finds its scores of the second in the cache."""

    def prompts(*weeks: int) -> set[str]:
        return {json.dumps(row["prompt"]) for row in rows_of(*weeks)}

    def fresh(week: int, *seen: int) -> int:
        return sum(json.dumps(row["prompt"]) not in prompts(*seen) for row in rows_of(week))

    run(home, 0)
    first = scores(home, run(home, 0, 1, training={"max_steps": 2}))
    assert [(found.pairs, found.scored) for found in first.details.policies] == [(fresh(1, 0), 2 * fresh(1, 0))] * 2
    table = pd.read_parquet(first.file("scores.parquet"))
    assert len(set(table["prompt"])) == len(prompts(1) - prompts(0))
    report = run(home, 0, 1, 2, training={"max_steps": 3})
    champions, waiting = scores(home, report).details.policies
    assert champions.policy == ledger(home).entries[0].policy, "it became champion"
    assert (champions.hits, champions.scored) == (2 * fresh(1, 0), 2 * fresh(2, 0))
    assert (waiting.pairs, waiting.hits, waiting.scored) == (fresh(2, 0, 1), 0, 2 * fresh(2, 0, 1))
    checks = {(check.asset, check.check): check.passed for check in report.checks}
    assert checks[PREQUENTIAL_SCORES.name, "fresh_and_finite"]


def test_run_that_ends_between_two_hypotheses_loses_no_candidate(home: Baseline, monkeypatch: pytest.MonkeyPatch):
    """The champion changed. The run ends after it has written the next hypothesis, before it ends the last one."""
    run(home, 0)
    run(home, 0, training={"max_steps": 2})
    MlflowClient(home.services.registry.tracking_uri).set_registered_model_alias("weekly", "champion", "2")

    def lose_power(*given: Any) -> None:
        raise OSError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(Hypotheses, "_end", lose_power)
        assert not materialize(load_recipe(home.folders["weekly"]), home.services, home.instance).succeeded
    run(home, 0, training={"max_steps": 2})
    [waiting] = ledger(home).waiting("weekly")
    assert (waiting.candidate, waiting.champion, waiting.number) == (3, 2, 3)
    states = {entry.number: entry.state for entry in ledger(home).entries}
    assert states == {1: State.SUPERSEDED, 2: State.SUPERSEDED, 3: State.WAITING}


def test_identical_retraining_uses_up_no_level(home: Baseline):
    """An edit of the evaluation makes another version of the same policy, waiting or champion."""
    run(home, 0)
    entries = ledger(home).entries
    again = run(home, 0, evaluation={"max_new_tokens": 3})
    assert (again.model_version, again.is_champion, ledger(home).entries) == ("3", False, entries)
    check_values(again.reasons, "its policy is that of version 2, which waits: evidence ")
    champions = run(home, 0, training=SHORT, evaluation={"max_new_tokens": 3})
    assert (champions.is_champion, champions.reasons) == (False, "its policy is the champion's")
    assert ledger(home).entries == entries


def test_policy_of_flipped_labels_is_never_promoted(home: Baseline):
    """It was trained on swapped pairs of the first week, and is tested on right ones of three weeks."""
    folder = home.folders["weekly"]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows_of(0)]
    write_rows(folder, swapped)
    write_recipe(folder, {**RECIPE, "training": {**TRAINING, **LONG}})
    flipped = materialize(load_recipe(folder), home.services, home.instance)
    assert (flipped.model_version, flipped.is_champion) == ("2", False)
    for weeks in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        run(home, *weeks, training=SHORT)
    entries = ledger(home).of_policy(str(home.services.registry.versions("weekly")[-2].fingerprint_of("policy")))
    assert entries and State.PROMOTED not in {entry.state for entry in entries}
    assert sum(entry.prompts for entry in entries) > WEEK and all(
        entry.log_evidence < 0 for entry in entries if entry.bets
    )


def test_after_a_rollback_waiting_candidates_start_again(home: Baseline):
    """The rolled-back policy has the better scores, and stays out. The others bet against the restored champion."""
    run(home, 0)
    run(home, 0, 1, training={"max_steps": 10})
    assert champion(home) == 2
    home.services.registry.rollback("weekly")
    before = ledger(home).waiting("weekly")
    back = run(home, 0, 1, training={"max_steps": 10})
    check_values(back.reasons, "it waits: evidence 1 ", " against version 1, the champion")
    [now] = ledger(home).waiting("weekly")
    assert (now.champion, now.bets, now.number) == (1, (), before[0].number + 1)
    ended = next(entry for entry in ledger(home).entries if entry.number == before[0].number)
    assert (ended.state, ended.reason) == (State.SUPERSEDED, "version 1 is champion now")
    after = run(home, 0, 1, 2, training={"max_steps": 2})
    assert champion(home) == 3, "the waiting candidate passes on pairs that arrived after the rollback"
    assert home.services.registry.versions("weekly")[-2].tags["pedigree.rolled_back"] == "true"
    assert after.succeeded


def test_alias_moved_to_a_waiting_candidate_ends_its_hypothesis(home: Baseline):
    run(home, 0)
    MlflowClient(home.services.registry.tracking_uri).set_registered_model_alias("weekly", "champion", "2")
    report = run(home, 0)
    [entry] = ledger(home).entries
    assert (entry.state, entry.reason, report.is_champion) == (State.SUPERSEDED, "the user made it champion", True)
    assert ledger(home).promotions == 0


def test_run_that_ended_before_it_recorded_a_promotion_is_continued(home: Baseline, monkeypatch: pytest.MonkeyPatch):
    """The alias has moved, but the ledger does not know. The next run finds the evidence above its level."""
    run(home, 0)

    def lose_power(*given: Any) -> None:
        raise OSError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(Hypotheses, "_record_promotion", lose_power)
        write_rows(home.folders["weekly"], rows_of(0, 1))
        failed = materialize(load_recipe(home.folders["weekly"]), home.services, home.instance)
    assert not failed.succeeded and champion(home) == 2 and ledger(home).promotions == 0
    run(home, 0, 1)
    assert (champion(home), ledger(home).promotions) == (2, 1)


def test_only_the_newest_candidates_wait(home: Baseline):
    for seed in range(WAITING + 1):
        last = run(home, 0, training={"max_steps": 2, "seed": seed})
    waiting = ledger(home).waiting("weekly")
    assert [entry.candidate for entry in waiting] == [7, 6, 5, 4, 3]
    oldest = ledger(home).entries[0]
    assert (oldest.candidate, oldest.state) == (2, State.RETIRED)
    version = home.services.registry.versions("weekly")[-2]
    check_values(version.tags["pedigree.reasons"], "it retired: 5 newer candidates of weekly wait")
    assert "version 2: it retired" in (last.reasons or "")


def test_gc_keeps_scores_of_promotions_and_verify_finds_changed_ones(home: Baseline):
    run(home, 0)
    promoted = scores(home, run(home, 0, 1))
    run(home, 0, 1, 2, training={"max_steps": 2})
    collect(home.services, home.instance, delete=True)
    pipeline = load_recipe(home.folders["weekly"]).pipeline
    assert verify(pipeline, home.services, home.instance, rows=0).ok
    flip(promoted.file("scores.parquet"))
    [changed] = [asset for asset in verify(pipeline, home.services, home.instance, rows=0).artifacts if not asset.ok]
    assert changed.asset == "released_model/hypothesis-1" and "scores.parquet" in (changed.fault or "")
    flip(promoted.file("scores.parquet"))
    entry = ledger(home).entries[0]
    lower = entry.bets[-1].model_copy(update={"log_evidence": entry.log_evidence + 1})
    ledger(home).write(entry.model_copy(update={"bets": (*entry.bets[:-1], lower)}))
    [changed] = [asset for asset in verify(pipeline, home.services, home.instance, rows=0).artifacts if not asset.ok]
    assert re.search(
        r"the promotion of version 2: the logarithm of the evidence is .*, its entry has", changed.fault or ""
    )


def test_another_template_is_compared_by_error_rates_in_own_tokens(home: Baseline):
    template = {"chat_template": "other.jinja"}
    folder = home.folders["weekly"]
    text = (folder / "base" / "chat_template.jinja").read_text()
    (folder / "other.jinja").write_text(edits.space_after_roles(text))
    run(home, 0, tokenization={**RECIPE["tokenization"], **template})
    [entry] = ledger(home).entries
    assert (entry.metric.name, entry.clip) == ("ERROR_RATE", 1.0)
    found = scores(home, run(home, 0, 1, tokenization={**RECIPE["tokenization"], **template}))
    assert len(found.details.policies) == 2
    table = pd.read_parquet(found.file("scores.parquet"))
    keys = [set(rows["chosen_key"]) for _, rows in table.groupby("policy")]
    assert not keys[0] & keys[1], "each has its own tokens"


def test_champion_of_unknown_training_data_is_not_scored(home: Baseline):
    run(home, 0)
    version = home.services.registry.champion("weekly")
    assert version is not None
    policy = home.services.store.folder("policy", str(version.fingerprint_of("policy")))
    policy.rename(policy.with_suffix(".moved"))
    report = run(home, 0, 1, training={"max_steps": 2})
    assert scores(home, report).details.policies == ()
    pipeline = load_recipe(home.folders["weekly"]).pipeline
    note = latest(home.instance, pipeline.key("prequential_scores")).metadata["notes"]
    check_values(note, "version 1 of weekly cannot be scored on arriving pairs", " missing ")


def test_history_shows_every_candidate_with_its_evidence(home: Baseline):
    run(home, 0)
    run(home, 0, 1)
    found = model_history(home.services.registry, "weekly")
    assert [(one.version, one.decision) for one in found.candidates] == [
        (3, "waits"),
        (2, "champion"),
        (1, "was champion"),
    ]
    assert (found.champion, found.promotions) == (2, 1)
    promoted = found.comparisons[-1]
    assert (promoted.state, promoted.candidate, promoted.champion) == ("promoted", 2, 1)
    [bet] = promoted.evidence
    assert bet.pairs == "arriving" and bet.low < bet.mean < bet.high and bet.evidence > promoted.evidence_needed
    page = (home.home / "pages" / "weekly-history.html").read_text()
    check_values(page, "<svg", "version 2 against version 1", "Version 2 is champion.")
    shown = latest(home.instance, load_recipe(home.folders["weekly"]).pipeline.key("released_model")).metadata
    assert shown["confidence_sequence"].startswith("![")


def test_votes_keep_held_out_pairs_out_of_the_evidence(home: Baseline):
    """Arriving pairs of the train split choose the clip, and then the next ones are bet on."""
    votes = {"disclosure": "votes", "max_new_tokens": 2, "samples": 1}
    run(home, 0, evaluation=votes)
    first = scores(home, run(home, 0, 1, training={"max_steps": 2}, evaluation=votes))
    entry = ledger(home).entries[0]
    assert (entry.clip_source, entry.bets) == (first.fingerprint, ())
    rows = home.services.store.open("raw_preferences", first.derivation.inputs["raw_preferences"].fingerprint)
    splits = pd.read_parquet(rows.file("preferences.parquet"))["split"]
    table = pd.read_parquet(first.file("scores.parquet"))
    assert set(splits[table["row"]]) == {"train"}
    second = pd.read_parquet(
        scores(home, run(home, 0, 1, 2, training={"max_steps": 3}, evaluation=votes)).file("scores.parquet")
    )
    bet_on = set(second["prompt"][second["policy"] == entry.policy])
    assert bet_on and not bet_on & set(table["prompt"]), "prompts that chose the clip are not bet on"
    assert ledger(home).entries[0].prompts == len(bet_on)
    assert evidence_problem(home.services.store, ledger(home).entries[0]) is None


def test_edited_entry_of_the_ledger_is_refused(home: Baseline):
    run(home, 0)
    client = MlflowClient(home.services.registry.tracking_uri)
    client.set_registered_model_tag("weekly", "pedigree.hypothesis.00001", '{"number": "one"}')
    with pytest.raises(RegistryError, match=r"pedigree.hypothesis.00001 of .* weekly .*\[wrong-ledger-entry\]"):
        ledger(home)


def test_ledger_entry_with_all_its_bets_fits_into_a_tag(home: Baseline):
    """A database keeps 5,000 characters."""
    run(home, 0)
    run(home, 0, 1)
    entry = ledger(home).entries[0]
    full = entry.model_copy(update={"bets": entry.bets * MOST_BETS, "reason": "x" * 100})
    assert len(full.model_dump_json(exclude_defaults=True)) < 5000


def test_two_recipes_of_one_model_have_their_own_candidates(home: Baseline):
    """Both are compared with the model's champion. Each recipe tests its own candidates on its own arriving pairs."""
    run(home, 0)
    other = home.folders["weekly"].parent / "other"
    shutil.copytree(home.folders["weekly"], other)
    write_recipe(other, {**RECIPE, "training": {**TRAINING, "max_steps": 2}})
    report = materialize(load_recipe(other), home.services, home.instance)
    assert (report.model_version, report.is_champion) == ("3", False)
    write_rows(other, rows_of(0, 1))
    scored = scores(home, materialize(load_recipe(other), home.services, home.instance))
    [candidate] = [entry for entry in ledger(home).entries if entry.candidate == 3]
    assert {found.policy for found in scored.details.policies} == {candidate.policy, candidate.champions_policy}
    assert [entry.recipe for entry in ledger(home).entries[:2]] == ["weekly", "other"]
    run(home, 0, 1)
    assert champion(home) == 2
    again = materialize(load_recipe(other), home.services, home.instance)
    assert again.succeeded and {entry.champion for entry in ledger(home).waiting("other")} == {2}
