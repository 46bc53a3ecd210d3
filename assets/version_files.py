"""The files of a registered version, put back from the store where they are gone.

They go with their MLflow run when that is deleted for good, and backups leave them out, since the store has the weights too.
"""

import logging

from assets.adapters import MERGED
from assets.pipeline import Services
from model_registry.registry import Version
from training.contract.errors import StoreError
from training.contract.fingerprint import fingerprint

_LOG = logging.getLogger(__name__)


def put_back(services: Services, version: Version) -> bool:
    """Whether the files of `version` were gone and are there again; a warning says so. Raises RegistryError."""
    registry, store = services.registry, services.store
    kinds = (MERGED if version.fingerprint_of(MERGED) else "policy", "tokenization_spec", "evaluation")
    whose = f"the files of version {version.number} of {version.name} are gone"
    with store.lock("released_model", fingerprint("version_files", version.source)):
        if version.fingerprint_of("policy") is None or registry.has_files(version):  # the former is of another program
            return False
        try:
            found = [store.open(kind, version.fingerprint_of(kind) or "").folder for kind in kinds]
        except StoreError as error:
            _LOG.warning("%s and cannot be put back: %s", whose, error)
            return False
        model, tokenization, evaluation = found
        registry.store_files(version.name, version.source, model, tokenization / "tokenizer", evaluation)
    _LOG.warning("%s: they were put back from the store", whose)
    return True
