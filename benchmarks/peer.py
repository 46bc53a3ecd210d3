"""The peer's side: TRL's DPOTrainer on the same pairs, weights and order, `python -m benchmarks.peer FOLDER`.

Reference log-probs are precomputed, as TRL advises; its own shuffling is off. One JSON object on the last line, in the
form of measured.py, for the reference pass and for the training, with the metrics of each step. `--micro 1` is the setting
of a careful user with little memory: one pair a forward, the rest of the batch by accumulation.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.setting import BATCH, BETA, CLIP, MAX_LENGTH, RATE, cpu_seconds, peak_mb

SERIES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "grad_norm",
)


class Timed(DPOTrainer):
    """TRL's trainer, with a record of the cost of its reference pass."""

    def _precompute_ref_logps(self, *given: Any, **named: Any) -> Dataset:
        started = cpu_seconds()
        made = super()._precompute_ref_logps(*given, **named)
        self.reference = {"cpu_seconds": cpu_seconds() - started, "peak_mb": peak_mb()}
        return made


def configuration(output: str, micro: int) -> DPOConfig:
    return DPOConfig(
        output_dir=output,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=BATCH // micro,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=micro,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=CLIP,
        beta=BETA,
        max_length=MAX_LENGTH,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def measure(folder: Path, micro: int) -> dict[str, Any]:
    """Train on `order.json` from the model in `base`, both made by workload.py."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        # A file in a folder of its own: TRL caches beside it, and the next run must not find that.
        rows = Path(output) / "rows.json"
        rows.write_text((folder / "order.json").read_text(encoding="utf-8"), encoding="utf-8")
        data = Dataset.from_json(str(rows), cache_dir=output)
        trainer = Timed(model, args=configuration(output, micro), train_dataset=data, processing_class=tokenizer)
        started = cpu_seconds()
        trainer.train()
    steps = [{name: log[name] for name in SERIES} for log in trainer.state.log_history if "rewards/chosen" in log]
    trained = {"cpu_seconds": cpu_seconds() - started, "peak_mb": peak_mb()}
    return {"reference": trainer.reference, "policy": trained, "steps": steps}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--micro", type=int, default=BATCH)
    arguments = parser.parse_args()
    sys.stdout.write(json.dumps(measure(arguments.folder, arguments.micro)) + "\n")
