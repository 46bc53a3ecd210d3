"""The files of a model version: packaged by a separate process, with weights stored on disk once.

MLflow saves a model as a full second copy. We replace the copied weights by hard links to the policy's files. So store and
registry share the bytes, and each may delete its name. If a link is impossible, for example across filesystems, the file is
copied. The policy's config is kept, so the weights of the version have the policy's fingerprint. A small copy of the
evaluation is added, to compare a candidate with it in another home, or after the store's copy became corrupt.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from model_registry.client import mlflow_api
from model_registry.model_version import LINEAGE_FILE
from training.contract.errors import RegistryError
from training.contract.identity.model_identity import PROCESSORS
from training.contract.identity.tokenizer_files import tokenizer_files
from training.contract.protocol.details import EvaluationDetails
from training.contract.store.artifact import Artifact
from training.contract.store.staging import claimed
from training.contract.system.atomic_io import is_disk_full, write_error

MODEL_FOLDER = "model"
EVALUATION_FOLDER = "evaluation"
_TOKENIZER_FOLDER = "components/tokenizer"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_SETTINGS = ("generation_config.json", PROCESSORS)
_CAUSE_CHARACTERS = 2000


@dataclass(frozen=True)
class VersionFiles:
    """The source folders for the files of a version.

    `policy` has weights and config, `settings` generation settings and processors. `evaluation` is copied unchanged. `card` is
    the text of the model card, README.md among the model's files. `lineage`: fingerprints by kind, one file beside the model.
    """

    policy: Path
    tokenizer: Path
    settings: Path
    evaluation: Path | None = None
    card: str = ""
    lineage: Mapping[str, str] = field(default_factory=dict)


def shipped_evaluation(evaluation: Artifact[EvaluationDetails]) -> Path | None:
    """Return the evaluation's folder for the files of a version.

    None if its exact figures are hidden: MLflow shows the files of a version.
    """
    return evaluation.folder if evaluation.details.accuracy_votes is None else None


@contextlib.contextmanager
def packaged(name: str, files: VersionFiles, parent: Path) -> Iterator[Path]:
    """Yield `files` as an MLflow model, in a temporary folder on the filesystem of `parent`.

    Raises RegistryError, or StoreError with the free bytes if that filesystem is full.
    """
    with scratch(parent) as staging:
        folder = staging / "policy"
        try:
            _package(name, files.policy, files.tokenizer, folder)
            _replace_saved_files(files, folder / MODEL_FOLDER)
            _add_tokenizer(files.tokenizer, folder)
            if files.lineage:
                (folder / LINEAGE_FILE).write_text(json.dumps(files.lineage, indent=2) + "\n", encoding="utf-8")
            if files.card:
                (folder / MODEL_FOLDER / "README.md").write_text(files.card, encoding="utf-8")
            if files.evaluation is not None:
                shutil.copytree(files.evaluation, folder / EVALUATION_FOLDER)
        except (OSError, RegistryError) as error:
            if is_disk_full(str(error)):
                raise write_error(f"package {name}", parent, error) from error
            raise
        yield folder


def scratch(parent: Path) -> contextlib.AbstractContextManager[Path]:
    """Return an empty temporary folder on the filesystem of `parent`."""
    return claimed(parent / ".staging")


def move_into_place(folder: Path, target: Path, scratch: Path) -> None:
    """Rename `folder` to `target`, on the same filesystem. Move an existing `target` to `scratch`."""
    if target.exists():
        os.rename(target, scratch / f"replaced {target.name}")
    os.rename(folder, target)


def put_files(folder: Path, source: str, tracking_uri: str) -> None:
    """Put the contents of `folder` at the address `source`. For a local address, move the folder there."""
    if local := local_path(source):
        local.parent.mkdir(parents=True, exist_ok=True)
        move_into_place(folder, local, folder.parent)
    else:
        mlflow_api.get_artifact_repository(source, tracking_uri=tracking_uri).log_artifacts(str(folder))


def holds_model(source: str, tracking_uri: str) -> bool:
    """Return whether the files at the address `source` include a model; True for an address in a cloud."""
    if urlsplit(source).scheme not in ("", "file", "mlflow-artifacts"):
        return True
    if local := local_path(source):
        folder = local / MODEL_FOLDER
        paths: list[PurePath] = [*folder.iterdir()] if folder.is_dir() else []
    else:
        entries = mlflow_api.list_artifacts(artifact_uri=f"{source}/{MODEL_FOLDER}", tracking_uri=tracking_uri)
        paths = [PurePath(file.path) for file in entries]
    return "config.json" in {name.name for name in paths} and ".safetensors" in {name.suffix for name in paths}


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the filesystem refuses links."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def local_path(uri: str) -> Path | None:
    """Return the path of an artifact address on this machine; None for a remote or proxied one."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def _package(name: str, policy: Path, tokenizer: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "model_registry.package_model", name, str(policy), str(tokenizer), str(folder)]
    settings = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        cause = done.stdout.strip() or done.stderr.strip()[-_CAUSE_CHARACTERS:] or f"exit code {done.returncode}"
        lacks_memory = "MemoryError" in cause
        advice = "; run it on a machine with more memory" if lacks_memory else ""
        raise RegistryError(
            f"{policy} cannot be packaged as an MLflow model: {cause}{advice}",
            "out-of-memory" if lacks_memory else "packaging-failed",
        )


def _add_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Put the tokenizer beside the weights, so the model folder is complete as a reference model.

    Link the original files: transformers would load and save them differently, with another fingerprint.
    """
    for name, file in tokenizer_files(tokenizer).items():
        for subfolder in (MODEL_FOLDER, _TOKENIZER_FOLDER):
            (folder / subfolder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, folder / subfolder / name)


def _replace_saved_files(files: VersionFiles, model: Path) -> None:
    """Replace all files saved by MLflow with the weights, config and settings."""
    shutil.rmtree(model)
    model.mkdir()
    for folder, patterns in ((files.policy, _WEIGHTS), (files.settings, _SETTINGS)):
        for pattern in patterns:
            for file in folder.glob(pattern):
                link_or_copy(file, model / file.name)
    config = json.loads((files.policy / "config.json").read_text(encoding="utf-8"))
    config.pop("use_cache", None)  # perhaps off since the training of the base model; no fingerprint includes it
    (model / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
