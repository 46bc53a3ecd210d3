"""Views of an experiment's charts in MLflow: chosen reward, rejected reward and margin in one chart, before all others.

MLflow draws one chart for each metric, in the order of the alphabet, and keeps another arrangement in the browser. But a view
that was shared by MLflow's button "Share" is a tag of the experiment. So we share two views: one of all runs, and one of the
latest run of each recipe.
"""

import json

from training.contract.config.json_object import JsonObject

_TAG = "mlflow.sharedViewState."
ALL_RUNS = "all"
_SECTION = "pedigree-rewards"
_CHARTS = (
    ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    ("eval/rewards/chosen", "eval/rewards/rejected", "eval/rewards/margins"),
    ("eval/rewards/accuracies", "rewards/accuracies"),
    ("eval/loss", "loss"),
    ("learning_rate",),
    ("grad_norm",),
    ("tokens_per_second",),
    ("peak_memory_mb",),
)


def chart_views(recipe: str, run_id: str) -> dict[str, str]:
    """Return the tags of an experiment for its views: of all runs, and of the latest run `run_id` of `recipe`."""
    return {**all_runs_view(), _TAG + view_of(recipe): json.dumps(_view(f"attributes.run_id = '{run_id}'"))}


def all_runs_view() -> dict[str, str]:
    """Return the tag of an experiment for its view of all runs."""
    return {_TAG + ALL_RUNS: json.dumps(_view(""))}


def view_of(recipe: str) -> str:
    """Return the name of the view of a recipe's latest run."""
    return f"latest-{recipe}"


def _view(search_filter: str) -> JsonObject:
    """Return the state of MLflow's page of runs (MLflow 3, `ExperimentPageUIState` and its search)."""
    return {
        "searchFilter": search_filter,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "FIRST_10_RUNS",
        "autoRefreshEnabled": True,
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": _SECTION, "name": "Rewards", "display": True, "isReordered": True, "isGenerated": False}
        ],
        "compareRunCharts": [_line_chart(f"pedigree-{number}", metrics) for number, metrics in enumerate(_CHARTS)],
    }


def _line_chart(identifier: str, metrics: tuple[str, ...]) -> JsonObject:
    return {
        "type": "LINE",
        "uuid": identifier,
        "metricSectionId": _SECTION,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 10,
        "metricKey": metrics[0],
        "selectedMetricKeys": list(metrics),
        "scaleType": "linear",
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "lineSmoothness": 0,
        "range": {},
        "useGlobalLineSmoothing": True,
        "useGlobalXaxisKey": True,
    }
