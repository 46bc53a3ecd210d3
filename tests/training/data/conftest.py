"""Run the three data jobs in this process, each in its own store."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.training import job_runner as general
from training.contract.files.arrow_rows import without_nulls
from training.contract.files.local_files import DataFile
from training.contract.protocol.job import Job, JobKind
from training.contract.store.artifact import Artifact
from training.data.tokenization.pair_dataset import Pairs

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}"
    "{%- if m['role'] == 'assistant' %}{%- generation %}{{- m['content'] + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- m['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class Done:
    """The result of a job: its artifact, its events and its tables."""

    def __init__(self, made: Artifact[Any], job: Job):
        self.made, self.folder, self.events = made, made.folder, job.events

    @property
    def details(self) -> Any:
        return self.made.details

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a file, without null fields."""
        return [without_nulls(row) for row in pq.read_table(self.folder / name).to_pylist()]

    @property
    def pairs(self) -> Pairs:
        return Pairs.open(self.folder)


class JobRunner:
    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0

    def _run(self, kind: JobKind, artifact: str, settings: dict[str, Any], **options: dict[str, Any]) -> Done:
        self.count += 1
        job_runner = general.JobRunner(self.folder / str(self.count))
        inputs = job_runner.source(options["counted"]) if kind == "preferences" else options.get("inputs", {})
        job = job_runner.job(kind, artifact, inputs, settings, options.get("locations"))
        return Done(job_runner.run(job), job)

    def preferences(
        self,
        *sources: dict[str, Any],
        fraction: float = 0.1,
        duplicates: str = "keep",
        listed: list[list[DataFile]] | None = None,
        counted: dict[str, int | None] | None = None,
    ) -> Done:
        """Run the job on `sources`, or on the files `listed` for each source. `counted` has the number of rows by file."""
        settings = {
            "formats": [source.get("format", "auto") for source in sources],
            "validation_fraction": fraction,
            "duplicates": duplicates,
            "held_out": [source.get("held_out", False) for source in sources],
            "columns": [source.get("columns", {}) for source in sources],
            "roles": [source.get("roles", {}) for source in sources],
            "fractions": [source.get("fraction", 1.0) for source in sources],
            "names": [source.get("name") for source in sources],
        }
        return self._run(
            "preferences",
            "raw_preferences",
            settings,
            locations=general.locations_of(list(sources), listed),
            counted=counted or {},
        )

    def rows(self, rows: list[Any], format: str = "auto", fraction: float = 0.1) -> Done:
        """Run `preferences` on rows written as JSON lines. A text is written as it is."""
        return self.preferences({**self.source(rows), "format": format}, fraction=fraction)

    def source(self, rows: list[Any]) -> dict[str, Any]:
        """Return a source of rows written as JSON lines. A text is written as it is."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"rows{self.count}.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return {"path": str(path)}

    def tokenizer(self, tokenizer: Path, chat_template: Path | None = None, /, **settings: Any) -> Done:
        """Run the job on these files, with their current hashes unless `settings` has others."""
        rules = {"template_kwargs": {}, "train_on": "last_response", "max_length": 1024, "over_length": "drop"}
        defaults = {**rules, **general.hashes_of(tokenizer, chat_template)}
        return self._run(
            "tokenizer",
            "tokenization_spec",
            {**defaults, **settings},
            locations={
                "tokenizer": str(tokenizer),
                "chat_template": str(chat_template) if chat_template else None,
                "named": general.NAMED,
            },
        )

    def pairs(self, data: Done, spec: Done) -> Done:
        inputs = {"raw_preferences": data.folder, "tokenization_spec": spec.folder}
        return self._run("pairs", "tokenized_pairs", {}, inputs=inputs, locations={"named": general.NAMED})


@pytest.fixture
def job_runner(tmp_path: Path) -> JobRunner:
    return JobRunner(tmp_path)


@pytest.fixture(scope="session")
def tiny_chat(shared_data: Path) -> Path:
    return shared_data / "models" / "tiny-chat"


@pytest.fixture
def chatml(tmp_path: Path) -> Path:
    path = tmp_path / "chatml.jinja"
    path.write_text(CHATML, encoding="utf-8")
    return path
