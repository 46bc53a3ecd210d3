"""What is said of a recipe between an edit and the end of the next run, and of content that was made in two ways."""

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
from types import ModuleType
from typing import Any

import dagster as dg
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
from tests.workflows.edits import Edit, World, data_lines, field, fields, retokenizer, template
from tests.workflows.homes import flip, latest
from tests.workflows.in_process import Ground, run_in
from tests.workflows.state.test_truth_table import CAPITAL, HELD_OUT, PLAIN, TRAINED
from training.contract.errors import CorruptArtifact, DataError, StoreError, UsageError
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.events import Event
from workflows.commands.inspect_pair import inspect_row
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.verify import verify
from workflows.orchestration.observations import CAUSES, observe
from workflows.recipes.discovery import LoadedRecipe, load_recipe
from workflows.state.status import AssetStatus, status

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, demo_maker: ModuleType) -> Iterator[Ground]:
    with run_in(tmp_path_factory.mktemp("edited"), demo_maker, {"plain": PLAIN}) as made:
        yield made


@pytest.fixture
def world(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(Path(shutil.copytree(ground.folders["plain"], tmp_path / "plain")), ground.home, monkeypatch)
    ground.restore("plain")
    # A test may have released another model under the name.
    (ground.home / "names" / "plain.json").unlink(missing_ok=True)


def run(ground: Ground, world: World, asset: str | None = None) -> LoadedRecipe:
    loaded = load_recipe(world.folder)
    report = materialize(loaded, ground.services, ground.instance, asset)
    assert report.succeeded, report
    return loaded


def test_a_version_carries_the_lineage_of_now(ground: Ground, world: World):
    """The file says the same in other words, so its rows are the artifact whose manifest names the file of before.

    A template that gives the same tokens goes with the version of the same policy, which misses a floor that was set meanwhile.
    """
    edits.rewrite_data(world)
    template(lambda text: "{#- of now -#}" + text)(world)
    field("release.gate.min_accuracy", 1.0)(world)
    pipeline = run(ground, world).pipeline
    now = {
        name: latest(ground.instance, pipeline.key(name)).fingerprint
        for name in ("preference_source", "raw_preferences")
    }
    before = ground.fingerprints["plain"]
    assert (
        now["raw_preferences"] == before["raw_preferences"] and now["preference_source"] != before["preference_source"]
    )
    version = max(ground.services.registry.versions(), key=lambda version: version.number)
    assert {name: version.tags[f"pedigree.{name}"] for name in now} == now
    assert version.tags["pedigree.policy"] == before["policy"]
    released = ground.services.registry.resolve(f"models:/plain/{version.number}")
    assert (released / "chat_template.jinja").read_text().startswith("{#- of now -#}")
    assert re.fullmatch(
        r"held-out accuracy 0\.\d+ is below the recipe's floor of 1; .*; its policy is the champion's, with another tokenizer "
        "or chat template: if these are to be used, point the alias champion at it in MLflow",
        version.tags["pedigree.reasons"],
    )
    shown = [latest(ground.instance, pipeline.key(name)).metadata["changes"] for name in (*now, "released_model")]
    assert "preferences.jsonl differs" in shown[0] and "preference_source: preferences.jsonl differs" in shown[1]
    assert "gate.min_accuracy null -> 1.0\n" in shown[2] and "code version" not in shown[2]


def compress_data(world: World) -> None:
    """The job reads it, and finds the rows of before."""
    with gzip.open(world.folder / "preferences.jsonl.gz", "wb") as file:
        file.write(world.data.read_bytes())
    world.set("data.sources.0.path", "preferences.jsonl.gz")


@pytest.mark.parametrize("edit", [edits.rename_data, compress_data])
def test_a_renamed_file_is_still_called_as_before_in_its_rows(ground: Ground, world: World, edit: Edit):
    edit(world)
    assert notes_on_rows(ground, world) == ["preferences.jsonl"]


def test_files_that_exchange_their_names_are_still_called_as_before(ground: Ground, world: World):
    edits.hold_out_a_file(world)
    one, two = (world.folder / "parts" / f"{n}.jsonl" for n in (1, 2))
    assert notes_on_rows(ground, world) == []
    aside = one.rename(one.with_suffix(".aside"))
    two.rename(one)
    aside.rename(two)
    world.set("data.sources", [{"path": "parts/2.jsonl"}, {"path": "parts/1.jsonl", "held_out": True}])
    assert notes_on_rows(ground, world) == ["2.jsonl, 1.jsonl"]


def notes_on_rows(ground: Ground, world: World) -> list[str]:
    """The files' names of before that a run tells of."""
    notes: list[str] = []

    def hear(event: Event) -> None:
        notes.append(event.get("text", ""))

    told = replace(ground.services, listener=hear)
    report = materialize(load_recipe(world.folder), told, ground.instance, "raw_preferences")
    assert report.succeeded, report
    return [names for begin, _, names in (text.partition(" first read: ") for text in notes) if names]


def causes(pipeline: Pipeline, ground: Ground) -> dict[str, tuple[str, ...]]:
    return {asset.asset: asset.causes for asset in status(pipeline, ground.services, ground.instance)}


def run_with_another(ground: Ground, world: World, meanwhile: str) -> dict[str, str]:
    """The outcomes of a run; while the job of `meanwhile` works, another run records every asset as it was before."""
    heard: list[str] = []

    def hear(event: Event) -> None:
        if event.get("asset") == meanwhile and not heard:
            ground.restore("plain")
            heard.append(event["event"])

    report = materialize(load_recipe(world.folder), replace(ground.services, listener=hear), ground.instance)
    assert heard, report
    return {asset.asset: asset.outcome for asset in report.assets}


def test_a_picture_is_drawn_once(ground: Ground, world: World, monkeypatch: pytest.MonkeyPatch):
    """What a reused artifact shows is what its latest materialization shows."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def counted(figure: Figure, *given: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *given, **options)

    def pictures() -> list[str]:
        """Those of pairs and policy, once the recipe was run."""
        pipeline, shown = run(ground, world).pipeline, {"tokenized_pairs": "lengths", "policy": "rewards"}
        return [latest(ground.instance, pipeline.key(asset)).metadata[name] for asset, name in shown.items()]

    monkeypatch.setattr(Figure, "savefig", counted)
    first = pictures()
    assert [text.partition("]")[0] for text in first] == ["![sequence lengths", "![rewards by step"] and drawn == []
    field("training.seed", 7)(world)
    second = pictures()
    assert (second[0] == first[0], second[1] == first[1], len(drawn)) == (True, False, 1)
    data_lines(lambda rows: rows[3:])(world)
    third = pictures()
    assert (third[0] == second[0], third[1] == second[1], len(drawn)) == (False, False, 3)
    edits.code_version("policy")(world)
    assert (pictures(), len(drawn)) == (third, 4), "the same artifact, by another version of the code, is drawn again"


def test_a_report_is_of_its_own_run(ground: Ground, world: World):
    field("evaluation.max_new_tokens", 3)(world)
    outcomes = run_with_another(ground, world, "evaluation")
    assert outcomes["policy"] == "reused" and outcomes["evaluation"] == "computed"


def test_a_run_that_is_deleted_in_dagster_goes_on(ground: Ground, world: World):
    """A person does so while the evaluation works: what is made is recorded, and told, nevertheless."""
    field("evaluation.max_new_tokens", 9)(world)

    def delete(event: Event) -> None:
        for run in ground.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            ground.instance.delete_run(run.run_id)

    loaded = load_recipe(world.folder)
    report = materialize(loaded, replace(ground.services, listener=delete), ground.instance)
    assert report.succeeded and ground.instance.get_run_by_id(report.dagster_run_id) is None
    computed = {asset.asset for asset in report.assets if asset.outcome == "computed"}
    assert computed == {"evaluation_spec", "evaluation", "released_model"}
    assert {asset.state for asset in status(loaded.pipeline, ground.services, ground.instance)} == {"fresh"}


def test_what_a_run_makes_fits_together(ground: Ground, world: World):
    """Another run puts the pairs of before in the place of this one's, while this one computes their log-probs."""
    data_lines(lambda rows: rows[:-1])(world)
    outcomes = run_with_another(ground, world, "reference_logprobs")
    computed = {"raw_preferences", "tokenized_pairs", "reference_logprobs", "policy", "evaluation", "released_model"}
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} == {"preference_source", *computed}
    pipeline = load_recipe(world.folder).pipeline
    found = causes(pipeline, ground)
    assert found["policy"] == found["evaluation"] == ()
    for asset in ("reference_logprobs", "policy", "evaluation"):
        made = latest(ground.instance, pipeline.key(asset))
        how = ground.services.store.derivation(asset, made.key or "")
        assert how is not None, asset
        recorded = {name: made.input_version(pipeline.key(name)) for name in how.inputs}
        assert recorded == {name: source.fingerprint for name, source in how.inputs.items()}, asset


def test_dagster_is_told_of_the_spec_that_was_used(ground: Ground, world: World):
    """The evaluation took that of its own run, although another one was recorded when it began."""
    data_lines(lambda rows: rows[:-2])(world)
    field("evaluation.max_new_tokens", 3)(world)
    run_with_another(ground, world, "policy")
    pipeline = load_recipe(world.folder).pipeline
    spec, made = (latest(ground.instance, pipeline.key(asset)) for asset in ("evaluation_spec", "evaluation"))
    assert spec.fingerprint == ground.fingerprints["plain"]["evaluation_spec"]
    assert made.input_version(pipeline.key("evaluation_spec")) not in (None, spec.fingerprint)
    assert causes(pipeline, ground)["evaluation"] == (), "it is as the recipe says, and the recorded spec is not"


def test_a_row_with_other_tokens_has_no_log_prob_of_before(ground: Ground, world: World):
    pipeline = load_recipe(world.folder).pipeline
    assert inspect_row(pipeline, ground.services, ground.instance, HELD_OUT).chosen.policy_logprob is not None
    data_lines(edits.reword(HELD_OUT))(world)
    pipeline = run(ground, world, "tokenized_pairs").pipeline
    found = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT)
    assert (found.split, found.chosen.policy_logprob, found.rejected.policy_logprob) == ("validation", None, None)
    with pytest.raises(UsageError, match="reference_logprobs is of other pairs than plain/tokenized_pairs"):
        inspect_row(pipeline, ground.services, ground.instance, HELD_OUT, score=True)


def test_the_pairs_that_came_and_went_are_told_and_kept(ground: Ground, world: World):
    """One of 24 rows is reworded and one is appended: who wrote them may not be who reads the history."""
    edits.both(data_lines(edits.reword(TRAINED)), data_lines(lambda rows: [*rows, CAPITAL]))(world)
    heard: list[Event] = []
    services, loaded = replace(ground.services, listener=heard.append), load_recipe(world.folder)
    assert materialize(loaded, services, ground.instance, "raw_preferences").succeeded
    words = [
        f"2 pairs added, the first in preferences.jsonl, line {TRAINED + 1}",
        f"1 pair removed, the first was in preferences.jsonl, line {TRAINED + 1}",
    ]
    assert "; ".join(words) in [event["text"] for event in heard if event["event"] == "note"]
    kept = latest(ground.instance, loaded.pipeline.key("raw_preferences")).metadata["changes"]
    assert all(word in kept for word in words)
    assert "preference_source: preferences.jsonl differs (24 -> 25 rows read)" in kept


def test_a_row_that_was_dropped_has_nothing_to_show(ground: Ground, world: World):
    """Its answer is of more tokens than `max_length` allows; the pairs before and after it are found all the same."""

    def too_long(lines: list[str]) -> list[str]:
        row = json.loads(lines[TRAINED])
        row["rejected"][0]["content"] *= 128
        return [*lines[:TRAINED], json.dumps(row) + "\n", *lines[TRAINED + 1 :]]

    data_lines(too_long)(world)
    pipeline = run(ground, world, "reference_logprobs").pipeline
    where = (pipeline, ground.services, ground.instance)
    with pytest.raises(UsageError, match=f"row {TRAINED} has no tokens: it was dropped when the pairs were tokenized"):
        inspect_row(*where, TRAINED)
    assert [inspect_row(*where, TRAINED + step).row for step in (-1, 1)] == [TRAINED - 1, TRAINED + 1]


def test_a_policy_that_was_not_evaluated_has_no_log_prob_of_the_one_before(ground: Ground, world: World):
    """Asked for a score, it is scored itself: by other weights, to other log-probs than the evaluation has."""
    pipeline = load_recipe(world.folder).pipeline
    before = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT).chosen.policy_logprob
    field("training.optimizer.learning_rate", 0.02)(world)
    pipeline = run(ground, world, "policy").pipeline
    assert inspect_row(pipeline, ground.services, ground.instance, HELD_OUT).chosen.policy_logprob is None
    scored = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT, score=True).chosen.policy_logprob
    run(ground, world, "evaluation")
    evaluated = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT).chosen.policy_logprob
    assert scored == pytest.approx(evaluated, abs=1e-4) and abs(evaluated - before) > 1e-2


def test_the_messages_of_a_row_are_those_of_its_tokens(ground: Ground, world: World):
    """Rows in another order were read, and nothing was made of them yet."""
    data_lines(lambda rows: rows[::-1])(world)
    pipeline = run(ground, world, "raw_preferences").pipeline
    found = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT)
    assert found.messages["chosen"][0]["content"] in "".join(found.chosen.texts)


def test_after_a_run_that_ended_early_the_cause_is_still_what_a_person_did(ground: Ground, world: World):
    """Where what an artifact was made from is gone, there are only fingerprints left to tell of."""
    data_lines(edits.reword(HELD_OUT))(world)
    field("training.loss.beta", 0.7)(world)
    run(ground, world, "training_spec")
    pipeline = run(ground, world, "tokenized_pairs").pipeline
    data, beta = (
        "preference_source: preferences.jsonl differs (24 -> 24 rows read)",
        "training_spec: loss.beta 0.1 -> 0.7",
    )
    found = causes(pipeline, ground)
    assert found["reference_logprobs"] == (data,) and found["policy"] == (data, beta)
    old, now = ground.fingerprints["plain"]["tokenized_pairs"], latest(ground.instance, pipeline.key("tokenized_pairs"))
    assert old is not None
    lost = ground.services.store.folder("tokenized_pairs", old)
    lost.rename(aside := lost.with_name("aside"))
    words = f"it was made from tokenized_pairs {short(old)}, which is {short(now.fingerprint)} now"
    assert causes(pipeline, ground)["reference_logprobs"] == (words,)
    aside.rename(lost)


def test_a_run_shows_the_causes_that_status_had(ground: Ground, world: World):
    """Of sources, specs and all that lies below them, and an observation before it; each further edit is told alone."""
    data_lines(edits.reword(HELD_OUT))(world)
    template(lambda text: "{#- of now -#}" + text)(world)
    flip(world.base / "model.safetensors")
    field("training.loss.beta", 0.7)(world)
    pipeline = load_recipe(world.folder).pipeline
    told = causes(pipeline, ground)
    observe(pipeline, ground.instance, status(pipeline, ground.services, ground.instance))
    for asset, words in told.items():
        [record] = ground.instance.fetch_observations(pipeline.key(asset), limit=9).records
        assert record.asset_observation and record.asset_observation.metadata[CAUSES] == verbatim(words), asset
    shown = changes_shown(run(ground, world).pipeline, ground)
    assert len(told["released_model"]) == 6, told["released_model"]
    for asset, words in told.items():
        assert shown[asset].startswith(verbatim(words).value), asset
    field("training.loss.beta", 0.6)(world)
    shown = changes_shown(run(ground, world).pipeline, ground)
    assert shown["policy"] == verbatim(["training_spec: loss.beta 0.7 -> 0.6"]).value
    assert shown["tokenized_pairs"] == "nothing"


def test_a_run_names_fingerprints_if_nothing_else_is_known(ground: Ground, world: World):
    """How the pairs of before were made is gone from the store, and so is what the policy was made from."""
    data_lines(edits.reword(HELD_OUT))(world)
    old = ground.fingerprints["plain"]["raw_preferences"]
    assert old is not None
    lost = ground.services.store.folder("raw_preferences", old)
    run(ground, world, "raw_preferences")
    lost.rename(aside := lost.with_name("aside"))
    pipeline = run(ground, world, "tokenized_pairs").pipeline
    aside.rename(lost)
    now = latest(ground.instance, pipeline.key("raw_preferences")).fingerprint
    words = f"raw_preferences {short(old)} -> {short(now)}"
    assert changes_shown(pipeline, ground)["tokenized_pairs"] == verbatim([words]).value


def changes_shown(pipeline: Pipeline, ground: Ground) -> dict[str, str]:
    """What the latest materialization of every asset shows as `changes`."""
    return {asset: latest(ground.instance, pipeline.key(asset)).metadata["changes"] for asset in GRAPH}


def test_a_table_that_was_first_made_from_other_pairs_fits_those_of_now(ground: Ground, world: World):
    """Another end of sequence makes other pairs with the same tokens, whose log-probs are the table of before."""
    retokenizer(edits.end_with_the_user)(world)
    pipeline = run(ground, world, "reference_logprobs").pipeline
    for asset, same in (("tokenized_pairs", False), ("reference_logprobs", True)):
        assert (latest(ground.instance, pipeline.key(asset)).fingerprint == ground.fingerprints["plain"][asset]) is same
    found = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT)
    assert found.chosen.reference_logprob is not None and found.chosen.policy_logprob is not None
    assert "tokenizer eos_token " in latest(ground.instance, pipeline.key("tokenization_spec")).metadata["changes"]


def test_a_policy_that_starts_from_the_champion(ground: Ground, world: World):
    """The champion is told by its weights, so the next one is another start, and nobody's automation goes round in circles."""
    fields("training", {"start_from": "champion", "max_steps": 2})(world)
    field("automation.on_change", False)(world)
    registry, name = ground.services.registry, "plain"
    first, weights = registry.champion(name), ground.fingerprints["plain"]["policy"]
    found = causes(load_recipe(world.folder).pipeline, ground)
    assert f"champion absent -> {short(weights)}" in found["training_spec"]
    loaded = run(ground, world)
    pipeline = loaded.pipeline
    made = ground.services.store.open("policy", latest(ground.instance, pipeline.key("policy")).fingerprint or "")
    assert made.manifest.made_from.settings["champion"] == weights
    assert made.details["step0_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(made.details["series"]["rewards/margins"][0]) > 1e-4
    second = registry.find_version(name, {"pedigree.policy": made.fingerprint})
    assert registry.promote(second, over=first)
    assert causes(pipeline, ground)["training_spec"] == (f"champion {short(weights)} -> {short(made.fingerprint)}",)
    client = MlflowClient(registry.tracking_uri)
    tags = [
        (name, str(version.number), "pedigree.policy")
        for version in registry.versions(name)
        if version.weights == weights
    ]
    for tag in tags:  # so that no version is known to have these weights
        client.delete_model_version_tag(*tag)
    with pytest.raises(StoreError, match=f"champion with the weights {short(weights)}, and now it has the weights"):
        select(["policy"], loaded, ground)
    for tag in tags:
        client.set_model_version_tag(*tag, weights)
    select(["policy"], loaded, ground)
    assert latest(ground.instance, pipeline.key("policy")).fingerprint == made.fingerprint, (
        "of what the spec has frozen"
    )
    assert registry.promote(first, over=second)
    assert {a.state for a in status(pipeline, ground.services, ground.instance)} == {"fresh"}


def select(assets: Sequence[str], loaded: LoadedRecipe, ground: Ground) -> dg.DagsterRun:
    """What is above stays as it was last materialized, as by a click in Dagster's UI. Raises what an asset's body raises."""
    here = dg.Definitions(resources={"services": ground.services}, executor=dg.in_process_executor)
    job = dg.Definitions.merge(loaded.definitions, here).resolve_implicit_global_asset_job_def()
    keys = [loaded.pipeline.key(asset) for asset in assets]
    done = job.execute_in_process(instance=ground.instance, asset_selection=keys)
    return done.dagster_run


def test_an_asset_alone_is_made_of_what_was_recorded(ground: Ground, world: World):
    """Recipe, data and model are edited since, and nobody has looked at them."""
    field("training.loss.beta", 0.9)(world)
    data_lines(edits.reword(HELD_OUT))(world)
    loaded = load_recipe(world.folder)
    select(["policy"], loaded, ground)
    with pytest.raises(DataError, match="they changed since; materialize preference_source together with raw_pref"):
        select(["raw_preferences"], loaded, ground)
    edits.flip_a_bit(world)
    select(["reference_model"], loaded, ground)
    for asset in ("policy", "reference_model"):
        assert latest(ground.instance, loaded.pipeline.key(asset)).fingerprint == ground.fingerprints["plain"][asset]


@pytest.mark.parametrize(
    ("edit", "first", "then", "told", "together"),
    [
        pytest.param(
            field("training.seed", 7),
            ["training_spec", "policy"],
            "released_model",
            "evaluation {evaluation} was made from policy {policy}, and plain/policy is {now} now",
            "plain/evaluation and plain/released_model",
            id="a policy that was not evaluated",
        ),
        pytest.param(
            data_lines(edits.swap_sides(HELD_OUT)),
            ["preference_source", "raw_preferences", "tokenized_pairs"],
            "evaluation",
            "policy {policy} was made from tokenized_pairs {tokenized_pairs}, and plain/tokenized_pairs is {now} now",
            "plain/reference_logprobs, plain/policy and plain/evaluation",
            id="log-probs of other pairs",
        ),
        pytest.param(
            field("training.loss.beta", 0.5),
            ["training_spec", "policy"],
            "evaluation",
            "plain/policy was trained with another loss than that of plain/evaluation_spec: loss.beta 0.5 -> 0.1",
            "plain/training_spec, plain/evaluation_spec, plain/policy and plain/evaluation",
            id="a loss that is not the one of the evaluation",
        ),
        pytest.param(
            template(lambda text: "To whom it may concern: " + text),
            ["tokenization_spec"],
            "released_model",
            "tokenized_pairs {tokenized_pairs} was made from tokenization_spec {tokenization_spec}, "
            "and plain/tokenization_spec is {now} now",
            "plain/release_spec, plain/tokenized_pairs, plain/reference_logprobs, plain/policy, plain/evaluation and "
            "plain/released_model",
            id="a tokenizer that the policy was not trained with",
        ),
    ],
)
def test_what_was_not_made_from_one_another_is_refused(
    ground: Ground, world: World, edit: Edit, first: list[str], then: str, told: str, together: str
):
    """A person materializes some assets, then one below; what the refusal names makes them fit together."""
    edit(world)
    loaded, versions = load_recipe(world.folder), ground.services.registry.versions()
    select(first, loaded, ground)
    now = short(latest(ground.instance, loaded.pipeline.key(first[-1])).fingerprint)
    words = told.format(now=now, **{asset: short(found) for asset, found in ground.fingerprints["plain"].items()})
    with pytest.raises(StoreError, match=re.escape(f"{words}; materialize {together} in one run")):
        select([then], loaded, ground)
    assert ground.services.registry.versions() == versions
    assets = [name.removeprefix("plain/") for name in re.split(", | and ", together)]
    select(assets, loaded, ground)
    made = {asset: state for asset, state in causes(loaded.pipeline, ground).items() if asset in (*first, *assets)}
    assert made == dict.fromkeys(made, ())


def test_a_reference_that_was_tuned_on_other_pairs_is_named_with_what_follows_it(ground: Ground, world: World):
    """By the recipe of now, which tunes none, it depends on no pairs; but it is what has to be made again first."""
    field("reference.sft", {"epochs": 1, "batch_size": 8})(world)
    run(ground, world, "reference_model")
    field("reference.sft", None)(world)
    data_lines(edits.swap_sides(HELD_OUT))(world)
    loaded = load_recipe(world.folder)
    select(["preference_source", "raw_preferences", "tokenized_pairs"], loaded, ground)
    with pytest.raises(StoreError, match="; materialize plain/reference_model and plain/reference_logprobs in one run"):
        select(["reference_logprobs"], loaded, ground)
    select(["reference_model", "reference_logprobs"], loaded, ground)


@pytest.mark.parametrize("by_command", [True, False], ids=["by the command", "in Dagster's UI"])
def test_a_name_is_that_of_the_recipe_that_was_run(ground: Ground, world: World, by_command: bool):
    """Another folder of that name, for another model, while the first is still there."""

    def run_spec(folder: Path) -> None:
        if by_command:
            materialize(load_recipe(folder), ground.services, ground.instance, "training_spec")
        else:
            select(["training_spec"], load_recipe(folder), ground)

    run_spec(ground.folders["plain"])
    field("release.model_name", "another")(world)
    with pytest.raises(UsageError, match=f"recipe in {ground.folders['plain']}, .* the one in {world.folder} releases"):
        run_spec(world.folder)


@pytest.mark.parametrize("tuned", [False, True], ids=["plain reference", "tuned reference"])
def test_a_selected_asset_comes_with_what_it_is_made_of(ground: Ground, world: World, tuned: bool):
    """Supervised tuning takes the pairs."""
    field("reference.sft", {"epochs": 1} if tuned else None)(world)
    report = materialize(load_recipe(world.folder), ground.services, ground.instance, "reference_model")
    pairs = {"preference_source", "raw_preferences", "tokenization_spec", "tokenized_pairs"} if tuned else set()
    assert report.succeeded and {each.asset for each in report.assets} == {"base_model", "reference_model"} | pairs


@pytest.mark.parametrize("asset", ["preference_source", "released_model"])
def test_a_run_that_no_command_started_is_signed_by_its_process(ground: Ground, world: World, asset: str):
    """Whatever it materializes, a download of the base model too: a run that is killed has to be found dead by the next."""
    run = select([asset], load_recipe(world.folder), ground)
    assert is_alive(process_of(run), ground.home)


def test_a_run_shows_its_own_recipe_where_another_one_trained_its_policy(ground: Ground, world: World):
    """A copy under another name and for another model: its policy is there, and MLflow has a run of its own for it."""
    field("release.model_name", "copied")(world)
    edits.another_name(world)
    report = materialize(load_recipe(world.folder), ground.services, ground.instance)
    assert {asset.asset for asset in report.assets if asset.outcome == "computed"} == {"released_model"}
    run = MlflowClient(ground.services.registry.tracking_uri).get_run(report.mlflow_run_id)
    assert run.data.params["release.model_name"] == "copied" and run.data.tags["recipe"] == "renamed"
    assert run.data.params["data.sources.0.path"] == str(world.folder / "preferences.jsonl")
    assert run.data.metrics["loss"] > 0, "its steps were told again"


def test_a_run_that_is_told_again_has_no_metrics_of_other_held_out_pairs(ground: Ground, world: World):
    """Training on the same pairs led to the same weights, which keep what the first training told of its held-out pairs."""
    data_lines(edits.reword(HELD_OUT))(world)
    report = materialize(load_recipe(world.folder), ground.services, ground.instance)
    client = MlflowClient(ground.services.registry.tracking_uri)
    client.delete_run(report.mlflow_run_id)
    again = materialize(load_recipe(world.folder), ground.services, ground.instance)
    assert again.mlflow_run_id != report.mlflow_run_id
    history = client.get_metric_history(again.mlflow_run_id, "eval/loss")
    assert [point.value for point in history] == [report.metrics["eval/loss"]]
    assert len(client.get_metric_history(again.mlflow_run_id, "loss")) == 3


def test_what_a_person_does_with_the_alias_stays(ground: Ground, world: World):
    """Eight held-out pairs are too few for the gate, which says so; a person promotes the candidate, and takes it back."""
    client, registry = MlflowClient(ground.services.registry.tracking_uri), ground.services.registry
    first = registry.champion("plain").number
    field("training.seed", 1)(world)
    pipeline = run(ground, world).pipeline
    second = int(client.get_registered_model("plain").aliases["candidate"])
    few = "only 8 held-out pairs are shared with the champion; 10 prompts are needed"
    refused = f"{few}: compare them yourself, and point the alias champion at the better one in MLflow"
    moved = f"a person has moved the alias since the gate decided; {refused}"
    assert second != first
    for champion, words in ((first, ("no", refused)), (second, ("yes", moved)), (first, ("no", refused))):
        client.set_registered_model_alias("plain", "champion", str(champion))
        assert {asset.action for asset in plan(pipeline, ground.services, ground.instance)} == {"reuse"}
        run(ground, world, "released_model")
        shown = latest(ground.instance, pipeline.key("released_model")).metadata
        assert (shown["champion"], shown["reasons"]) == words
        assert registry.champion("plain").number == champion


def test_before_there_is_a_champion_a_policy_starts_from_the_reference(ground: Ground, world: World):
    fields("training", {"start_from": "champion"})(world)
    fields("automation", {"on_change": False})(world)
    field("release.model_name", "nobody")(world)
    found = resolve_root(load_recipe(world.folder).pipeline, ground.services, "training_spec")
    assert found.files["spec.json"]["champion"] is None


def test_whatever_is_corrupt_and_no_model_is_made_again(ground: Ground, world: World):
    """A bit of every artifact but the policy, sources, specs and the pointer to the base model included, and of two records.

    That of the policy is no reason to train it again: its manifest says the same.
    """
    store, before = ground.services.store, ground.fingerprints["plain"]
    pipeline = load_recipe(world.folder).pipeline
    for asset in (name for name in GRAPH if name not in ("policy", "released_model")):
        manifest = store.open(asset, before[asset]).manifest
        flip(store.folder(asset, before[asset]) / next(iter(manifest.files)))
    for asset in ("evaluation", "policy"):
        flip(store.root / "keys" / asset / f"{latest(ground.instance, pipeline.key(asset)).key}.json")
    found = causes(pipeline, ground)
    assert found["raw_preferences"] == ("file preferences.parquet of its artifact is corrupt",)
    assert found["evaluation"] == found["policy"] == (CORRUPT_RECORD,)
    report = materialize(load_recipe(world.folder), ground.services, ground.instance)
    assert report.succeeded, report
    assert {asset.asset: asset.fingerprint for asset in report.assets} == before
    assert [asset.asset for asset in report.assets if asset.outcome == "reused"] == ["policy", "released_model"]
    for asset in GRAPH.keys() - {"released_model"}:
        store.open(asset, before[asset])


def test_a_corrupt_model_is_refused(ground: Ground, world: World):
    weights = ground.services.store.folder("policy", ground.fingerprints["plain"]["policy"] or "") / "model.safetensors"
    flip(weights)
    loaded = load_recipe(world.folder)
    words = (
        "file model.safetensors of its artifact is corrupt; it is refused until its folder is restored or moved away"
    )
    assert causes(loaded.pipeline, ground)["policy"] == (words,)
    report = materialize(loaded, ground.services, ground.instance)
    field("evaluation.max_new_tokens", 4)(world)
    field("release.model_name", "elsewhere")(world)
    edited, versions = load_recipe(world.folder), ground.services.registry.versions()
    for assets in (["evaluation_spec", "evaluation"], ["released_model"]):
        with pytest.raises(CorruptArtifact, match=f"{weights} has sha256"):
            select(assets, edited, ground)
    flip(weights)
    assert ground.services.registry.versions() == versions
    assert [asset.asset for asset in report.assets if asset.outcome == "failed"] == ["policy"]
    told = str(report.assets[-1].error)
    assert f"{weights} has sha256" in told and f"restore {weights.parent} from a backup, or move it away" in told


def test_what_a_job_is_to_read_is_read_first(ground: Ground, world: World):
    """An input of a single asset, whose own artifact is not there yet; the inputs of one that is are left alone."""
    pairs = ground.services.store.folder("tokenized_pairs", ground.fingerprints["plain"]["tokenized_pairs"] or "")
    flip(pairs / "pairs.arrow")
    select(["evaluation"], load_recipe(world.folder), ground)
    field("evaluation.max_new_tokens", 5)(world)
    with pytest.raises(CorruptArtifact, match=f"{pairs / 'pairs.arrow'} has sha256"):
        select(["evaluation_spec", "evaluation"], load_recipe(world.folder), ground)
    flip(pairs / "pairs.arrow")


def test_what_is_there_is_read_once(ground: Ground, world: World):
    """However many assets are made of it; 16 GB of weights take a minute each time. Python itself tells what is opened.

    A page for people shows a few of the pairs, so those are read once more.
    """
    with opened(world.base / "model.safetensors") as once:
        weights_identity(world.base)
    files = {"base": world.base / "model.safetensors"}
    for asset, name in (("policy", "model.safetensors"), ("tokenized_pairs", "pairs.arrow")):
        files[asset] = ground.services.store.folder(asset, ground.fingerprints["plain"][asset] or "") / name
    with opened(*files.values()) as seen:
        report = materialize(load_recipe(world.folder), ground.services, ground.instance)
    assert {asset.outcome for asset in report.assets} == {"reused"}
    assert {of: seen.count(file) for of, file in files.items()} == {
        "base": len(once),
        "policy": 1,
        "tokenized_pairs": 2,
    }


@contextmanager
def opened(*files: Path) -> Iterator[list[Path]]:
    """Which of the files are opened within the block, as often as they are, in the order in which they are."""
    found, wanted, watching = list[Path](), {str(file): file for file in files}, True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and (file := wanted.get(str(arguments[0]))) is not None:
            found.append(file)

    sys.addaudithook(note)  # for the rest of the process: there is no way to take it away
    yield found
    watching = False


def test_after_an_edit_the_record_of_before_may_be_corrupt_or_gone(ground: Ground, world: World):
    """Then nobody can say what differs, and says that; a record that is gone is also seen where nothing was edited.

    Of a spec, too: a run freezes another one then, and needs no record of the one before.
    """
    pipeline = load_recipe(world.folder).pipeline
    key = latest(ground.instance, pipeline.key("policy")).key
    record = ground.services.store.record_file("policy", key)
    flip(record)
    field("training.loss.beta", 0.9)(world)
    corrupt = causes(load_recipe(world.folder).pipeline, ground)["policy"]
    flip(record)
    record.rename(aside := record.with_suffix(".aside"))
    gone = causes(pipeline, ground)["policy"]
    aside.rename(record)
    assert (corrupt, gone) == ((CORRUPT_RECORD,), (NO_RECORD,))
    flip(
        record := ground.services.store.record_file(
            "training_spec", latest(ground.instance, pipeline.key("training_spec")).key
        )
    )
    assert causes(load_recipe(world.folder).pipeline, ground)["training_spec"] == (CORRUPT_RECORD,)
    run(ground, world, "training_spec")
    flip(record)
    assert CORRUPT_RECORD in latest(ground.instance, pipeline.key("training_spec")).metadata["changes"]


def test_a_model_that_is_another_since_it_was_looked_at_is_refused(ground: Ground, world: World):
    """A person may materialize one asset alone. So nothing is scored by other weights than those it is recorded with."""
    pipeline, store = load_recipe(world.folder).pipeline, ground.services.store
    pointer = store.open("reference_model", ground.fingerprints["plain"]["reference_model"] or "")
    edits.flip_a_bit(world)
    told = f"but reference_model was materialized from {short(pointer.fingerprint)}: they changed since; materialize plain/"
    with pytest.raises(StoreError, match=told):
        describe_job(
            pipeline,
            ground.services,
            "reference_logprobs",
            JobSpec("reference", {}),
            {"reference_model": pointer.fingerprint},
        )


def test_two_jobs_of_one_asset_have_folders_of_their_own(ground: Ground, world: World):
    """Variants run at the same time, and each writes its events there."""
    pipeline, works = load_recipe(world.folder).pipeline, [JobSpec("policy", {"seed": seed}) for seed in (0, 1)]
    assert len({describe_job(pipeline, ground.services, "policy", work, {}).folder for work in works}) == 2


def test_a_registry_that_is_away_leaves_a_word(ground: Ground, world: World):
    """Nothing listens at port 9."""
    away = replace(ground.services, registry=Registry("http://127.0.0.1:9", ground.home / "downloads"))
    pipeline = load_recipe(world.folder).pipeline
    released, planned = status(pipeline, away, ground.instance)[-1], plan(pipeline, away, ground.instance)[-1]
    assert (released.asset, released.state, planned.action) == ("released_model", "fresh", "reuse")
    for [words] in (released.causes, planned.causes):
        assert words.startswith(
            "its version is taken to be there: MLflow at http://127.0.0.1:9 cannot look for versions"
        )


def test_a_version_that_is_gone_is_told_by_status_and_by_plan(ground: Ground, world: World):
    """The last test: the version does not come back."""
    loaded = load_recipe(world.folder)
    key = ground.fingerprints["plain"]["released_model"]
    registry = ground.services.registry
    version = registry.find_version("plain", {"pedigree.release": key})
    assert version is not None
    reasons = version.tags["pedigree.reasons"]
    client, words = MlflowClient(registry.tracking_uri), ("its version is no longer in the registry",)
    client.delete_model_version_tag("plain", str(version.number), "pedigree.champion")
    assert causes(loaded.pipeline, ground)["released_model"] == words, "the gate has not decided on it"
    run(ground, world, "released_model")
    tags = registry.find_version("plain", {"pedigree.release": key}).tags
    assert (tags["pedigree.champion"], tags["pedigree.reasons"]) == ("yes", reasons)
    client.delete_model_version("plain", str(version.number))
    found = status(loaded.pipeline, ground.services, ground.instance)
    assert found[-1] == AssetStatus("released_model", "stale", words, key)
    assert {asset.state for asset in found[:-1]} == {"fresh"}
    planned = plan(loaded.pipeline, ground.services, ground.instance)[-1]
    assert (planned.asset, planned.action, planned.causes) == ("released_model", "compute", words)
    fault = verify(loaded.pipeline, ground.services, ground.instance, rows=0).artifacts[-1].fault
    assert fault == "there is no version of plain for it in the registry any more"
