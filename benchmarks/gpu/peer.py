"""TRL's side of the comparison on a GPU: `python -m benchmarks.gpu.peer FOLDER --size 1b`, started by `benchmarks.gpu`.

TRL 1.16 always computes log-probs from chunks of the head (`add_fused_lm_head`), and its `padding_free` is switched off in
this version. Weights are float32 and the passes autocast to bfloat16, as with `bf16=True`. `--liger` lets transformers replace
the layers by Liger's kernels, all but the head. Reference log-probs are precomputed, as TRL advises.
One JSON object on the last line: the time at the end of each step, its metrics, and the peak of memory.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.gpu.setting import SIZES, TEXTS, Size
from benchmarks.setting import BETA, CLIP, RATE, peak_mb


class Clock(TrainerCallback):
    """Record the time at the end of each step, when the device has finished it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *given: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())


def configuration(output: str, size: Size, arguments: argparse.Namespace) -> DPOConfig:
    on_gpu = arguments.device == "cuda"
    return DPOConfig(
        output_dir=output,
        per_device_train_batch_size=size.micro_pairs,
        gradient_accumulation_steps=size.batch // size.micro_pairs,
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=CLIP,
        beta=BETA,
        max_length=None,
        bf16=arguments.precision == "bfloat16",
        gradient_checkpointing=False,
        use_liger_kernel=arguments.liger,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    base, clock = arguments.folder / "base", Clock()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        data = Dataset.from_list(json.loads((arguments.folder / TEXTS).read_text(encoding="utf-8")))
        settings = configuration(output, SIZES[arguments.size], arguments)
        tokenizer = AutoTokenizer.from_pretrained(base)
        trainer = DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
        trainer.train()
    logs = [log for log in trainer.state.log_history if "rewards/margins" in log]
    steps = [
        {"time": at, "loss": log["loss"], "grad_norm": log["grad_norm"]}
        for at, log in zip(clock.times, logs, strict=True)
    ]
    peak = torch.cuda.max_memory_allocated() / 2**20 if arguments.device == "cuda" else peak_mb()
    return {"steps": steps, "peak_mb": peak}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--liger", action="store_true")
    sys.stdout.write(json.dumps(measure(parser.parse_args())) + "\n")
