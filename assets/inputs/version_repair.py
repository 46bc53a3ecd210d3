"""Repair of a registered version: restore missing or changed files from the store.

Files of a version disappear with their MLflow run, and backups leave them out, because the store has the weights too. Damage to
a policy's weights in the store also damages the version's: both may be the same file.
"""

import logging

from assets.inputs.model_ref import ModelRef
from assets.inputs.recipe_location import written
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.files import VersionFiles, local_path, shipped_evaluation
from model_registry.model_card import model_card, read_training
from model_registry.model_version import MERGED, Version
from model_registry.registry import Registry
from training.contract.errors import ModelError, StoreError, without_code
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.artifacts import EVALUATION, AssetName

_LOG = logging.getLogger(__name__)


def restore_files(services: Services, version: Version) -> bool:
    """Restore the files of `version` if needed, with a warning. Return whether they were. Raise RegistryError."""
    registry, store = services.registry, services.store
    shipped = (
        AssetName.RELEASE_SPEC if version.fingerprint_of(AssetName.RELEASE_SPEC) else AssetName.TOKENIZATION_SPEC
    )  # older versions
    weights = MERGED if version.fingerprint_of(MERGED) else AssetName.POLICY
    with store.lock(AssetName.RELEASED_MODEL, fingerprint("version_files", version.source)):
        if version.fingerprint_of(AssetName.POLICY) is None:  # another program released it
            return False
        if (problem := files_problem(registry, version, services.hashes)) is None:
            return False
        try:
            model, files = (store.open(kind, version.fingerprint_of(kind) or "").folder for kind in (weights, shipped))
            evaluation = store.open(EVALUATION, version.fingerprint_of(AssetName.EVALUATION) or "")
        except StoreError as error:
            _LOG.warning("%s and cannot be restored: %s", problem, error)
            return False
        settings = files / "model" if shipped == AssetName.RELEASE_SPEC else model
        training = read_training(store.folder(AssetName.POLICY, version.fingerprint_of(AssetName.POLICY) or ""))
        lineage = version.known_lineage
        card = model_card(version.name, training, evaluation, lineage)
        restored = VersionFiles(model, files / "tokenizer", settings, shipped_evaluation(evaluation), card, lineage)
        registry.store_files(version.name, version.source, restored)
    _LOG.warning("%s: they were restored from the store", problem)
    return True


def restore_named(services: Services, pipeline: Pipeline, ref: ModelRef) -> None:
    """Restore the files of the version at `ref`, if it is a registered model.

    Otherwise a recipe that starts from its own released model would fail before its release, which restores files too.
    """
    if ref.is_registered:
        with written(pipeline, ref.field):
            restore_files(services, services.registry.version_at(ref.address))


def files_problem(registry: Registry, version: Version, cache: HashCache | None = None) -> str | None:
    """Return the problem of the files of `version`, or None. Raise RegistryError.

    With a `cache`, files in it are not read again, and files on a server are not fetched.
    """
    files = f"the files of version {version.number} of {version.name}"
    if not registry.has_files(version):
        return f"{files} are missing"
    if version.weights is None or (cache is not None and local_path(version.source) is None):
        return None
    try:
        weights = weights_identity(registry.folder(version), cache).fingerprint
    except ModelError as error:
        return f"{files} cannot be read as a model ({without_code(str(error))})"
    if weights == version.weights:
        return None
    return f"{files} hold the weights {short(weights)}, expected {short(version.weights)}"
