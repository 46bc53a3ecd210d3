"""Status, plan and run between an edit and the end of the next run, and contents with two derivations."""

import gzip
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient

from assets.execution.materialize import JobSpec, describe_job
from assets.execution.run_liveness import is_alive, process_of
from assets.inputs.current import resolve_root
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline
from assets.views.metadata import verbatim
from model_registry.registry import Registry
from tests.workflows import edits
from tests.workflows.edits import Edit, Sandbox, data_lines, field, fields, retokenizer, template
from tests.workflows.homes import check_error, check_values, flip, latest
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.state.test_truth_table import CAPITAL, HELD_OUT, PLAIN, TRAINED
from training.contract.errors import CorruptArtifact, DataError, StoreError, UsageError
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.artifacts import POLICY
from training.contract.protocol.events import Event
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import ScoringSettings, TrainingSpec
from workflows.commands.inspect_pair import inspect_row
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.verify import verify
from workflows.orchestration.observations import CAUSES, observe
from workflows.recipes.discovery import LoadedRecipe, load_recipe
from workflows.state.status import AssetStatus, status

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path_factory.mktemp("edited"), {"plain": PLAIN}) as made:
        yield made


@pytest.fixture
def sandbox(baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    yield Sandbox(Path(shutil.copytree(baseline.folders["plain"], tmp_path / "plain")), baseline.home, monkeypatch)
    baseline.restore("plain")
    # A test may have released another model under this name.
    (baseline.home / "names" / "plain.json").unlink(missing_ok=True)


def run(baseline: Baseline, sandbox: Sandbox, asset: str | None = None) -> LoadedRecipe:
    loaded = load_recipe(sandbox.folder)
    report = materialize(loaded, baseline.services, baseline.instance, asset)
    assert report.succeeded, report
    return loaded


def test_version_tags_after_an_edit_are_the_current_lineage(baseline: Baseline, sandbox: Sandbox):
    """The rewritten file has the same rows, so the same artifact. Its manifest names the file before the edit.

    The edited template gives the same tokens, so the same policy gets another version. That version misses a new floor.
    """
    edits.rewrite_data(sandbox)
    template(lambda text: "{#- of now -#}" + text)(sandbox)
    field("release.gate.min_accuracy", 1.0)(sandbox)
    pipeline = run(baseline, sandbox).pipeline
    now = {
        name: latest(baseline.instance, pipeline.key(name)).fingerprint
        for name in ("preference_source", "raw_preferences")
    }
    before = baseline.fingerprints["plain"]
    assert (
        now["raw_preferences"] == before["raw_preferences"] and now["preference_source"] != before["preference_source"]
    )
    version = max(baseline.services.registry.versions(), key=lambda version: version.number)
    lineage = json.loads((baseline.services.registry.folder(version).parent / "lineage.json").read_text())
    assert {name: lineage[name] for name in now} == now
    assert version.tags["pedigree.policy"] == before["policy"]
    released = baseline.services.registry.resolve(f"models:/plain/{version.number}")
    assert (released / "chat_template.jinja").read_text().startswith("{#- of now -#}")
    assert re.fullmatch(
        r"held-out accuracy 0\.\d+ .* floor of 1; .*policy .*champion.* tokenizer or chat template.* alias .*",
        version.tags["pedigree.reasons"],
    )
    shown = [latest(baseline.instance, pipeline.key(name)).metadata["changes"] for name in (*now, "released_model")]
    assert "preferences.jsonl differs" in shown[0] and "preference_source: preferences.jsonl differs" in shown[1]
    assert "gate.min_accuracy null -> 1.0\n" in shown[2] and "code version" not in shown[2]


def compress_data(sandbox: Sandbox) -> None:
    """Compress the file: the job reads it and finds the same rows."""
    with gzip.open(sandbox.folder / "preferences.jsonl.gz", "wb") as file:
        file.write(sandbox.data.read_bytes())
    sandbox.set("data.sources.0.path", "preferences.jsonl.gz")


@pytest.mark.parametrize("edit", [edits.rename_data, compress_data])
def test_rows_of_a_renamed_file_keep_its_first_name(baseline: Baseline, sandbox: Sandbox, edit: Edit):
    edit(sandbox)
    [note] = notes_on_rows(baseline, sandbox)
    assert note.endswith(" preferences.jsonl")


def test_rows_of_files_with_exchanged_names_keep_the_first_names(baseline: Baseline, sandbox: Sandbox):
    edits.hold_out_a_file(sandbox)
    one, two = (sandbox.folder / "parts" / f"{n}.jsonl" for n in (1, 2))
    assert notes_on_rows(baseline, sandbox) == []
    aside = one.rename(one.with_suffix(".aside"))
    two.rename(one)
    aside.rename(two)
    sandbox.set("data.sources", [{"path": "parts/2.jsonl"}, {"path": "parts/1.jsonl", "held_out": True}])
    [note] = notes_on_rows(baseline, sandbox)
    assert note.endswith(" 2.jsonl, 1.jsonl")


def notes_on_rows(baseline: Baseline, sandbox: Sandbox) -> list[str]:
    """Run the rows' asset and return the notes about the file names at their first reading."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        notes.append(event.get("text", ""))

    services = replace(baseline.services, listener=listen)
    report = materialize(load_recipe(sandbox.folder), services, baseline.instance, "raw_preferences")
    assert report.succeeded, report
    return [text for text in notes if "names" in text and ".jsonl" in text]


def causes(pipeline: Pipeline, baseline: Baseline) -> dict[str, tuple[str, ...]]:
    return {asset.asset: asset.causes for asset in status(pipeline, baseline.services, baseline.instance)}


def run_with_another(baseline: Baseline, sandbox: Sandbox, meanwhile: str) -> dict[str, str]:
    """Run the recipe and return the outcomes. During the job of `meanwhile`, another run records the first artifacts again."""
    events: list[str] = []

    def listen(event: Event) -> None:
        if event.get("asset") == meanwhile and not events:
            baseline.restore("plain")
            events.append(event["event"])

    report = materialize(load_recipe(sandbox.folder), replace(baseline.services, listener=listen), baseline.instance)
    assert events, report
    return {asset.asset: asset.outcome for asset in report.assets}


def test_picture_of_a_reused_artifact_is_drawn_once(
    baseline: Baseline, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    """A reused artifact keeps its latest picture. A new policy draws two: its rewards, and its held-out margins."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def counted(figure: Figure, *given: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *given, **options)

    def pictures() -> list[str]:
        """Run the recipe and return the pictures of pairs and policy."""
        pipeline, shown = run(baseline, sandbox).pipeline, {"tokenized_pairs": "lengths", "policy": "rewards"}
        return [latest(baseline.instance, pipeline.key(asset)).metadata[name] for asset, name in shown.items()]

    field("release.model_name", "pictures")(sandbox)
    field("release.gate.type", "ladder")(sandbox)  # the other one draws its evidence
    run(baseline, sandbox)
    monkeypatch.setattr(Figure, "savefig", counted)
    first = pictures()
    assert [text.partition("]")[0] for text in first] == ["![sequence lengths", "![rewards by step"] and drawn == []
    field("training.seed", 7)(sandbox)
    second = pictures()
    assert (second[0] == first[0], second[1] == first[1], len(drawn)) == (True, False, 2)
    data_lines(lambda rows: rows[3:])(sandbox)
    third = pictures()
    assert (third[0] == second[0], third[1] == second[1], len(drawn)) == (False, False, 5)
    edits.code_version("policy")(sandbox)
    assert (pictures(), len(drawn)) == (third, 6), "another code version draws the picture of the same artifact again"


def test_report_has_outcomes_of_its_own_run(baseline: Baseline, sandbox: Sandbox):
    field("evaluation.max_new_tokens", 3)(sandbox)
    outcomes = run_with_another(baseline, sandbox, "evaluation")
    assert outcomes["policy"] == "reused" and outcomes["evaluation"] == "computed"


def test_a_run_that_is_deleted_in_dagster_goes_on(baseline: Baseline, sandbox: Sandbox):
    """A user deletes the run during the evaluation. Its results are recorded and reported all the same."""
    field("evaluation.max_new_tokens", 9)(sandbox)

    def delete(event: Event) -> None:
        for run in baseline.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            baseline.instance.delete_run(run.run_id)

    loaded = load_recipe(sandbox.folder)
    report = materialize(loaded, replace(baseline.services, listener=delete), baseline.instance)
    assert report.succeeded and baseline.instance.get_run_by_id(report.dagster_run_id) is None
    computed = {asset.asset for asset in report.assets if asset.outcome == "computed"}
    assert computed == {"evaluation_spec", "evaluation", "released_model"}
    assert {asset.state for asset in status(loaded.pipeline, baseline.services, baseline.instance)} == {"fresh"}


def test_artifacts_of_one_run_are_made_from_one_another(baseline: Baseline, sandbox: Sandbox):
    """During the scoring of new pairs another run records the previous pairs."""
    data_lines(lambda rows: rows[:-1])(sandbox)
    outcomes = run_with_another(baseline, sandbox, "reference_logprobs")
    scored = ("reference_logprobs", "prequential_scores")
    computed = {"raw_preferences", "tokenized_pairs", *scored, "policy", "evaluation", "released_model"}
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} == {"preference_source", *computed}
    pipeline = load_recipe(sandbox.folder).pipeline
    found = causes(pipeline, baseline)
    assert found["policy"] == found["evaluation"] == ()
    for asset in ("reference_logprobs", "policy", "evaluation"):
        made = latest(baseline.instance, pipeline.key(asset))
        how = baseline.services.store.derivation(asset, made.key or "")
        assert how is not None, asset
        recorded = {name: made.input_version(pipeline.key(name)) for name in how.inputs}
        assert recorded == {name: source.fingerprint for name, source in how.inputs.items()}, asset


def test_recorded_input_is_the_spec_that_was_used(baseline: Baseline, sandbox: Sandbox):
    """The evaluation uses the spec of its own run, although another spec was recorded when it began."""
    data_lines(lambda rows: rows[:-2])(sandbox)
    field("evaluation.max_new_tokens", 3)(sandbox)
    run_with_another(baseline, sandbox, "policy")
    pipeline = load_recipe(sandbox.folder).pipeline
    spec, made = (latest(baseline.instance, pipeline.key(asset)) for asset in ("evaluation_spec", "evaluation"))
    assert spec.fingerprint == baseline.fingerprints["plain"]["evaluation_spec"]
    assert made.input_version(pipeline.key("evaluation_spec")) not in (None, spec.fingerprint)
    assert causes(pipeline, baseline)["evaluation"] == (), (
        "its inputs are those of the recipe, and the recorded spec is not"
    )


def test_inspect_of_a_row_with_other_tokens_shows_no_earlier_log_prob(baseline: Baseline, sandbox: Sandbox):
    pipeline = load_recipe(sandbox.folder).pipeline
    assert inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT).chosen.policy_logprob is not None
    data_lines(edits.reword(HELD_OUT))(sandbox)
    pipeline = run(baseline, sandbox, "tokenized_pairs").pipeline
    found = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT)
    assert (found.split, found.chosen.policy_logprob, found.rejected.policy_logprob) == ("validation", None, None)
    with pytest.raises(UsageError, match=r"plain/reference_logprobs .*plain/tokenized_pairs .*\[stale-logprobs\]"):
        inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT, score=True)


def test_added_and_removed_pairs_are_reported_and_recorded(baseline: Baseline, sandbox: Sandbox):
    """One of 24 rows is reworded and one is appended. The history keeps it for other readers."""
    edits.both(data_lines(edits.reword(TRAINED)), data_lines(lambda rows: [*rows, CAPITAL]))(sandbox)
    events: list[Event] = []
    services, loaded = replace(baseline.services, listener=events.append), load_recipe(sandbox.folder)
    assert materialize(loaded, services, baseline.instance, "raw_preferences").succeeded
    place = f"preferences.jsonl, line {TRAINED + 1}"
    message = rf"2 pairs added, .*{place}.*1 pair removed, .*{place}"
    assert [event for event in events if event["event"] == "note" and re.search(message, event["text"])]
    changes = latest(baseline.instance, loaded.pipeline.key("raw_preferences")).metadata["changes"]
    assert re.search(f"(?s){message}", changes)
    check_values(changes, "preference_source: preferences.jsonl ", "24 -> 25 rows")


def test_inspect_of_a_dropped_row_is_refused(baseline: Baseline, sandbox: Sandbox):
    """Its answer has more tokens than `max_length` allows. The pairs before and after it are found all the same."""

    def too_long(lines: list[str]) -> list[str]:
        row = json.loads(lines[TRAINED])
        row["rejected"][0]["content"] *= 128
        return [*lines[:TRAINED], json.dumps(row) + "\n", *lines[TRAINED + 1 :]]

    data_lines(too_long)(sandbox)
    pipeline = run(baseline, sandbox, "reference_logprobs").pipeline
    arguments = (pipeline, baseline.services, baseline.instance)
    with pytest.raises(UsageError, match=rf"row {TRAINED} .*\[dropped-row\]"):
        inspect_row(*arguments, TRAINED)
    assert [inspect_row(*arguments, TRAINED + step).row for step in (-1, 1)] == [TRAINED - 1, TRAINED + 1]


def test_inspect_of_an_unevaluated_policy_shows_no_earlier_log_prob(baseline: Baseline, sandbox: Sandbox):
    """Scoring on demand uses the new weights, so its log-probs differ from the evaluation."""
    pipeline = load_recipe(sandbox.folder).pipeline
    before = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT).chosen.policy_logprob
    field("training.optimizer.learning_rate", 0.02)(sandbox)
    pipeline = run(baseline, sandbox, "policy").pipeline
    assert inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT).chosen.policy_logprob is None
    scored = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT, score=True).chosen.policy_logprob
    run(baseline, sandbox, "evaluation")
    evaluated = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT).chosen.policy_logprob
    assert scored == pytest.approx(evaluated, abs=1e-4) and abs(evaluated - before) > 1e-2


def test_inspect_shows_the_messages_of_the_tokens(baseline: Baseline, sandbox: Sandbox):
    """The rows were read in another order, and not tokenized yet."""
    data_lines(lambda rows: rows[::-1])(sandbox)
    pipeline = run(baseline, sandbox, "raw_preferences").pipeline
    found = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT)
    assert found.messages["chosen"][0]["content"] in "".join(found.chosen.texts)


def test_causes_after_a_partial_run_are_still_the_edits(baseline: Baseline, sandbox: Sandbox):
    """If the inputs' record is missing, only fingerprints can name the cause."""
    data_lines(edits.reword(HELD_OUT))(sandbox)
    field("training.loss.beta", 0.7)(sandbox)
    run(baseline, sandbox, "training_spec")
    pipeline = run(baseline, sandbox, "tokenized_pairs").pipeline
    data, beta = (
        "preference_source: preferences.jsonl differs (24 -> 24 rows read)",
        "training_spec: loss.beta 0.1 -> 0.7",
    )
    found = causes(pipeline, baseline)
    assert found["reference_logprobs"] == (data,) and found["policy"] == (data, beta)
    old, now = (
        baseline.fingerprints["plain"]["tokenized_pairs"],
        latest(baseline.instance, pipeline.key("tokenized_pairs")),
    )
    assert old is not None
    lost = baseline.services.store.folder("tokenized_pairs", old)
    lost.rename(aside := lost.with_name("aside"))
    [cause] = causes(pipeline, baseline)["reference_logprobs"]
    check_values(cause, "tokenized_pairs", short(old), short(now.fingerprint))
    aside.rename(lost)


def test_run_records_the_causes_of_status(baseline: Baseline, sandbox: Sandbox):
    """For sources, specs and everything below, as for an observation before the run. A further edit is named alone."""
    data_lines(edits.reword(HELD_OUT))(sandbox)
    template(lambda text: "{#- of now -#}" + text)(sandbox)
    flip(sandbox.base / "model.safetensors")
    field("training.loss.beta", 0.7)(sandbox)
    pipeline = load_recipe(sandbox.folder).pipeline
    reported = causes(pipeline, baseline)
    observe(pipeline, baseline.instance, status(pipeline, baseline.services, baseline.instance))
    for asset, found in reported.items():
        records = baseline.instance.fetch_observations(pipeline.key(asset), limit=9).records
        metadata = [record.asset_observation.metadata for record in records if record.asset_observation]
        assert [shown[CAUSES] for shown in metadata if CAUSES in shown] == [verbatim(found)], asset
    shown = changes_shown(run(baseline, sandbox).pipeline, baseline)
    assert len(reported["released_model"]) == 6, reported["released_model"]
    for asset, found in reported.items():
        assert shown[asset].startswith(verbatim(found).value), asset
    field("training.loss.beta", 0.6)(sandbox)
    shown = changes_shown(run(baseline, sandbox).pipeline, baseline)
    assert shown["policy"] == verbatim(["training_spec: loss.beta 0.7 -> 0.6"]).value
    assert shown["tokenized_pairs"] == "nothing"


def test_causes_without_a_derivation_are_fingerprints(baseline: Baseline, sandbox: Sandbox):
    """The derivation of the previous pairs is missing from the store, and so are the inputs of the policy."""
    data_lines(edits.reword(HELD_OUT))(sandbox)
    old = baseline.fingerprints["plain"]["raw_preferences"]
    assert old is not None
    lost = baseline.services.store.folder("raw_preferences", old)
    run(baseline, sandbox, "raw_preferences")
    lost.rename(aside := lost.with_name("aside"))
    pipeline = run(baseline, sandbox, "tokenized_pairs").pipeline
    aside.rename(lost)
    now = latest(baseline.instance, pipeline.key("raw_preferences")).fingerprint
    cause = f"raw_preferences {short(old)} -> {short(now)}"
    assert changes_shown(pipeline, baseline)["tokenized_pairs"] == verbatim([cause]).value


def changes_shown(pipeline: Pipeline, baseline: Baseline) -> dict[str, str]:
    """Return the metadata `changes` of every asset's latest materialization."""
    return {asset: latest(baseline.instance, pipeline.key(asset)).metadata["changes"] for asset in GRAPH}


def test_table_first_made_from_other_pairs_is_read_for_the_current_pairs(baseline: Baseline, sandbox: Sandbox):
    """Another end of sequence makes other pairs with the same tokens, so with the same table of log-probs."""
    retokenizer(edits.end_with_the_user)(sandbox)
    pipeline = run(baseline, sandbox, "reference_logprobs").pipeline
    for asset, same in (("tokenized_pairs", False), ("reference_logprobs", True)):
        assert (
            latest(baseline.instance, pipeline.key(asset)).fingerprint == baseline.fingerprints["plain"][asset]
        ) is same
    found = inspect_row(pipeline, baseline.services, baseline.instance, HELD_OUT)
    assert found.chosen.reference_logprob is not None and found.chosen.policy_logprob is not None
    assert "tokenizer eos_token " in latest(baseline.instance, pipeline.key("tokenization_spec")).metadata["changes"]


def test_a_policy_that_starts_from_the_champion(baseline: Baseline, sandbox: Sandbox):
    """The spec holds the champion's weights. The next champion is another start, and automation must not loop."""
    fields("training", {"start_from": "champion", "max_steps": 2})(sandbox)
    field("automation.on_change", False)(sandbox)
    registry, name = baseline.services.registry, "plain"
    first, weights = registry.champion(name), baseline.fingerprints["plain"]["policy"]
    found = causes(load_recipe(sandbox.folder).pipeline, baseline)
    assert f"champion absent -> {short(weights)}" in found["training_spec"]
    loaded = run(baseline, sandbox)
    pipeline = loaded.pipeline
    made = baseline.services.store.open(POLICY, latest(baseline.instance, pipeline.key("policy")).fingerprint or "")
    assert made.manifest.made_from.settings["champion"] == weights
    assert made.details.step0_loss == pytest.approx(math.log(2), abs=1e-5)
    assert abs(made.details.series["rewards/margins"][0]) > 1e-4
    second = registry.find_version(name, {"pedigree.policy": made.fingerprint})
    assert registry.promote(second, over=first)
    assert causes(pipeline, baseline)["training_spec"] == (f"champion {short(weights)} -> {short(made.fingerprint)}",)
    client = MlflowClient(registry.tracking_uri)
    tags = [
        (name, str(version.number), "pedigree.policy")
        for version in registry.versions(name)
        if version.weights == weights
    ]
    for tag in tags:  # so that no version has these weights
        client.delete_model_version_tag(*tag)
    with pytest.raises(StoreError, match=rf" {short(weights)}, .*\[champion-changed\]"):
        select(["policy"], loaded, baseline)
    for tag in tags:
        client.set_model_version_tag(*tag, weights)
    select(["policy"], loaded, baseline)
    assert latest(baseline.instance, pipeline.key("policy")).fingerprint == made.fingerprint, "of the frozen spec"
    assert registry.promote(first, over=second)
    assert {a.state for a in status(pipeline, baseline.services, baseline.instance)} == {"fresh"}


def select(assets: Sequence[str], loaded: LoadedRecipe, baseline: Baseline) -> dg.DagsterRun:
    """Materialize assets alone, as by a click in Dagster's UI; inputs stay as recorded. Raises the error of an asset's body."""
    here = dg.Definitions(resources={"services": baseline.services}, executor=dg.in_process_executor)
    job = dg.Definitions.merge(loaded.definitions, here).resolve_implicit_global_asset_job_def()
    keys = [loaded.pipeline.key(asset) for asset in assets]
    done = job.execute_in_process(instance=baseline.instance, asset_selection=keys)
    return done.dagster_run


def test_single_asset_is_made_from_recorded_inputs(baseline: Baseline, sandbox: Sandbox):
    """Recipe, data and model have been edited since, and no run has recorded it."""
    field("training.loss.beta", 0.9)(sandbox)
    data_lines(edits.reword(HELD_OUT))(sandbox)
    loaded = load_recipe(sandbox.folder)
    select(["policy"], loaded, baseline)
    with pytest.raises(DataError, match=r"plain/preference_source .*\[preferences-changed\]"):
        select(["raw_preferences"], loaded, baseline)
    edits.flip_a_bit(sandbox)
    select(["reference_model"], loaded, baseline)
    for asset in ("policy", "reference_model"):
        assert (
            latest(baseline.instance, loaded.pipeline.key(asset)).fingerprint == baseline.fingerprints["plain"][asset]
        )


@pytest.mark.parametrize(
    ("edit", "first", "then", "values", "together"),
    [
        pytest.param(
            field("training.seed", 7),
            ["training_spec", "policy"],
            "released_model",
            "evaluation {evaluation} |policy {policy}|plain/policy |{now}",
            "plain/evaluation and plain/released_model",
            id="a policy that was not evaluated",
        ),
        pytest.param(
            data_lines(edits.swap_sides(HELD_OUT)),
            ["preference_source", "raw_preferences", "tokenized_pairs"],
            "evaluation",
            "policy {policy} |tokenized_pairs {tokenized_pairs}|plain/tokenized_pairs |{now}",
            "plain/reference_logprobs, plain/policy and plain/evaluation",
            id="log-probs of other pairs",
        ),
        pytest.param(
            template(lambda text: "To whom it may concern: " + text),
            ["tokenization_spec"],
            "released_model",
            "tokenized_pairs {tokenized_pairs} |tokenization_spec {tokenization_spec}|plain/tokenization_spec |{now}",
            "plain/release_spec, plain/tokenized_pairs, plain/reference_logprobs, plain/policy, plain/evaluation and "
            "plain/released_model",
            id="a tokenizer that the policy was not trained with",
        ),
    ],
)
def test_inputs_of_different_lineages_are_refused(
    baseline: Baseline, sandbox: Sandbox, edit: Edit, first: list[str], then: str, values: str, together: str
):
    """A user materializes some assets, then one below. Materializing the assets in the message makes them consistent."""
    edit(sandbox)
    loaded, versions = load_recipe(sandbox.folder), baseline.services.registry.versions()
    select(first, loaded, baseline)
    now = short(latest(baseline.instance, loaded.pipeline.key(first[-1])).fingerprint)
    fingerprints = {asset: short(found) for asset, found in baseline.fingerprints["plain"].items()}
    with pytest.raises(StoreError, match=r"\[inconsistent-inputs\]$") as caught:
        select([then], loaded, baseline)
    check_values(caught.value, *values.format(now=now, **fingerprints).split("|"), f" {together} ")
    assert baseline.services.registry.versions() == versions
    assets = [name.removeprefix("plain/") for name in re.split(", | and ", together)]
    select(assets, loaded, baseline)
    made = {asset: state for asset, state in causes(loaded.pipeline, baseline).items() if asset in (*first, *assets)}
    assert made == dict.fromkeys(made, ())


def test_evaluation_after_the_training_spec_alone_uses_the_loss_of_the_policy(baseline: Baseline, sandbox: Sandbox):
    """The evaluation spec still has the loss of before. Once it is materialized too, the evaluation is the same."""
    field("training.loss.beta", 0.5)(sandbox)
    loaded, store = load_recipe(sandbox.folder), baseline.services.store
    pipeline = loaded.pipeline
    select(["training_spec", "policy", "evaluation"], loaded, baseline)
    spec = store.open("evaluation_spec", latest(baseline.instance, pipeline.key("evaluation_spec")).fingerprint or "")
    assert spec.json("spec.json")["loss"]["beta"] == 0.1
    made = latest(baseline.instance, pipeline.key("evaluation"))
    found = store.find("evaluation", made.key or "")
    assert found is not None and found.derivation.settings["loss"]["beta"] == 0.5
    assert found.derivation.inputs["evaluation_spec"].fingerprint == spec.fingerprint
    for row in pq.read_table(found.file("pairs.parquet")).to_pylist():
        moved = row["policy_chosen_logprob"] - row["reference_chosen_logprob"]
        moved -= row["policy_rejected_logprob"] - row["reference_rejected_logprob"]
        assert row["margin"] == pytest.approx(0.5 * moved, abs=1e-6)
    select(["evaluation_spec", "evaluation"], loaded, baseline)
    assert latest(baseline.instance, pipeline.key("evaluation")).fingerprint == made.fingerprint
    assert causes(pipeline, baseline)["evaluation"] == ()


def test_reference_tuned_on_other_pairs_is_named_with_the_assets_below(baseline: Baseline, sandbox: Sandbox):
    """The current recipe tunes no reference, so it depends on no pairs; but it has to be materialized first."""
    field("reference.sft", {"epochs": 1, "batch_size": 8})(sandbox)
    run(baseline, sandbox, "reference_model")
    field("reference.sft", None)(sandbox)
    data_lines(edits.swap_sides(HELD_OUT))(sandbox)
    loaded = load_recipe(sandbox.folder)
    select(["preference_source", "raw_preferences", "tokenized_pairs"], loaded, baseline)
    with pytest.raises(
        StoreError, match=r" plain/reference_model and plain/reference_logprobs .*\[inconsistent-inputs\]"
    ):
        select(["reference_logprobs"], loaded, baseline)
    select(["reference_model", "reference_logprobs"], loaded, baseline)


@pytest.mark.parametrize("by_command", [True, False], ids=["by the command", "in Dagster's UI"])
def test_name_of_another_recipe_is_refused(baseline: Baseline, sandbox: Sandbox, by_command: bool):
    """Another folder of that name, for another model, while the first still exists."""

    def run_spec(folder: Path) -> None:
        if by_command:
            materialize(load_recipe(folder), baseline.services, baseline.instance, "training_spec")
        else:
            select(["training_spec"], load_recipe(folder), baseline)

    run_spec(baseline.folders["plain"])
    field("release.model_name", "another")(sandbox)
    with pytest.raises(UsageError) as caught:
        run_spec(sandbox.folder)
    check_error(caught.value, "name-taken", baseline.folders["plain"], sandbox.folder, " another")


@pytest.mark.parametrize("tuned", [False, True], ids=["plain reference", "tuned reference"])
def test_selected_asset_is_materialized_with_its_inputs(baseline: Baseline, sandbox: Sandbox, tuned: bool):
    """Supervised tuning takes the pairs."""
    field("reference.sft", {"epochs": 1} if tuned else None)(sandbox)
    report = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance, "reference_model")
    pairs = {"preference_source", "raw_preferences", "tokenization_spec", "tokenized_pairs"} if tuned else set()
    assert report.succeeded and {asset.asset for asset in report.assets} == {"base_model", "reference_model"} | pairs


@pytest.mark.parametrize("asset", ["preference_source", "released_model"])
def test_run_started_in_dagster_is_tagged_with_its_process(baseline: Baseline, sandbox: Sandbox, asset: str):
    """The next run must find a killed run dead, even if it only downloaded a base model."""
    run = select([asset], load_recipe(sandbox.folder), baseline)
    assert is_alive(process_of(run), baseline.home)


def test_run_with_another_recipes_policy_shows_its_own_recipe(baseline: Baseline, sandbox: Sandbox):
    """A copy under another name and for another model reuses the policy, and has its own run in MLflow."""
    computed = {"prequential_scores", "released_model"}  # of this name and model
    field("release.model_name", "copied")(sandbox)
    edits.another_name(sandbox)
    report = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance)
    assert {asset.asset for asset in report.assets if asset.outcome == "computed"} == computed
    run = MlflowClient(baseline.services.registry.tracking_uri).get_run(report.mlflow_run_id)
    assert run.data.params["release.model_name"] == "copied" and run.data.tags["recipe"] == "renamed"
    assert run.data.params["data.sources.0.path"] == str(sandbox.folder / "preferences.jsonl")
    assert run.data.metrics["loss"] > 0, "its steps were reported again"


def test_repeated_run_has_no_metrics_of_other_held_out_pairs(baseline: Baseline, sandbox: Sandbox):
    """Training on the same pairs gives the same weights. They keep the metrics of the first training's held-out pairs."""
    data_lines(edits.reword(HELD_OUT))(sandbox)
    report = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance)
    client = MlflowClient(baseline.services.registry.tracking_uri)
    client.delete_run(report.mlflow_run_id)
    again = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance)
    assert again.mlflow_run_id != report.mlflow_run_id
    history = client.get_metric_history(again.mlflow_run_id, "eval/loss")
    assert [point.value for point in history] == [report.metrics["eval/loss"]]
    assert len(client.get_metric_history(again.mlflow_run_id, "loss")) == 3


def test_alias_moved_by_a_user_stays(baseline: Baseline, sandbox: Sandbox):
    """Eight held-out pairs are too few for the gate. A user promotes the candidate, and takes it back."""
    client, registry = MlflowClient(baseline.services.registry.tracking_uri), baseline.services.registry
    first = registry.champion("plain").number
    field("training.seed", 1)(sandbox)
    field("release.gate.type", "ladder")(sandbox)
    pipeline = run(baseline, sandbox).pipeline
    second = int(client.get_registered_model("plain").aliases["candidate"])
    refused = "only 8 held-out pairs .* 10 prompts .* alias .*"
    moved = f".* user .* alias .*; {refused}"
    assert second != first
    for champion, verdict, reasons in ((first, "no", refused), (second, "yes", moved), (first, "no", refused)):
        client.set_registered_model_alias("plain", "champion", str(champion))
        assert {asset.action for asset in plan(pipeline, baseline.services, baseline.instance)} == {"reuse"}
        run(baseline, sandbox, "released_model")
        shown = latest(baseline.instance, pipeline.key("released_model")).metadata
        assert shown["champion"] == verdict and re.fullmatch(reasons, shown["reasons"]), shown["reasons"]
        assert registry.champion("plain").number == champion


def test_before_there_is_a_champion_a_policy_starts_from_the_reference(baseline: Baseline, sandbox: Sandbox):
    fields("training", {"start_from": "champion"})(sandbox)
    fields("automation", {"on_change": False})(sandbox)
    field("release.model_name", "nobody")(sandbox)
    found = resolve_root(load_recipe(sandbox.folder).pipeline, baseline.services, "training_spec")
    assert found.files["spec.json"]["champion"] is None


def test_corrupt_artifacts_other_than_models_are_recomputed(baseline: Baseline, sandbox: Sandbox):
    """Flip a bit of every artifact but the policy, sources, specs and the base model's pointer included, and of two records.

    A policy with a corrupt record is not trained again: its manifest has the same facts.
    """
    store, before = baseline.services.store, baseline.fingerprints["plain"]
    pipeline = load_recipe(sandbox.folder).pipeline
    for asset in (name for name in GRAPH if name not in ("policy", "released_model")):
        manifest = store.open(asset, before[asset]).manifest
        flip(store.folder(asset, before[asset]) / next(iter(manifest.files)))
    for asset in ("evaluation", "policy"):
        flip(store.root / "keys" / asset / f"{latest(baseline.instance, pipeline.key(asset)).key}.json")
    found = causes(pipeline, baseline)
    [cause] = found["raw_preferences"]
    check_values(cause, "file preferences.parquet ", "corrupt")
    assert found["evaluation"] == found["policy"] == (CORRUPT_RECORD,)
    report = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance)
    assert report.succeeded, report
    assert {asset.asset: asset.fingerprint for asset in report.assets} == before
    assert [asset.asset for asset in report.assets if asset.outcome == "reused"] == ["policy", "released_model"]
    for asset in GRAPH.keys() - {"released_model"}:
        store.open(asset, before[asset])


def test_a_corrupt_model_is_refused(baseline: Baseline, sandbox: Sandbox):
    weights = (
        baseline.services.store.folder("policy", baseline.fingerprints["plain"]["policy"] or "") / "model.safetensors"
    )
    flip(weights)
    loaded = load_recipe(sandbox.folder)
    [cause] = causes(loaded.pipeline, baseline)["policy"]
    check_values(cause, "file model.safetensors ", "corrupt")
    report = materialize(loaded, baseline.services, baseline.instance)
    field("evaluation.max_new_tokens", 4)(sandbox)
    field("release.model_name", "elsewhere")(sandbox)
    edited, versions = load_recipe(sandbox.folder), baseline.services.registry.versions()
    for assets in (["evaluation_spec", "evaluation"], ["released_model"]):
        with pytest.raises(CorruptArtifact, match=rf"{weights} .*\[wrong-hash\]"):
            select(assets, edited, baseline)
    flip(weights)
    assert baseline.services.registry.versions() == versions
    assert [asset.asset for asset in report.assets if asset.outcome == "failed"] == ["policy"]
    check_error(report.assets[-1].error, "corrupt-model", weights, f" {weights.parent} ")


def test_corrupt_input_is_refused_before_the_job(baseline: Baseline, sandbox: Sandbox):
    """A missing artifact checks its inputs; an existing one does not."""
    pairs = baseline.services.store.folder("tokenized_pairs", baseline.fingerprints["plain"]["tokenized_pairs"] or "")
    flip(pairs / "pairs.arrow")
    select(["evaluation"], load_recipe(sandbox.folder), baseline)
    field("evaluation.max_new_tokens", 5)(sandbox)
    with pytest.raises(CorruptArtifact, match=rf"{pairs / 'pairs.arrow'} .*\[wrong-hash\]"):
        select(["evaluation_spec", "evaluation"], load_recipe(sandbox.folder), baseline)
    flip(pairs / "pairs.arrow")


def test_existing_files_are_read_once(baseline: Baseline, sandbox: Sandbox):
    """However many assets depend on it: 16 GB of weights take a minute each time. Oracle: Python's audit hook for `open`.

    The page of pairs shows some of them, so their file is read twice.
    """
    with opened(sandbox.base / "model.safetensors") as once:
        weights_identity(sandbox.base)
    files = {"base": sandbox.base / "model.safetensors"}
    for asset, name in (("policy", "model.safetensors"), ("tokenized_pairs", "pairs.arrow")):
        files[asset] = baseline.services.store.folder(asset, baseline.fingerprints["plain"][asset] or "") / name
    with opened(*files.values()) as seen:
        report = materialize(load_recipe(sandbox.folder), baseline.services, baseline.instance)
    assert {asset.outcome for asset in report.assets} == {"reused"}
    assert {of: seen.count(file) for of, file in files.items()} == {
        "base": len(once),
        "policy": 1,
        "tokenized_pairs": 2,
    }


@contextmanager
def opened(*files: Path) -> Iterator[list[Path]]:
    """Record each opening of the files within the block, in order."""
    found, watched, watching = list[Path](), {str(file): file for file in files}, True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and (file := watched.get(str(arguments[0]))) is not None:
            found.append(file)

    sys.addaudithook(note)  # an audit hook cannot be removed
    yield found
    watching = False


def test_causes_with_a_corrupt_or_missing_record_name_it(baseline: Baseline, sandbox: Sandbox):
    """Then the cause is unknown, and status says so. A missing record is also reported without an edit.

    A spec with a corrupt record is frozen again, without the previous record.
    """
    pipeline = load_recipe(sandbox.folder).pipeline
    key = latest(baseline.instance, pipeline.key("policy")).key
    record = baseline.services.store.record_file("policy", key)
    flip(record)
    field("training.loss.beta", 0.9)(sandbox)
    corrupt = causes(load_recipe(sandbox.folder).pipeline, baseline)["policy"]
    flip(record)
    record.rename(aside := record.with_suffix(".aside"))
    missing = causes(pipeline, baseline)["policy"]
    aside.rename(record)
    assert (corrupt, missing) == ((CORRUPT_RECORD,), (NO_RECORD,))
    flip(
        record := baseline.services.store.record_file(
            "training_spec", latest(baseline.instance, pipeline.key("training_spec")).key
        )
    )
    assert causes(load_recipe(sandbox.folder).pipeline, baseline)["training_spec"] == (CORRUPT_RECORD,)
    run(baseline, sandbox, "training_spec")
    flip(record)
    assert CORRUPT_RECORD in latest(baseline.instance, pipeline.key("training_spec")).metadata["changes"]


def test_model_changed_since_its_materialization_is_refused(baseline: Baseline, sandbox: Sandbox):
    """A user may materialize one asset alone. Scoring must use the recorded weights or fail."""
    pipeline, store = load_recipe(sandbox.folder).pipeline, baseline.services.store
    pointer = store.open("reference_model", baseline.fingerprints["plain"]["reference_model"] or "")
    edits.flip_a_bit(sandbox)
    message = rf"reference_model .*{short(pointer.fingerprint)}.*plain/base_model.*\[base-model-changed\]"
    with pytest.raises(StoreError, match=message):
        describe_job(
            pipeline,
            baseline.services,
            "reference_logprobs",
            JobSpec("reference", ScoringSettings.of(pipeline.recipe)),
            {"reference_model": pointer.fingerprint},
        )


def test_jobs_of_one_asset_have_different_folders(baseline: Baseline, sandbox: Sandbox):
    """Variants run at the same time, and each writes its events to its folder."""
    pipeline, works = (
        load_recipe(sandbox.folder).pipeline,
        [JobSpec("policy", TrainingSpec(seed=seed), PolicyLocations()) for seed in (0, 1)],
    )
    assert len({describe_job(pipeline, baseline.services, "policy", work, {}).folder for work in works}) == 2


def test_unreachable_registry_is_reported_by_status_and_plan(baseline: Baseline, sandbox: Sandbox):
    """Nothing listens at port 9."""
    away = replace(baseline.services, registry=Registry("http://127.0.0.1:9", baseline.home / "mlflow" / "downloads"))
    pipeline = load_recipe(sandbox.folder).pipeline
    released, planned = status(pipeline, away, baseline.instance)[-1], plan(pipeline, away, baseline.instance)[-1]
    assert (released.asset, released.state, planned.action) == ("released_model", "fresh", "reuse")
    for [cause] in (released.causes, planned.causes):
        check_error(cause, "registry-unavailable", "version", "http://127.0.0.1:9")


def test_missing_version_is_reported_by_status_and_plan(baseline: Baseline, sandbox: Sandbox):
    """The last test: the version does not come back."""
    loaded = load_recipe(sandbox.folder)
    key = baseline.fingerprints["plain"]["released_model"]
    registry = baseline.services.registry
    version = registry.find_version("plain", {"pedigree.release": key})
    assert version is not None
    reasons = version.tags["pedigree.reasons"]
    client = MlflowClient(registry.tracking_uri)
    client.delete_model_version_tag("plain", str(version.number), "pedigree.champion")
    [cause] = causes(loaded.pipeline, baseline)["released_model"]
    check_values(cause, "version", "registry")
    run(baseline, sandbox, "released_model")
    tags = registry.find_version("plain", {"pedigree.release": key}).tags
    assert (tags["pedigree.champion"], tags["pedigree.reasons"]) == ("yes", reasons)
    client.delete_model_version("plain", str(version.number))
    found = status(loaded.pipeline, baseline.services, baseline.instance)
    assert found[-1] == AssetStatus("released_model", "stale", (cause,), key, notes=found[-1].notes)
    assert {asset.state for asset in found[:-1]} == {"fresh"}
    planned = plan(loaded.pipeline, baseline.services, baseline.instance)[-1]
    assert (planned.asset, planned.action, planned.causes) == ("released_model", "compute", (cause,))
    fault = verify(loaded.pipeline, baseline.services, baseline.instance, rows=0).artifacts[-1].fault
    check_values(fault, "version of plain ", "registry")
