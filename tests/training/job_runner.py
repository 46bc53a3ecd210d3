"""Run real jobs in this process, and publish their artifacts in one store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import factories
from tests.factories import ON_CPU
from training import main
from training.contract.config.recipe import Compute
from training.contract.files.local_files import DataFile, data_files
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.tokenizer_files import class_fields, tokenizer_files
from training.contract.protocol.artifacts import KINDS
from training.contract.protocol.details import SourceDetails
from training.contract.protocol.job import Job, JobKind
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store
from training.distributed import ALONE

# The places in a recipe that name them.
NAMED = {name: f"recipe.yaml:7: tokenization.{name}" for name in ("tokenizer", "chat_template")}


@dataclass(frozen=True)
class JobRunner:
    """Runs real jobs in this process, one after the other, and publishes their artifacts in its own store."""

    folder: Path
    compute: Compute = ON_CPU

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def job(
        self,
        kind: JobKind,
        artifact: str,
        inputs: dict[str, Artifact[Any] | Path],
        settings: dict[str, Any],
        locations: dict[str, Any] | None = None,
    ) -> Job:
        """Return a job on artifacts or folders. The fingerprint of a folder is made from its name."""
        job = factories.job(
            kind,
            self.folder,
            settings,
            inputs,
            self.compute,
            folder=f"jobs/{artifact}",
            artifact=artifact,
            locations=locations or {},
        )
        job.write()
        return job

    def source(self, rows: dict[str, int | None] | None = None) -> dict[str, Artifact[Any] | Path]:
        """Publish the input of a preferences job: a source with `rows` by file, by default not counted."""
        details = {"rows": rows or {"rows.jsonl": None}}
        how, store = (
            Derivation(kind="preference_source", code_version="1", inputs={}, settings=details),
            Store(self.store),
        )
        with store.staging() as staging:
            return {how.kind: store.publish(staging, how, JobResult(how.key, SourceDetails(bytes=1, **details)))}

    def read(self, rows: Path, validation_fraction: float) -> Artifact[Any]:
        """Run a preferences job on the file `rows`."""
        settings = {"formats": ["auto"], "held_out": [False], "duplicates": "keep"}
        settings |= {"validation_fraction": validation_fraction}
        where = locations_of([{"path": str(rows), "format": "auto"}])
        return self.run(self.job("preferences", "raw_preferences", self.source(), settings, where))

    def tokenize(self, raw: Artifact[Any], tokenizer: Path, rules: dict[str, Any]) -> Artifact[Any]:
        """Tokenize the pairs of `raw` with the tokenizer in the folder `tokenizer`."""
        where = {"tokenizer": str(tokenizer), "chat_template": None, "named": NAMED}
        settings = {**rules, **hashes_of(tokenizer)}
        spec = self.run(self.job("tokenizer", "tokenization_spec", {}, settings, where))
        inputs: dict[str, Artifact[Any] | Path] = {"raw_preferences": raw, "tokenization_spec": spec}
        return self.run(self.job("pairs", "tokenized_pairs", inputs, {}, {"named": NAMED}))

    @staticmethod
    def run(job: Job) -> Artifact[Any]:
        main.make(job, ALONE)
        made = Store(job.store).find(KINDS[job.artifact], job.derivation.key)
        assert made is not None
        return made


def locations_of(sources: list[dict[str, Any]], listed: list[list[DataFile]] | None = None) -> dict[str, Any]:
    """Return the locations of a preferences job: the files `listed` for each source, or by default its current files."""
    listed = listed or [data_files(source["path"]) if "path" in source else [] for source in sources]
    return {"sources": sources, "files": [[file.model_dump(mode="json") for file in files] for files in listed]}


def hashes_of(tokenizer: Path, chat_template: Path | None = None) -> dict[str, Any]:
    """Return the hashes in the settings of a tokenizer job, of the current files."""
    hashes = {name: hash_file(path) for name, path in tokenizer_files(tokenizer).items()}
    template = hash_file(chat_template) if chat_template and chat_template.is_file() else None
    return {"files": hashes, "chat_template": template, "config": class_fields(tokenizer)}
