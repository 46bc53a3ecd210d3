"""The registry: policies as versions of a registered model, found by their tags and named by two aliases.

`candidate` is the latest policy that was evaluated, `champion` the one in use. A version carries the fingerprints of its
whole lineage as tags, and that of its release, by which it is found: repeating a release gives the same version, another gate
for the same policy another one. A new champion records the version it replaces, so a rollback needs no record elsewhere.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException

from model_registry.connection import Connection, is_server, page, shown, without_retries
from model_registry.files import (
    MODEL_FOLDER,
    VersionFiles,
    holds_model,
    local_path,
    move_into_place,
    packaged,
    put_files,
    scratch,
)
from model_registry.mlflow_types import tags_of
from model_registry.model_version import PREVIOUS_TAG, ROLLED_BACK_TAG, Version
from training.contract.errors import RegistryError, UnknownModel
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.system.locks import locked

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>[0-9]+))")


class Registry:
    """The model registry of a server or database. Its methods raise RegistryError.

    `tracking_uri` is where the runs are, and with them the files of versions; `uri`, by default the same, has the registry.
    `downloads` is a folder for what goes to and comes from a remote artifact store.
    """

    def __init__(self, tracking_uri: str, downloads: Path, uri: str | None = None) -> None:
        self.tracking_uri, self.uri, self.downloads = tracking_uri, uri or tracking_uri, downloads
        self._connection, self._runs = Connection(self.uri), Connection(tracking_uri)

    def register(
        self,
        name: str,
        policy: Path,
        run_id: str,
        *,
        identity: Mapping[str, str],
        tags: Mapping[str, str],
        tokenizer: Path | None = None,
        settings: Path | None = None,
        evaluation: Path | None = None,
        description: str | None = None,
    ) -> Version:
        """Make the policy in the folder `policy`, trained in the MLflow run `run_id`, a version of `name`.

        If a version carries all tags of `identity`, that is returned. `tags` are further tags of a new version,
        and `description` is Markdown. The other folders are those of VersionFiles, by default the policy's own.
        """
        assert identity, "without identifying tags every version would be this policy"
        if found := self.find_version(name, identity):
            return found
        with self._runs.asking(f"find a place for the files of {name}") as client:
            source = f"{client.get_run(run_id).info.artifact_uri}/{_folder_name(name, identity)}"
        if source not in {version.source for version in self.versions(name)}:  # what a version points at is kept
            self.store_files(name, source, VersionFiles(policy, tokenizer or policy, settings or policy, evaluation))
        with self._connection.asking(f"register {name}") as client, without_retries():
            if _registered(client, name) is None:
                client.create_registered_model(name)
            known = tags_of({**tags, **identity})
            try:
                return Version.of(client.create_model_version(name, source, run_id, known, description=description))
            except MlflowException:
                if found := self.find_version(name, identity):  # made, and the answer was lost
                    return found
                raise

    def store_files(self, name: str, source: str, files: VersionFiles) -> None:
        """Put `files`, packaged, at the address `source`. What an interrupted attempt left there is replaced."""
        local = local_path(source)
        # Beside the folder of artifacts, not in it: whoever looks at the run does not see it.
        parent = local.parents[1] if local else self.downloads
        with (
            self._runs.asking(f"store the files of {name}", patient=True),
            packaged(f"models:/{name}", files, parent) as folder,
        ):
            put_files(folder, source, self.tracking_uri)

    def has_files(self, version: Version) -> bool:
        """Whether its model is where the version says. What lies in a cloud, with keys of its own, is taken to be there."""
        with self._runs.asking(f"look for the files of {version.name}/{version.number}"):
            return holds_model(version.source, self.tracking_uri)

    def find_version(self, name: str, tags: Mapping[str, str]) -> Version | None:
        """The latest version of `name` that carries all of `tags`."""
        wanted = tags_of(tags).items()
        return next((version for version in self.versions(name) if wanted <= version.tags.items()), None)

    def find_released(self, name: str, weights: str) -> Version | None:
        """The latest version of `name` that was released with weights of this fingerprint, and has its files."""
        same = (version for version in self.versions(name) if version.weights == weights)
        return next((version for version in same if self.has_files(version)), None)

    def versions(self, name: str | None = None) -> list[Version]:
        """Every version of the registered model `name`, by default of every model; the latest first."""
        where = None if name is None else f"name = '{name}'"
        with self._connection.asking(f"look for versions of {name or 'its models'}") as client:
            found, token = [], None
            while True:
                some = client.search_model_versions(where, page_token=token)
                found += [Version.of(version) for version in some]
                if not (token := some.token):
                    return sorted(found, key=lambda version: version.number, reverse=True)

    def link(self, version: Version) -> str:
        """The page of a version."""
        served = self.uri if is_server(self.uri) else self.tracking_uri
        return page(served, f"models/{version.name}/versions/{version.number}")

    def champion(self, name: str) -> Version | None:
        with self._connection.asking(f"look for the champion of {name}") as client:
            registered = _registered(client, name)
            number = registered and registered.get("champion")
            return Version.of(client.get_model_version(name, number)) if number else None

    def nominate(self, version: Version) -> None:
        """Point the alias `candidate` at the version."""
        with self._connection.asking(f"make version {version.number} of {version.name} its candidate") as client:
            client.set_registered_model_alias(version.name, "candidate", str(version.number))

    def promote(self, version: Version, over: Version | None) -> bool:
        """Make the version champion, and note which one it replaces, if that is still `over`; gives whether it did.

        MLflow cannot compare and set in one request: a promotion by others in the milliseconds between the two is not seen.
        """
        name, number = version.name, version.number
        with self._connection.asking(f"make version {number} of {name} its champion") as client:
            now = (_registered(client, name) or {}).get("champion")
            if (now and int(now)) != (over and over.number):
                return False
            if over is not None and over.number != number:
                client.set_model_version_tag(name, str(number), PREVIOUS_TAG, str(over.number))
            client.set_registered_model_alias(name, "champion", str(number))
        return True

    def fetch(self, version: Version, part: str, into: Path) -> Path:
        """Download a folder of the version's files into the folder `into`; gives its place there."""
        with self._runs.asking(f"download {part} of {version.name}/{version.number}", patient=True):
            source = f"{version.source}/{part}"
            return Path(download_artifacts(artifact_uri=source, dst_path=str(into), tracking_uri=self.tracking_uri))

    def tag(self, version: Version, tags: Mapping[str, str]) -> Version:
        """Add tags to a version; gives it with them."""
        added = tags_of(tags)
        with self._connection.asking(f"tag version {version.number} of {version.name}") as client:
            for name, value in added.items():
                client.set_model_version_tag(version.name, str(version.number), name, value)
        return replace(version, tags={**version.tags, **added})

    def rollback(self, name: str) -> tuple[Version, Version]:
        """Make the champion's predecessor champion again, and mark the champion as rolled back; gives both, in this order."""
        champion = self.champion(name)
        if champion is None:
            self._check_registered(name)
            raise RegistryError(f"{name} has no champion in {shown(self.uri)}, so there is nothing to roll back")
        previous = champion.tags.get(PREVIOUS_TAG)
        if previous is None:
            raise RegistryError(
                f"version {champion.number} of {name}, the champion, replaced none that is noted; let the alias `champion` "
                "point at another version in MLflow"
            )
        with self._connection.asking(f"roll {name} back to version {previous}") as client:
            try:
                restored = Version.of(client.get_model_version(name, previous))
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise RegistryError(
                    f"version {previous} of {name}, which version {champion.number} replaced as champion, was deleted; let the "
                    "alias `champion` point at another version in MLflow"
                ) from error
            if not self.has_files(restored):
                raise RegistryError(
                    f"version {previous} of {name} cannot be champion again: {restored.source} holds no model"
                )
            if champion.weights is not None:
                client.set_registered_model_tag(name, _rolled_back_tag(champion.weights), str(champion.number))
            client.set_model_version_tag(name, str(champion.number), ROLLED_BACK_TAG, "true")
            client.set_registered_model_alias(name, "champion", previous)
        return restored, champion

    def rolled_back(self, version: Version) -> str | None:
        """The number of the version, with the weights of this one, that was rolled back; it may have been deleted since."""
        name, weights = version.name, version.weights
        if weights is None:
            return None
        marked = (other for other in self.versions(name) if ROLLED_BACK_TAG in other.tags)
        if found := next((other for other in marked if other.weights == weights), None):
            return str(found.number)
        with self._connection.asking(f"look for what of {name} was rolled back") as client:
            tags: dict[str, str] = client.get_registered_model(name).tags
            return tags.get(_rolled_back_tag(weights))

    def version_at(self, address: str) -> Version:
        """The version behind `models:/name@alias` or `models:/name/number`."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise RegistryError(
                f"{address} is not an address of a model; expected models:/name@champion or models:/name/3"
            )
        self._check_registered(match["name"], match["alias"])
        with self._connection.asking(f"find {address}") as client:
            return Version.of(
                client.get_model_version_by_alias(match["name"], match["alias"])
                if match["alias"]
                else client.get_model_version(match["name"], match["number"])
            )

    def resolve(self, address: str) -> Path:
        """The local folder of the Hugging Face model behind an address as `version_at` takes it."""
        return self.folder(self.version_at(address))

    def folder(self, version: Version) -> Path:
        """The local folder of the Hugging Face model that a version holds; what lies on a server is downloaded."""
        local = local_path(version.source)
        folder = local / MODEL_FOLDER if local else self._downloaded(version)
        if not (folder / "config.json").is_file():
            raise RegistryError(
                f"version {version.number} of {version.name} leads to {version.source}/{MODEL_FOLDER}, which has no "
                "config.json; expected a Hugging Face model. If a recipe released it, a run of that recipe puts its files back"
            )
        return folder

    def outdated_downloads(self) -> list[str]:
        """What of `downloads` are versions that no alias points at, as `name/folder`; they can be fetched again."""
        found: list[str] = []
        for model in sorted(place for place in self.downloads.glob("[!.]*") if not place.is_symlink()):
            with self._connection.asking(f"look for the aliases of {model.name}") as client:
                numbers = set((_registered(client, model.name) or {}).values())
                named = {Version.of(client.get_model_version(model.name, number)).download_name for number in numbers}
            found += sorted(name for folder in model.iterdir() if (name := f"{model.name}/{folder.name}") not in named)
        return found

    def remove_download(self, name: str) -> bool:
        """Remove the download `name`; False if it is gone. It is renamed first, so nobody finds half of it in its place."""
        with scratch(self.downloads) as staging, suppress(FileNotFoundError):
            (self.downloads / name).rename(staging / "outdated")
            return True
        return False

    def _check_registered(self, name: str, alias: str | None = None) -> None:
        """Raises UnknownModel where there is no model `name`, RegistryError where it has no such alias, with what there is."""
        with self._connection.asking(f"look for {name}") as client:
            aliases = _registered(client, name)
            others = sorted(model.name for model in client.search_registered_models()) if aliases is None else []
        place = shown(self.uri)
        if aliases is None:
            raise UnknownModel(
                f"no model {name} is registered in {place}, where there is {', '.join(others) or 'none'}; name one of "
                "these, or first run the recipe that releases it"
            )
        if alias is not None and alias not in aliases:
            raise RegistryError(
                f"no version of {name} has the alias {alias} in {place}, where there is {', '.join(aliases) or 'none'}; "
                "name one of these, or a version by its number"
            )

    def _downloaded(self, version: Version) -> Path:
        """A version's model folder, fetched once, since its files never change; there is none where they are gone.

        Whoever else wants it waits: a second download would take the place of the first, which is read by then.
        """
        target = self.downloads / version.download_name
        if target.is_dir() or not self.has_files(version):
            return target
        with locked(self.downloads / f".{version.name}-{target.name}.lock"), scratch(self.downloads) as staging:
            if not target.is_dir():
                fetched = self.fetch(version, MODEL_FOLDER, staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                move_into_place(fetched, target, staging)
        return target


def _registered(client: MlflowClient, name: str) -> dict[str, str] | None:
    """The aliases of a registered model and the versions they point at; None if there is no such model."""
    try:
        return dict(client.get_registered_model(name).aliases)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _rolled_back_tag(weights: str) -> str:
    """The registered model's own tag for a policy that was rolled back: the tags of a version go with it."""
    return f"{ROLLED_BACK_TAG}.{weights}"


def _folder_name(name: str, identity: Mapping[str, str]) -> str:
    """A folder for each version: one run can have several, with different tokenizers for example."""
    return f"policy-{short(fingerprint('model_version', [name, dict(identity)]))}"
