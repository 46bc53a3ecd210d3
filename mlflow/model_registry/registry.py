"""The model registry: policies as versions of a registered model, with two aliases.

`candidate` is the policy evaluated last, `champion` the one in use. The tags of a version hold the fingerprints of its lineage
and of its release. A version is found by its release: the same release gives the same version, another gate another version.
A new champion records the version it replaces, for a rollback.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from model_registry.client import mlflow_api
from model_registry.client.records import find_aliases
from model_registry.client.settings import brief_patience, without_retries
from model_registry.connection import Connection, is_server, page, shown
from model_registry.downloads import Downloads
from model_registry.files import MODEL_FOLDER, VersionFiles, holds_model, local_path, packaged, put_files
from model_registry.logged_policy import LoggedPolicy
from model_registry.mlflow_types import tags_of
from model_registry.model_version import PREVIOUS_TAG, ROLLED_BACK_TAG, Version
from training.contract.errors import RegistryError, UnknownModel

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>[0-9]+))")


class Registry:
    """The model registry of a server or database. Its methods raise RegistryError.

    `tracking_uri` has the runs and the files of versions; `uri`, by default the same, has the registry. `downloads` is a folder
    for transfers to and from a remote artifact store.
    """

    def __init__(self, tracking_uri: str, downloads: Path, uri: str | None = None) -> None:
        self.tracking_uri, self.uri, self.downloads = tracking_uri, uri or tracking_uri, downloads
        self.connection, self._runs = Connection(self.uri), Connection(tracking_uri)
        self._downloads = Downloads(downloads)

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
        card: str = "",
        lineage: Mapping[str, str] | None = None,
    ) -> Version:
        """Make the policy in the folder `policy`, trained in the MLflow run `run_id`, a version of `name`.

        Return the existing version if one carries all tags of `identity`. `tags` are further tags of a new version. The other
        arguments are as in VersionFiles, the folders by default `policy`. The files are those of a logged model of the run,
        which has the run's held-out metrics.
        """
        assert identity, "without identifying tags every version would be this policy"
        if found := self.find_version(name, identity):
            return found
        model = LoggedPolicy(self._runs, run_id, name, identity)
        if model.source not in {version.source for version in self.versions(name)}:  # do not replace files of a version
            files = VersionFiles(policy, tokenizer or policy, settings or policy, evaluation, card, lineage or {})
            self.store_files(name, model.source, files)
        model.finish()
        with self.connection.asking(f"register {name}") as client, without_retries():
            if find_aliases(client, name) is None:
                client.create_registered_model(name)
            known = tags_of({**tags, **identity})
            try:
                version = Version.of(
                    client.create_model_version(name, model.source, run_id, known, model_id=model.model_id)
                )
            except mlflow_api.MlflowException:
                if not (found := self.find_version(name, identity)):
                    raise
                version = found  # the server made it, but its answer was lost
        model.link_version(version)
        return version

    def describe(self, version: Version, description: str) -> None:
        """Replace the Markdown text on the version's page."""
        with self.connection.asking(f"describe version {version.number} of {version.name}") as client:
            client.update_model_version(version.name, str(version.number), description)

    def description(self, version: Version) -> str:
        """Return the Markdown text on the version's page."""
        with self.connection.asking(f"read the page of version {version.number} of {version.name}") as client:
            return client.get_model_version(version.name, str(version.number)).description or ""

    def store_files(self, name: str, source: str, files: VersionFiles) -> None:
        """Package `files` and put them at the address `source`. They replace leftovers of an interrupted attempt."""
        local = local_path(source)
        # Beside the folder of artifacts: in it, the temporary folder would appear as an artifact of the run.
        parent = local.parents[1] if local else self.downloads
        with (
            self._runs.asking(f"store the files of {name}", patient=True),
            packaged(f"models:/{name}", files, parent) as folder,
        ):
            put_files(folder, source, self.tracking_uri)

    def has_files(self, version: Version) -> bool:
        """Return whether the version's model is at its address. In a cloud with its own keys, it is taken to be there."""
        with self._runs.explaining(f"look for the files of {version.name}/{version.number}"), brief_patience():
            return holds_model(version.source, self.tracking_uri)

    def find_version(self, name: str, tags: Mapping[str, str]) -> Version | None:
        """Return the latest version of `name` with all of `tags`, or None."""
        items = tags_of(tags).items()
        return next((version for version in self.versions(name) if items <= version.tags.items()), None)

    def find_released(self, name: str, weights: str) -> Version | None:
        """Return the latest version of `name` with weights of this fingerprint and with its files, or None."""
        same = (version for version in self.versions(name) if version.weights == weights)
        return next((version for version in same if self.has_files(version)), None)

    def versions(self, name: str | None = None) -> list[Version]:
        """Return all versions of the registered model `name`, by default of every model; the latest first."""
        with self.connection.reading(f"look for versions of {name or 'its models'}") as records:
            return records.versions(name)

    def link(self, version: Version) -> str:
        """Return the address of the version's page."""
        served = self.uri if is_server(self.uri) else self.tracking_uri
        return page(served, f"models/{version.name}/versions/{version.number}")

    def champion(self, name: str) -> Version | None:
        with self.connection.reading(f"look for the champion of {name}") as records:
            number = (records.aliases(name) or {}).get("champion")
            return records.version(name, number) if number else None

    def nominate(self, version: Version) -> None:
        """Point the alias `candidate` at the version."""
        with self.connection.asking(f"make version {version.number} of {version.name} its candidate") as client:
            client.set_registered_model_alias(version.name, "candidate", str(version.number))

    def promote(self, version: Version, over: Version | None) -> bool:
        """Make the version champion, if the champion is still `over`. Return whether it became champion.

        The version notes its predecessor. MLflow cannot compare and set in one request, so a promotion by another process in
        the milliseconds between the two goes unseen.
        """
        name, number = version.name, version.number
        with self.connection.asking(f"make version {number} of {name} its champion") as client:
            champion = (find_aliases(client, name) or {}).get("champion")
            if (champion and int(champion)) != (over and over.number):
                return False
            if over is not None and over.number != number:
                client.set_model_version_tag(name, str(number), PREVIOUS_TAG, str(over.number))
            client.set_registered_model_alias(name, "champion", str(number))
        return True

    def fetch(self, version: Version, part: str, into: Path) -> Path:
        """Download the folder `part` of the version's files into the folder `into`. Return its path there."""
        with self._runs.asking(f"download {part} of {version.name}/{version.number}", patient=True):
            source = f"{version.source}/{part}"
            return Path(
                mlflow_api.download_artifacts(artifact_uri=source, dst_path=str(into), tracking_uri=self.tracking_uri)
            )

    def tag(self, version: Version, tags: Mapping[str, str]) -> Version:
        """Add tags to a version. Return the version with them."""
        added = tags_of(tags)
        with self.connection.asking(f"tag version {version.number} of {version.name}") as client:
            for name, value in added.items():
                client.set_model_version_tag(version.name, str(version.number), name, value)
        return replace(version, tags={**version.tags, **added})

    def rollback(self, name: str) -> tuple[Version, Version]:
        """Make the champion's predecessor champion again, and mark the champion as rolled back. Return both, in this order."""
        champion = self.champion(name)
        if champion is None:
            self.check_registered(name)
            raise RegistryError(
                f"{name} has no champion in {shown(self.uri)}; there is nothing to roll back", "no-champion"
            )
        previous = champion.tags.get(PREVIOUS_TAG)
        if previous is None:
            raise RegistryError(
                f"{name} has no earlier champion: version {champion.number}, the champion, replaced none. To use another "
                "version, point the alias `champion` at it in MLflow",
                "no-previous-version",
            )
        with self.connection.asking(f"roll {name} back to version {previous}") as client:
            try:
                restored = Version.of(client.get_model_version(name, previous))
            except mlflow_api.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise RegistryError(
                    f"version {previous} of {name}, replaced by version {champion.number} as champion, was deleted; point the "
                    "alias `champion` at another version in MLflow",
                    "version-deleted",
                ) from error
            if not self.has_files(restored):
                raise RegistryError(
                    f"version {previous} of {name} cannot be champion again: {restored.source} holds no model",
                    "version-without-files",
                )
            if champion.weights is not None:
                client.set_registered_model_tag(name, _rolled_back_tag(champion.weights), str(champion.number))
            client.set_model_version_tag(name, str(champion.number), ROLLED_BACK_TAG, "true")
            client.set_registered_model_alias(name, "champion", previous)
        return restored, champion

    def rolled_back(self, version: Version) -> str | None:
        """Return the number of the rolled-back version with the weights of this one, or None. It may have been deleted."""
        name, weights = version.name, version.weights
        if weights is None:
            return None
        marked = (other for other in self.versions(name) if ROLLED_BACK_TAG in other.tags)
        if rolled_back := next((other for other in marked if other.weights == weights), None):
            return str(rolled_back.number)
        with self.connection.asking(f"look for rolled-back versions of {name}") as client:
            tags: dict[str, str] = client.get_registered_model(name).tags
            return tags.get(_rolled_back_tag(weights))

    def version_at(self, address: str) -> Version:
        """Return the version at the address `models:/name@alias` or `models:/name/number`."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise RegistryError(
                f"{address} is not an address of a model; expected models:/name@champion or models:/name/3",
                "wrong-model-address",
            )
        aliases = self.check_registered(match["name"], match["alias"])
        with self.connection.reading(f"find {address}") as records:
            return records.version(match["name"], match["number"] or aliases[match["alias"]])

    def resolve(self, address: str) -> Path:
        """Return the local folder of the Hugging Face model at an address of `version_at`."""
        return self.folder(self.version_at(address))

    def folder(self, version: Version) -> Path:
        """Return the local folder of a version's Hugging Face model. Download it if it is on a server."""
        local = local_path(version.source)
        folder = local / MODEL_FOLDER if local else self._downloaded(version)
        if not (folder / "config.json").is_file():
            raise RegistryError(
                f"version {version.number} of {version.name}: {version.source}/{MODEL_FOLDER} has no config.json; expected a "
                "Hugging Face model. If a recipe released it, run the recipe again to restore its files",
                "version-without-files",
            )
        return folder

    def outdated_downloads(self) -> list[str]:
        """Return the downloads of versions without an alias, as `name/folder`. They can be fetched again."""
        outdated: list[str] = []
        for model, downloads in self._downloads.by_model().items():
            with self.connection.asking(f"look for the aliases of {model}") as client:
                numbers = set((find_aliases(client, model) or {}).values())
                aliased = {Version.of(client.get_model_version(model, number)).download_name for number in numbers}
            outdated += [name for name in downloads if name not in aliased]
        return outdated

    def remove_download(self, name: str) -> bool:
        """Remove the download `name`; return False if it is missing."""
        return self._downloads.remove(name)

    def _downloaded(self, version: Version) -> Path:
        """Return the folder of a version's model. If the version lacks files, the folder is missing."""
        name = version.download_name
        if not self._downloads.has(name) and not self.has_files(version):
            return self.downloads / name
        return self._downloads.get(name, lambda into: self.fetch(version, MODEL_FOLDER, into))

    def check_registered(self, name: str, alias: str | None = None) -> dict[str, str]:
        """Return the aliases of the model `name`, with their versions.

        Raise UnknownModel if it is missing, RegistryError if it lacks `alias`. Both list the known names.
        """
        with self.connection.reading(f"look for {name}") as records:
            aliases = records.aliases(name)
        address = shown(self.uri)
        if aliases is None:
            with self.connection.asking(f"look for {name}") as client:
                known = sorted(model.name for model in client.search_registered_models())
            raise UnknownModel(
                f"no model {name} is registered in {address} (registered: {', '.join(known) or 'none'}); name one of these, "
                "or first run the recipe that releases it"
            )
        if alias is not None and alias not in aliases:
            raise RegistryError(
                f"no version of {name} has the alias {alias} in {address} (aliases: {', '.join(aliases) or 'none'}); name one "
                "of these, or a version by its number",
                "unknown-alias",
            )
        return aliases


def _rolled_back_tag(weights: str) -> str:
    """Return the registered model's tag for a rolled-back policy. Tags of a version are deleted with it."""
    return f"{ROLLED_BACK_TAG}.{weights}"
