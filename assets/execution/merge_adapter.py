"""Merging of adapter policies into their base model.

With `export: adapter` a policy is a few files that need their base. A job merges both for the release, because users of a
version expect a complete model.
"""

from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, make
from model_registry.model_version import MERGED
from training.contract.identity.model_identity import ADAPTER_CONFIG
from training.contract.store.store import Artifact, Store


def base_of(policy: Artifact, store: Store) -> Artifact | None:
    """Return the reference model of an adapter `policy`; None for a plain model. Raise StoreError if the base is missing.

    All derivations of one adapter have the same base: the base's fingerprint is part of the adapter's.
    """
    if ADAPTER_CONFIG not in policy.manifest.files:
        return None
    return store.open("reference_model", policy.manifest.made_from.inputs["reference_model"].fingerprint)


def plain_model(context: AssetContext, policy: Artifact) -> Artifact:
    """Return `policy`, or the merged model if it is an adapter."""
    base = base_of(policy, context.services.store)
    if base is None:
        return policy
    inputs = {"policy": policy.fingerprint, "reference_model": base.fingerprint}
    return make(context.pipeline, context.services, MERGED, JobSpec("merge", {}), inputs, context.dagster.log).artifact
