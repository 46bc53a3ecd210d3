"""What we replace in MLflow, and in transformers for MLflow, while a policy is packaged."""

import sys
from typing import Any

from training.contract.system.imports import import_without_gc
from training.contract.system.patches import replace_attribute

_TASK = "text-generation"  # transformers' task for a chat
# transformers and MLflow import them if they are installed, and use them only for loaded models.
_UNUSED = ("torch", "peft")


def hide_unused_libraries() -> None:
    """Let imports of libraries fail that MLflow needs only for loaded models: they take a quarter of the time."""
    sys.modules |= dict.fromkeys(_UNUSED)  # type: ignore[arg-type]  # None: an import of it fails


def name_pipeline_class() -> None:
    """Put the class of a pipeline into transformers' table of tasks, where MLflow 3.17 reads it from.

    transformers 5.23 has the name of the class there.
    """
    pipelines: Any = import_without_gc("transformers.pipelines")
    if isinstance(pipelines.SUPPORTED_TASKS[_TASK].get("impl"), str):
        pipelines.SUPPORTED_TASKS[_TASK]["impl"] = pipelines.TextGenerationPipeline


def skip_comparison_of_requirements() -> None:
    """Let MLflow save a model in half of the time.

    MLflow compares the requirements with the installed packages, and lists all their files for that. No setting turns this
    off. Our requirements come from these packages, so the comparison is unnecessary.
    """
    environment: Any = import_without_gc("mlflow.utils.environment")
    name, otherwise = "warn_dependency_requirement_mismatches", "packaging a model takes twice as long"
    replace_attribute(environment, name, lambda _: _do_nothing, "MLflow 3.17", otherwise)


def _do_nothing(requirements: list[str]) -> None:
    """Stand for the comparison."""
