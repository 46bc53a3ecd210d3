"""Policies that are adapters: what they stand on, and the plain model that each of them comes to.

A recipe with `export: adapter` has a policy of a few files, which is no model without its base. What is released is the plain
model nevertheless, made by a job: whoever loads a version expects one that stands by itself.
"""

from assets.event_log import Log
from assets.pipeline import Pipeline, Services
from assets.realize import Work, make
from training.contract.store import Artifact, Store
from training.contract.weights import ADAPTER_CONFIG

MERGED = "merged_policy"


def base_of(policy: Artifact, store: Store) -> Artifact | None:
    """The reference model that `policy` is an adapter of; None if it is a model by itself. Raises StoreError if it is lost.

    Every way to one adapter has the same base, since its fingerprint is part of the adapter's.
    """
    if ADAPTER_CONFIG not in policy.manifest.files:
        return None
    return store.open("reference_model", policy.manifest.made_from.inputs["reference_model"].fingerprint)


def plain_model(pipeline: Pipeline, services: Services, policy: Artifact, log: Log) -> Artifact:
    """`policy` as a model by itself: just that, or an adapter merged into its base, which is made if it is not there."""
    base = base_of(policy, services.store)
    if base is None:
        return policy
    inputs = {"policy": policy, "reference_model": base}
    return make(pipeline, services, MERGED, Work("merge", {}), inputs, log).artifact
