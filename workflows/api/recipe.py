"""A recipe for Python: its state, plan and run, and its results.

Properties are facts of the loaded recipe. Methods read the home or the registry each time, so they see every later run. The
calls do the work of the commands of the same names, in this process.
"""

from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path

import pyarrow as pa

from assets.comparison.votes import check_exact
from assets.inputs.name_claims import check_name_is_free
from assets.pipeline.pipeline import Pipeline
from training.contract.config.recipe import Recipe as RecipeConfig
from training.contract.protocol.artifacts import EVALUATION, AssetName
from training.contract.store.artifact import Artifact
from workflows.api.home_session import open_home, resolve_home
from workflows.api.model_version import ModelVersion
from workflows.api.tables import check_asset, check_has_table, latest_artifact, read_steps, read_table
from workflows.commands.plan import PlannedAsset
from workflows.commands.plan import plan as make_plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import LoadedRecipe, find_recipes
from workflows.state.status import AssetStatus
from workflows.state.status import status as find_status


def load_recipe(name: str | PathLike[str], *, home: str | PathLike[str] | None = None) -> "Recipe":
    """Return a recipe, read and validated now. After an edit of its file, load it again.

    `name` is the name of a recipe of the project, or the path of a folder with a `defs.yaml`. Append / and a name for one of
    its variants: `demo/hinge`. `home` is the folder of all results, by default PEDIGREE_HOME, or .pedigree in the working
    directory; it is made when it is needed.

    Raises UsageError for an unknown recipe or variant, or if another recipe in this home uses its name; RecipeError with file,
    line and field of an error in the recipe.
    """
    place = resolve_home(home)
    loaded = find_recipes(fspath(name))[0]
    check_name_is_free(place, loaded.pipeline)
    return Recipe(place, loaded)


@dataclass(frozen=True, repr=False)
class Recipe:
    """A recipe, or one of its variants, with its results in `home`. `load_recipe` returns it.

    Every method raises StoreError if the home cannot be used, and UsageError (code `two-homes`) while another thread of this
    process works in another home. Threads may share a home.
    """

    home: Path
    _loaded: LoadedRecipe = field(compare=False)

    def __repr__(self) -> str:
        return f"Recipe({self._pipeline.argument!r}, home={str(self.home)!r})"

    @property
    def _pipeline(self) -> Pipeline:
        return self._loaded.pipeline

    @property
    def name(self) -> str:
        """The first part of its asset keys: the name of its folder, with `-` and the variant for a variant."""
        return self._pipeline.name

    @property
    def file(self) -> Path:
        """The path of its `defs.yaml`."""
        return self._pipeline.file

    @property
    def config(self) -> RecipeConfig:
        """All fields of the recipe, defaults included, as read by `load_recipe`; local paths are absolute."""
        return self._pipeline.recipe

    def status(self) -> list[AssetStatus]:
        """Return the state of every asset (fresh, stale or missing) with causes, in the order of the graph.

        Raises DataError, ModelError, TemplateError or HubError if the inputs of the recipe cannot be read.
        """
        with open_home(self.home) as (services, instance):
            return find_status(self._pipeline, services, instance)

    def plan(self) -> list[PlannedAsset]:
        """Return for every asset whether a run would compute or reuse it, why, and how much work it is.

        Rows and tokens are made for it, in the store; no model runs. Raises as `status` does, and DataError if a run would end
        at a check.
        """
        with open_home(self.home) as (services, instance):
            return make_plan(self._pipeline, services, instance)

    def run(self, select: str | None = None, progress: bool = True) -> RunReport:
        """Materialize all assets, or `select` and everything upstream of it; compute what changed, reuse the rest.

        The call returns when the run has ended. A failed run raises no exception: `succeeded` of the report is false, and the
        `error` of the report or of an asset is the cause. An interruption (in Jupyter "Interrupt kernel") is such an error, and
        the next run goes on from the last checkpoint. `progress` shows the progress of jobs on stderr.

        Raises UsageError for an unknown asset.
        """
        if select is not None:
            check_asset(select)
        with open_home(self.home, progress) as (services, instance):
            return materialize(self._loaded, services, instance, select)

    def artifact(self, asset: str) -> Artifact:
        """Return the artifact of the asset's latest materialization: its folder, fingerprint, details and manifest.

        Its files are verified. Do not change them: they are read-only by contract, and the next reader would find them corrupt.
        Raises UsageError for an unknown asset, for released_model (see `champion`), or without a materialization; StoreError if
        the artifact is missing or corrupt.
        """
        with open_home(self.home) as (services, instance):
            return latest_artifact(self._pipeline, services, instance, asset)

    def table(self, asset: str) -> pa.Table:
        """Return the table of an artifact as a `pyarrow.Table`; `.to_pandas()` makes a data frame of it.

        * `raw_preferences`: the pairs as messages, one row per pair.
        * `tokenized_pairs`: token ids and masks, one row per pair that was not dropped.
        * `reference_logprobs`: for each of these pairs and both responses, the sum of the log-probs under the reference model
          (nats) and the number of tokens.
        * `evaluation`: one row per held-out pair: log-probs (nats), rewards and margin.

        The column `row` is the number of the pair in `raw_preferences`, from 0. Raises UsageError for another asset, or for the
        evaluation with `evaluation.disclosure: votes`; else as `artifact` does.
        """
        check_has_table(asset)
        if asset == AssetName.EVALUATION:
            check_exact(self._pipeline, "the table of the evaluation")
        with open_home(self.home) as (services, instance):
            artifact = latest_artifact(self._pipeline, services, instance, asset)
            return read_table(services.store, asset, artifact)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest evaluation on the held-out pairs, such as `eval/loss`. Raises as `artifact` does.

        With `evaluation.disclosure: votes`, return the accuracy by votes alone.
        """
        return self.artifact(AssetName.EVALUATION).of_kind(EVALUATION).details.shown_metrics

    def training_history(self) -> pa.Table:
        """Return the steps of the latest policy's training as a `pyarrow.Table`, one row per step.

        Its columns are `step` (from 1), `loss`, `time` (seconds since the epoch) and the other metrics of its batch, such
        as `rewards/margins`. Raises as `artifact` does.
        """
        return read_steps(self.artifact(AssetName.POLICY))

    def champion(self) -> ModelVersion | None:
        """Return the champion among the versions of `config.release.model_name`; None without one.

        Another recipe may have released it, if it has the same model name. Raises RegistryError if the registry does not
        answer.
        """
        with open_home(self.home) as (services, _):
            version = services.registry.champion(self.config.release.model_name)
            return None if version is None else ModelVersion.of(version, services.registry)

    def versions(self) -> list[ModelVersion]:
        """Return all versions of `config.release.model_name`, the latest first. Raises as `champion` does."""
        with open_home(self.home) as (services, _):
            versions = services.registry.versions(self.config.release.model_name)
            return [ModelVersion.of(version, services.registry) for version in versions]
