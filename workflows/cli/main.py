"""The command `pedigree`: its subcommands and their modules."""

import logging
import warnings

import click

from workflows.cli.group import LazyCommand, LazyGroup

COMMANDS = {
    "chat": LazyCommand("workflows.cli.serve", "Talk to a released model: a line is a question."),
    "compare": LazyCommand("workflows.cli.inspection", "Compare the latest evaluations side by side."),
    "gc": LazyCommand("workflows.cli.maintenance", "Find unreferenced files, and delete them with --delete."),
    "history": LazyCommand(
        "workflows.cli.inspection", "Show every candidate of MODEL, its evidence over time, and the gate's decision."
    ),
    "init": LazyCommand("workflows.cli.init", "Write a recipe: FOLDER/defs.yaml."),
    "inspect": LazyCommand(
        "workflows.cli.inspection", "Show one pair: its messages, tokens, trained tokens and log-probs."
    ),
    "plan": LazyCommand("workflows.cli.freshness", "Show what a run would compute and reuse, with counts."),
    "rescore": LazyCommand(
        "workflows.cli.maintenance",
        "Set aside all log-probs of the reference model: the next run scores every response again.",
    ),
    "rollback": LazyCommand(
        "workflows.cli.maintenance", "Make the previous champion of the model NAME champion again."
    ),
    "run": LazyCommand("workflows.cli.run", "Materialize a recipe: compute what changed, reuse the rest."),
    "schema": LazyCommand("workflows.cli.init", "Print the JSON schema of a recipe's file, for editors."),
    "serve": LazyCommand("workflows.cli.serve", "Serve a released model like OpenAI's chat completions, until Ctrl-C."),
    "status": LazyCommand("workflows.cli.freshness", "Show which assets are fresh, stale or missing now, and why."),
    "ui": LazyCommand("workflows.cli.ui", "Start Dagster's and MLflow's web servers, until Ctrl-C."),
    "verify": LazyCommand(
        "workflows.cli.freshness", "Hash all artifacts of the recipe again, and score some pairs again."
    ),
}


def _quiet_libraries() -> None:
    warnings.filterwarnings("ignore", module=r"dagster.*")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)  # it waits for no version here
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it raises everything it logs
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # it logs discarded connections with a traceback


@click.group(cls=LazyGroup, lazy=COMMANDS, prepare=_quiet_libraries)
@click.version_option(package_name="pedigree")
def main() -> None:
    """Keep a preference-tuned language model up to date, with the lineage of every artifact.

    RECIPE is the name of a recipe in workflows/defs, or the path of any folder with a defs.yaml. Append / and a name for one
    of its variants: demo/hinge.
    """
