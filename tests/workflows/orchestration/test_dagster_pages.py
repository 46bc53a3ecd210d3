"""What Dagster's own pages are told: freshness, tags for a selection, an empty launchpad, and the settings of the instance."""

import datetime
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.freshness import CronFreshnessPolicy

from assets.pipeline.graph import GRAPH
from assets.views.pages import SERVED_VARIABLE
from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, write_recipe
from workflows.orchestration.resources import dagster_instance, io_manager, services
from workflows.recipes.discovery import load_recipe


def definitions(folder: Path, **changes: object) -> dg.Definitions:
    loaded = load_recipe(write_recipe(folder, {**ATTRIBUTES, **changes}))
    own = dg.Definitions(resources={"services": services, "io_manager": io_manager}, executor=dg.in_process_executor)
    return dg.Definitions.merge(loaded.definitions, own)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (place := tmp_path / "recipe").mkdir()
    write_inputs(place)
    return place


def specs(found: dg.Definitions) -> dict[str, dg.AssetSpec]:
    assets = [asset for asset in found.assets or () if isinstance(asset, dg.AssetsDefinition)]
    return {spec.key.path[-1]: spec for asset in assets for spec in asset.specs}


def test_released_model_is_due_at_every_tick_of_the_schedule_only(folder: Path) -> None:
    """Mondays and Thursdays are three and four days apart; Dagster allows no more than the shortest interval."""
    automation = {"cron": "0 6 * * 1,4", "timezone": "Europe/Berlin"}
    policies = {name: spec.freshness_policy for name, spec in specs(definitions(folder, automation=automation)).items()}
    policy = policies.pop("released_model")
    assert isinstance(policy, CronFreshnessPolicy)
    assert (policy.deadline_cron, policy.timezone) == ("0 6 * * 1,4", "Europe/Berlin")
    assert policy.lower_bound_delta == datetime.timedelta(days=3)
    assert set(policies.values()) == {None}
    assert specs(definitions(folder, automation={}))["released_model"].freshness_policy is None


def test_tags_select_assets_of_a_loss_and_a_stage(folder: Path) -> None:
    graph = definitions(folder, training={"loss": {"type": "ipo"}}).resolve_asset_graph()
    selection = dg.AssetSelection.tag("pedigree/loss", "ipo") & dg.AssetSelection.tag("pedigree/stage", "training")
    assert {key.path[-1] for key in selection.resolve(graph)} == {"policy"}
    on_gpu = dg.AssetSelection.tag("pedigree/pool", "gpu").resolve(graph)
    assert {key.path[-1] for key in on_gpu} == {name for name, node in GRAPH.items() if node.pool}


@pytest.mark.parametrize("job", ["recipe_retrain", "recipe_look", "__ASSET_JOB"])
def test_launchpad_shows_no_resources(folder: Path, job: str) -> None:
    fields = definitions(folder).resolve_job_def(job).run_config_schema.config_type.fields  # type: ignore[attr-defined]
    assert fields["resources"].config_type.fields == {}


def test_descriptions_link_pages_only_if_they_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for served in (False, True):
        monkeypatch.setenv(SERVED_VARIABLE, "yes" if served else "")
        text = specs(definitions(folder))["evaluation"].description or ""
        assert text.startswith("Held-out loss") and ("/pages/recipe-report.html" in text) is served


def test_dagster_yaml_of_an_earlier_version_gets_freshness_and_another_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with dagster_instance():
        settings = tmp_path / "dagster" / "dagster.yaml"
        current = settings.read_text()
    assert "freshness: {enabled: true}\n" in current
    for earlier, later in (
        (current.replace("freshness: {enabled: true}\n", ""), current),
        ("telemetry: {enabled: false}\n", "telemetry: {enabled: false}\n"),
    ):
        settings.write_text(earlier)
        with dagster_instance():
            assert settings.read_text() == later
