"""The conditions of a recipe, evaluated tick by tick."""

from functools import lru_cache

import dagster as dg

from assets.lineage.history import input_version_tag
from assets.pipeline.graph import GRAPH
from tests.workflows.homes import ATTRIBUTES, latest
from workflows.orchestration.resources import services
from workflows.recipes.discovery import load_recipe

OTHER_BETA = {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}}
# In the order of the graph.
ABOVE_POLICY = ("raw_preferences", "tokenized_pairs", "reference_logprobs", "prequential_scores")
BELOW_POLICY = {"policy", "evaluation", "released_model"}
BELOW_ROWS = {*ABOVE_POLICY, *BELOW_POLICY}


def definitions_of(folder):
    return dg.Definitions.merge(
        load_recipe(folder).definitions,
        dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
    )


@lru_cache(maxsize=8)
def _definitions_of_text(folder, text):
    """Build the definitions once for each text: a test asks for them forty times, and building them takes 50 ms."""
    return definitions_of(folder)


class Conditions:
    """The conditions of a recipe, tick by tick, over materializations that are reported to a Dagster instance.

    Nothing is computed: the conditions only read data versions, and tests report these.
    """

    def __init__(self, folder, instance):
        self.folder, self.instance, self.cursor = folder, instance, None
        self.pipeline = load_recipe(folder).pipeline

    @property
    def definitions(self):
        """Return the definitions of the recipe as its file is now."""
        return _definitions_of_text(self.folder, (self.folder / "defs.yaml").read_text())

    def tick(self):
        """Return the assets that one tick requests."""
        result = dg.evaluate_automation_conditions(self.definitions, self.instance, cursor=self.cursor)
        self.cursor = result.cursor
        keys = [self.pipeline.key(asset) for asset in GRAPH]
        return {key.path[1] for key in keys if result.get_num_requested(key)}

    def materialize(self, version, *assets, made_of=None):
        for asset in assets:
            tags = {"dagster/data_version": f"{asset}-{version}", **(made_of or self.made_of(asset))}
            event = dg.AssetMaterialization(self.pipeline.key(asset), tags=tags)
            self.instance.report_runless_asset_event(event)
            for check in self._checks(asset):
                self.report_check(asset, check, passed=True)

    def made_of(self, asset):
        """Return the tags of a materialization that begins now, with the currently recorded inputs."""
        node = self.definitions.resolve_asset_graph().get(self.pipeline.key(asset))
        above = {key: latest(self.instance, key).fingerprint for key in node.parent_keys}
        inputs = {input_version_tag(key): found for key, found in above.items()}
        return {"dagster/code_version": node.code_version, **inputs}

    def begin(self, *assets):
        """Return a run of `assets` that has begun."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        keys = {self.pipeline.key(asset) for asset in assets}
        return self.instance.create_run_for_job(
            job.get_subset(asset_selection=keys), asset_selection=frozenset(keys), status=dg.DagsterRunStatus.STARTED
        )

    def succeed(self, run):
        end = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name)
        self.instance.report_dagster_event(end, run.run_id)

    def report_check(self, asset, check, passed):
        evaluation = dg.AssetCheckEvaluation(
            asset_key=self.pipeline.key(asset), check_name=check, passed=passed, metadata={}
        )
        self.instance.report_runless_asset_event(evaluation)

    def _checks(self, asset):
        graph = self.definitions.resolve_asset_graph()
        return [key.name for key in graph.get(self.pipeline.key(asset)).check_keys]
