"""A process that runs the command `pedigree` again and again: `python -m tests.hub.resident HOME`.

Hub clients read HF_ENDPOINT and HF_HOME once, on import, so another hub needs another process. It takes seconds to start, so
one process serves many requests. A request is a line of JSON on standard input, the answer a line on standard output. Jobs
run in the same process. HF_HUB_OFFLINE, a constant of the clients, can be set for one request.
"""

import json
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import dagster as dg
from huggingface_hub import constants

from tests.workflows.in_process import services_in
from training.contract.errors import PedigreeError
from training.contract.files.hub import pin_hub_revisions
from training.contract.protocol.events import Event
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.verify import verify
from workflows.orchestration import resources
from workflows.recipes.discovery import LoadedRecipe, load_recipe
from workflows.state.status import status


def answer(question: dict[str, Any], home: Path, instance: dg.DagsterInstance) -> dict[str, Any]:
    constants.HF_HUB_OFFLINE = question.get("offline", False)
    events: list[Event] = []
    loaded = load_recipe(Path(question["recipe"]))
    services = replace(services_in(home), listener=events.append)
    try:
        match question["do"]:
            case "status":
                found: Any = {a.asset: [a.state, *a.causes] for a in status(loaded.pipeline, services, instance)}
            case "plan":
                found = {a.asset: a.action for a in plan(loaded.pipeline, services, instance)}
            case "verify":
                found = asdict(verify(loaded.pipeline, services, instance, rows=2))
            case "run":
                found = asdict(materialize(loaded, services, instance, question.get("select")))
            case "run by Dagster":
                os.environ["PEDIGREE_HOME"] = str(home)
                found = run_by_dagster(loaded, instance)
    except PedigreeError as error:
        return {"error": str(error), "events": events}
    return {"found": found, "events": events}


def run_by_dagster(loaded: LoadedRecipe, instance: dg.DagsterInstance) -> bool:
    """Run the recipe with the resources that Dagster gives a run from its UI or a schedule. Return whether it succeeds."""
    own = dg.Definitions(resources={"services": resources.services}, executor=dg.in_process_executor)
    job = dg.Definitions.merge(loaded.definitions, own).resolve_implicit_global_asset_job_def()
    return job.execute_in_process(instance=instance, raise_on_error=False).success


def main(home: Path, replies: TextIO) -> None:
    logging.getLogger("dagster").setLevel(logging.CRITICAL)
    with dg.DagsterInstance.ephemeral() as instance:
        for line in sys.stdin:
            question = json.loads(line)
            with nullcontext() if question["do"] == "run by Dagster" else pin_hub_revisions():  # as within a command
                found = answer(question, home, instance)
            replies.write(json.dumps(found, default=str) + "\n")
            replies.flush()


if __name__ == "__main__":
    own = os.dup(1)
    os.dup2(2, 1)  # libraries print, and only the answer may reach stdout
    main(Path(sys.argv[1]), os.fdopen(own, "w"))
    os._exit(0)  # an orderly interpreter exit takes seconds
