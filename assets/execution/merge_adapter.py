"""Policies that are adapters: the base of each, and the plain model that it is merged into.

With `export: adapter` a policy is a few files that are useless without their base. What is released is a plain model
nevertheless, merged by a job: whoever loads a version expects a complete model.
"""

from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, make
from model_registry.model_version import MERGED
from training.contract.identity.model_identity import ADAPTER_CONFIG
from training.contract.store.store import Artifact, Store


def base_of(policy: Artifact, store: Store) -> Artifact | None:
    """The reference model that `policy` is an adapter of; None for a plain model. Raises StoreError if the base is lost.

    All derivations of one adapter have the same base, since the base's fingerprint is part of the adapter's.
    """
    if ADAPTER_CONFIG not in policy.manifest.files:
        return None
    return store.open("reference_model", policy.manifest.made_from.inputs["reference_model"].fingerprint)


def plain_model(step: AssetContext, policy: Artifact) -> Artifact:
    """`policy` itself, or, if it is an adapter, the model that a job merges it into."""
    base = base_of(policy, step.services.store)
    if base is None:
        return policy
    inputs = {"policy": policy.fingerprint, "reference_model": base.fingerprint}
    return make(step.pipeline, step.services, MERGED, JobSpec("merge", {}), inputs, step.context.log).artifact
