"""The peer's side of preparation.py: `python -m benchmarks.preparation_peer TOKENIZER ROWS MAX_LENGTH`.

It loads the file and prepares it as TRL's DPOTrainer does at its start. One JSON object on the last line.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.setting import cpu_seconds, peak_mb


class Preparation(DPOTrainer):
    """TRL's trainer before it has a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer


def measure(tokenizer: str, rows: str, max_length: str) -> dict[str, Any]:
    disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(output_dir=folder, use_cpu=True, bf16=False, max_length=int(max_length), report_to=[])
        started = cpu_seconds()
        data = Dataset.from_json(rows, cache_dir=str(Path(folder) / "cache"))
        prepared = Preparation(loaded)._prepare_dataset(data, loaded, arguments, "train")
        return {"cpu_seconds": cpu_seconds() - started, "peak_mb": peak_mb(), "pairs": len(prepared)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*sys.argv[1:])) + "\n")
