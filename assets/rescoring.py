"""A few pairs scored again by a job of one process. The store is not asked: the point is to compute them anew."""

import logging
from dataclasses import dataclass
from typing import Any

from assets.pipeline import Pipeline, Services
from assets.realize import Work, describe_job, run_work
from training.contract.store import Artifact

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rescored:
    """`rows` as `training/rescore.py` writes them; `tolerance`: nats by the root of the count of response tokens."""

    rows: list[dict[str, Any]]
    tolerance: float


def rescore(pipeline: Pipeline, services: Services, inputs: dict[str, Artifact], rows: int | list[int]) -> Rescored:
    """Score the given `rows`, or that many spread over the table, with the policy in `inputs`, else the reference model."""
    work = Work("proof", {"rows": rows})
    job = describe_job(pipeline, services, "proof", work, {name: given.fingerprint for name, given in inputs.items()})
    alone = job.compute.model_copy(update={"processes_per_node": 1, "nodes": 1})
    job = job.model_copy(update={"compute": alone})
    with services.store.lock("proof", job.derivation.key) as lock:
        made = run_work(services, job, work, lock, _LOG)
    return Rescored(made.json("rescored.json"), made.details["tolerance"])
