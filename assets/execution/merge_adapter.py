"""Merging of adapter policies into their base model.

With `export: adapter` a policy is a few files that need their base. A job merges both for the release, because users of a
version expect a complete model.
"""

from assets.execution.asset_context import AssetContext
from assets.execution.materialize import JobSpec, make
from training.contract.identity.model_identity import ADAPTER_CONFIG
from training.contract.protocol.artifacts import MERGED_POLICY, REFERENCE_MODEL, AssetName
from training.contract.protocol.details import ReferenceModelDetails
from training.contract.protocol.settings import NoSettings
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store


def base_of(policy: Artifact, store: Store) -> Artifact[ReferenceModelDetails] | None:
    """Return the reference model of an adapter `policy`; None for a plain model. Raise StoreError if the base is missing.

    All derivations of one adapter have the same base: the base's fingerprint is part of the adapter's.
    """
    if ADAPTER_CONFIG not in policy.manifest.files:
        return None
    return store.open(REFERENCE_MODEL, policy.manifest.made_from.inputs[AssetName.REFERENCE_MODEL].fingerprint)


def plain_model(context: AssetContext, policy: Artifact) -> Artifact:
    """Return `policy`, or the merged model if it is an adapter."""
    base = base_of(policy, context.services.store)
    if base is None:
        return policy
    inputs = {AssetName.POLICY: policy.fingerprint, AssetName.REFERENCE_MODEL: base.fingerprint}
    work = JobSpec("merge", NoSettings())
    return make(context.pipeline, context.services, MERGED_POLICY, work, inputs, context.dagster.log).artifact
