"""The files of a registered version, put back from the store where they are gone or not what they were.

They go with their MLflow run when that is deleted for good, and backups leave them out, since the store has the weights too.
And what spoils the weights of a policy in place spoils the version's, which are the same file.
"""

import logging

from assets.inputs.model_ref import ModelRef
from assets.inputs.recipe_location import written
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.files import VersionFiles, local_path
from model_registry.model_version import MERGED, Version
from model_registry.registry import Registry
from training.contract.errors import ModelError, StoreError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import weights_fingerprint, weights_identity

_LOG = logging.getLogger(__name__)


def restore_files(services: Services, version: Version) -> bool:
    """Whether the files of `version` had a fault and have none any more; a warning says so. Raises RegistryError."""
    registry, store = services.registry, services.store
    shipped = "release_spec" if version.fingerprint_of("release_spec") else "tokenization_spec"  # versions of before
    kinds = (MERGED if version.fingerprint_of(MERGED) else "policy", shipped, "evaluation")
    with store.lock("released_model", fingerprint("version_files", version.source)):
        if version.fingerprint_of("policy") is None:  # it is another program's, and so are its files
            return False
        if (fault := files_problem(registry, version, services.hashes)) is None:
            return False
        try:
            found = [store.open(kind, version.fingerprint_of(kind) or "").folder for kind in kinds]
        except StoreError as error:
            _LOG.warning("%s and cannot be put back: %s", fault, error)
            return False
        model, files, evaluation = found
        settings = files / "model" if shipped == "release_spec" else model
        registry.store_files(
            version.name, version.source, VersionFiles(model, files / "tokenizer", settings, evaluation)
        )
    _LOG.warning("%s: they were put back from the store", fault)
    return True


def restore_named(services: Services, pipeline: Pipeline, named: ModelRef) -> None:
    """The same for the version that a recipe begins with, if it is one.

    A recipe that begins with what it released itself would else never get as far as its release, which puts files back.
    """
    if named.is_registered:
        with written(pipeline, named.field):
            restore_files(services, services.registry.version_at(named.address))


def files_problem(registry: Registry, version: Version, cache: HashCache | None = None) -> str | None:
    """What is wrong with the files of `version`, in words. Raises RegistryError.

    With a `cache`, files in it are not read again, and those on a server are not fetched.
    """
    whose = f"the files of version {version.number} of {version.name}"
    if not registry.has_files(version):
        return f"{whose} are gone"
    if version.weights is None or (cache is not None and local_path(version.source) is None):
        return None
    try:
        found = weights_fingerprint(weights_identity(registry.folder(version), cache))
    except ModelError as error:
        return f"{whose} are no model any more ({error})"
    if found == version.weights:
        return None
    return f"{whose} hold the weights {short(found)} where its policy is {short(version.weights)}"
