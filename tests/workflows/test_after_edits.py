"""What is said of a recipe between an edit and the end of the next run, and of content that was made in two ways."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from mlflow import MlflowClient

from assets.graph import GRAPH
from assets.materialized import latest
from assets.world import look
from model_registry.registry import Registry
from tests.workflows import edits
from tests.workflows.edits import World, data_lines, field, fields, retokenizer
from tests.workflows.in_process import Ground, run_in
from tests.workflows.test_truth_table import HELD_OUT, PLAIN
from training.contract.errors import UsageError
from training.contract.events import Event
from training.contract.fingerprint import short
from workflows.execution import materialize
from workflows.inspection import inspect_row
from workflows.lineage import AssetStatus, status
from workflows.plan import plan
from workflows.recipes import LoadedRecipe, load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, demo_maker: ModuleType) -> Iterator[Ground]:
    with run_in(tmp_path_factory.mktemp("edited"), demo_maker, {"plain": PLAIN}) as made:
        yield made


@pytest.fixture
def world(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(Path(shutil.copytree(ground.folders["plain"], tmp_path / "plain")), ground.home, monkeypatch)
    ground.restore("plain")


def run(ground: Ground, world: World, asset: str | None = None) -> LoadedRecipe:
    loaded = load_recipe(world.folder)
    report = materialize(loaded, ground.services, ground.instance, asset)
    assert report.succeeded, report
    return loaded


def test_a_version_carries_the_lineage_of_now(ground: Ground, world: World):
    """The file says the same in other words, so its rows are the artifact whose manifest names the file of before."""
    edits.rewrite_data(world)
    field("release.gate.min_accuracy", 0.1)(world)
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


def test_a_report_is_of_its_own_run(ground: Ground, world: World):
    """While the evaluation is computed, another run records every asset as computed."""
    field("evaluation.max_new_tokens", 3)(world)
    heard: list[str] = []

    def meanwhile(event: Event) -> None:
        if event.get("asset") == "evaluation" and not heard:
            ground.restore("plain")
            heard.append(event["event"])

    report = materialize(load_recipe(world.folder), replace(ground.services, listener=meanwhile), ground.instance)
    outcomes = {asset.asset: asset.outcome for asset in report.assets}
    assert heard and outcomes["policy"] == "reused" and outcomes["evaluation"] == "computed"


def test_a_row_with_other_tokens_has_no_log_prob_of_before(ground: Ground, world: World):
    pipeline = load_recipe(world.folder).pipeline
    assert inspect_row(pipeline, ground.services, ground.instance, HELD_OUT).chosen.policy_logprob is not None
    data_lines(edits.reword(HELD_OUT))(world)
    pipeline = run(ground, world, "tokenized_pairs").pipeline
    found = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT)
    assert (found.split, found.chosen.policy_logprob, found.rejected.policy_logprob) == ("validation", None, None)
    with pytest.raises(UsageError, match="reference_logprobs is of other pairs than plain/tokenized_pairs"):
        inspect_row(pipeline, ground.services, ground.instance, HELD_OUT, score=True)


def test_a_table_that_was_first_made_from_other_pairs_fits_those_of_now(ground: Ground, world: World):
    """Another end of sequence makes other pairs with the same tokens, whose log-probs are the table of before."""
    retokenizer(edits.end_with_the_user)(world)
    pipeline = run(ground, world, "reference_logprobs").pipeline
    for asset, same in (("tokenized_pairs", False), ("reference_logprobs", True)):
        assert (latest(ground.instance, pipeline.key(asset)).fingerprint == ground.fingerprints["plain"][asset]) is same
    found = inspect_row(pipeline, ground.services, ground.instance, HELD_OUT)
    assert found.chosen.reference_logprob is not None and found.chosen.policy_logprob is not None


def test_a_policy_that_starts_from_the_champion(ground: Ground, world: World):
    """The champion is told by its weights, so the next one is another start, and nobody's automation goes round in circles."""
    fields("training", {"start_from": "champion", "max_steps": 2})(world)
    field("automation.on_change", False)(world)
    registry, name = ground.services.registry, "plain"
    first, weights = registry.champion(name), ground.fingerprints["plain"]["policy"]
    found = {a.asset: a.causes for a in status(load_recipe(world.folder).pipeline, ground.services, ground.instance)}
    assert f"champion absent -> {short(weights)}" in found["training_spec"]
    pipeline = run(ground, world).pipeline
    made = ground.services.store.open("policy", latest(ground.instance, pipeline.key("policy")).fingerprint or "")
    assert made.manifest.made_from.settings["champion"] == weights
    assert made.details["step0_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(made.details["series"]["rewards/margins"][0]) > 1e-4
    registry.set_alias(name, "champion", registry.find_version(name, {"pedigree.policy": made.fingerprint}).number)
    after = {a.asset: a.causes for a in status(pipeline, ground.services, ground.instance)}
    assert after["training_spec"] == (f"champion {short(weights)} -> {short(made.fingerprint)}",)
    registry.set_alias(name, "champion", first.number)
    assert {a.state for a in status(pipeline, ground.services, ground.instance)} == {"fresh"}


def test_what_a_person_does_with_the_alias_stays(ground: Ground, world: World):
    """Eight held-out pairs are too few for the gate, which says so; a person promotes the candidate, and takes it back."""
    client, registry = MlflowClient(ground.services.registry.tracking_uri), ground.services.registry
    first = registry.champion("plain").number
    field("training.seed", 1)(world)
    pipeline = run(ground, world).pipeline
    second = int(client.get_registered_model("plain").aliases["candidate"])
    few = "only 8 held-out pairs are shared with the champion; 10 are needed"
    refused = f"{few}: add data, or raise `data.validation_fraction`"
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
    found = look(load_recipe(world.folder).pipeline, ground.services, "training_spec")
    assert found.files["spec.json"]["champion"] is None


def test_whatever_is_corrupt_and_no_model_is_made_again(ground: Ground, world: World):
    """A bit of every artifact but the policy, sources, specs and the pointer to the base model included, and of a record."""
    store, before = ground.services.store, ground.fingerprints["plain"]
    pipeline = load_recipe(world.folder).pipeline
    for asset in (name for name in GRAPH if name not in ("policy", "released_model")):
        manifest = store.open(asset, before[asset]).manifest
        flip(store.folder(asset, before[asset]) / next(iter(manifest.files)))
    key = latest(ground.instance, pipeline.key("evaluation")).key
    flip(store.root / "keys" / "evaluation" / f"{key}.json")
    found = {a.asset: a.causes for a in status(pipeline, ground.services, ground.instance)}
    assert found["raw_preferences"] == ("file preferences.parquet of its artifact is corrupt",)
    assert found["evaluation"] == ("the record of how it was made is corrupt",)
    report = materialize(load_recipe(world.folder), ground.services, ground.instance)
    assert report.succeeded, report
    assert {asset.asset: asset.fingerprint for asset in report.assets} == before
    assert [asset.asset for asset in report.assets if asset.outcome == "reused"] == ["policy", "released_model"]
    for asset in GRAPH.keys() - {"released_model"}:
        store.open(asset, before[asset])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_registry_that_is_away_leaves_a_word(ground: Ground, world: World):
    """Nothing listens at port 9."""
    away = replace(ground.services, registry=Registry("http://127.0.0.1:9", ground.home / "downloads"))
    released = status(load_recipe(world.folder).pipeline, away, ground.instance)[-1]
    assert (released.asset, released.state) == ("released_model", "fresh")
    [words] = released.causes
    assert words.startswith("its version is taken to be there: MLflow at http://127.0.0.1:9 cannot look for versions")


def test_a_version_that_is_gone_is_told_by_status_and_by_plan(ground: Ground, world: World):
    """The last test: the version does not come back."""
    loaded = load_recipe(world.folder)
    key = ground.fingerprints["plain"]["released_model"]
    registry = ground.services.registry
    version = registry.find_version("plain", {"pedigree.release": key})
    assert version is not None
    MlflowClient(registry.tracking_uri).delete_model_version("plain", str(version.number))
    words = ("its version is no longer in the registry",)
    found = status(loaded.pipeline, ground.services, ground.instance)
    assert found[-1] == AssetStatus("released_model", "stale", words, key)
    assert {asset.state for asset in found[:-1]} == {"fresh"}
    planned = plan(loaded.pipeline, ground.services, ground.instance)[-1]
    assert (planned.asset, planned.action, planned.causes) == ("released_model", "compute", words)
