"""Tuning an adapter: compared with a loop of peft and torch, killed and resumed, and exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import factories
from tests.training.runs import SIDES, losses, naive_losses, published, settings, timeless, told, tune
from training.contract.config.training import Adapter
from training.contract.identity.model_identity import adapter_fingerprint
from training.contract.protocol.job import Input, Job
from training.contract.protocol.settings import NoSettings
from training.contract.store.artifact import JobResult
from training.distributed import ALONE
from training.jobs import merge_adapter
from training.model.adapter import add_adapter
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.replicated import Replicated

CPU = torch.device("cpu")
SEED = 0
RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


def with_adapter(**changes: Any) -> dict[str, Any]:
    adapter = {"rank": RANK, "alpha": ALPHA, "target_modules": TARGETS, **changes.pop("adapter", {})}
    return settings(adapter=adapter, **changes)


def peft_model(inputs: Any) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(inputs.model)
    torch.manual_seed(SEED)
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("steps", [1, 12])
def test_adapter_and_losses_match_a_loop_of_peft_and_torch(tiny_inputs, steps: int):
    optimizer = {"learning_rate": 3e-3, "weight_decay": 0.1}
    job = tiny_inputs.job("policy", with_adapter(max_steps=steps, optimizer=optimizer, adapter={"export": "adapter"}))
    tune(job)
    model = peft_model(tiny_inputs)
    expected = list(naive_losses(tiny_inputs, steps, model))
    assert losses(job) == pytest.approx(expected, abs=1e-5)
    assert expected[0] == pytest.approx(math.log(2), abs=1e-6)
    actual = tensors(job.staging)
    oracle = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert actual.keys() == oracle.keys()
    worst = max(float((actual[name] - oracle[name].detach()).abs().max()) for name in actual)
    assert worst < (1e-5 if steps == 1 else 1e-3)


def test_checkpoint_of_adapter_run_holds_only_the_adapter(tiny_inputs):
    job = tiny_inputs.job("policy", with_adapter(max_steps=2), checkpoint_every=2)
    tune(job)
    [file] = job.checkpoints.rglob("*.safetensors")
    saved: dict[str, set[str]] = {state: set() for state in ("weights", "exp_avg", "exp_avg_sq", "step")}
    for piece in load_file(file):
        state, name = piece.rpartition("@")[0].split("/", 1)
        saved[state].add(name)
    assert len(saved["weights"]) == 2 * (2 * 3 + 1), "A and B of three layers in each of two blocks, and the head"
    assert all(".lora_" in name for name in saved["weights"])
    assert all(names == saved["weights"] for names in saved.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_master_weights_of_adapter_are_float32(tiny_inputs, precision: Any):
    params = Replicated(
        TrainModelSpec(tiny_inputs.model, precision, Adapter(rank=RANK), SEED), Placement(ALONE, copies=1)
    )
    drawn = AutoModelForCausalLM.from_pretrained(tiny_inputs.model)
    add_adapter(drawn, Adapter(rank=RANK), SEED)
    assert all(torch.equal(p, drawn.get_parameter(n)) for n, p in params.parameters.items()), "as drawn, not rounded"
    assert {p.dtype for p in params.parameters.values()} == {torch.float32}
    assert len(params.gradient_N) == sum(p.numel() for p in params.parameters.values())
    assert {str(p.dtype) for p in params.model.parameters()} == {f"torch.{precision}"}
    with torch.no_grad():
        for master in params.parameters.values():
            master.add_(2**-12)
    params.update_model()
    assert all(
        torch.equal(params.model.get_parameter(n), p.to(params.model.dtype)) for n, p in params.parameters.items()
    )


def test_adapter_in_bfloat16_stays_near_float32(tiny_inputs):
    exact, rounded = (tiny_inputs.job("policy", with_adapter(precision=p), p) for p in ("float32", "bfloat16"))
    tune(exact)
    tune(rounded)
    assert losses(rounded) == pytest.approx(losses(exact), abs=0.05)
    assert load_file(rounded.staging / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_adapter_with_dropout_repeats_and_evaluates_without(tiny_inputs):
    recipe = with_adapter(adapter={"dropout": 0.5})
    first, again = (tiny_inputs.job("policy", recipe, name) for name in ("first", "again"))
    assert tune(first).fingerprint == tune(again).fingerprint
    plain = tiny_inputs.job("policy", with_adapter(), "plain")
    tune(plain)
    assert losses(first)[0] == pytest.approx(math.log(2), abs=1e-5), "B is zero, so dropout before it has no effect"
    assert losses(first)[1:] != pytest.approx(losses(plain)[1:], abs=1e-4)
    assert told(first, "eval")[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.fixture
def exported(tiny_inputs) -> dict[str, tuple[Job, JobResult]]:
    """Run one recipe with both exports."""
    jobs = {
        export: tiny_inputs.job("policy", with_adapter(adapter={"export": export}), export)
        for export in ("merged", "adapter")
    }
    return {export: (job, tune(job)) for export, job in jobs.items()}


def test_both_exports_give_the_values_of_the_last_eval_event(tiny_inputs, exported):
    """The oracle is plain transformers and peft on the written files."""
    merged, alone = (exported[export][0] for export in ("merged", "adapter"))
    assert losses(merged) == losses(alone)
    models = [
        AutoModelForCausalLM.from_pretrained(merged.staging),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_inputs.model), alone.staging),
    ]
    for model in models:
        with torch.no_grad():
            logps = [
                float(tiny_inputs.plain_logprob(model.eval(), e, SIDES[0])) for e in tiny_inputs.split("validation")
            ]
        assert sum(logps) / len(logps) == pytest.approx(told(alone, "eval")[-1]["eval/logps/chosen"], abs=1e-4)


def test_exported_adapter_merged_later_has_the_bits_of_the_merged_export(exported):
    (merged, of_merged), (alone, of_alone) = exported["merged"], exported["adapter"]
    assert {p.name for p in alone.staging.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert (alone.staging / "tokenizer_config.json").is_file() and not (alone.staging / "config.json").exists()
    reference = alone.inputs["reference_model"]
    assert of_alone.fingerprint == adapter_fingerprint(alone.staging, reference.fingerprint)
    policy = Input(kind="policy", fingerprint=of_alone.fingerprint, folder=alone.staging)
    inputs = {"policy": policy, "reference_model": reference}
    job = alone.model_copy(
        update={"kind": "merge", "artifact": "merged_policy", "inputs": inputs, "settings": NoSettings()}
    )
    job.staging.mkdir(parents=True)
    assert merge_adapter.run(factories.context(job)).fingerprint == of_merged.fingerprint
    later, at_once = (load_file(j.staging / "model.safetensors") for j in (job, merged))
    assert all(torch.equal(later[name], at_once[name]) for name in later.keys() | at_once.keys())


@pytest.mark.slow
def test_adapter_killed_and_resumed_has_the_same_bits(tiny_inputs, forker):
    """SIGKILL comes after the first checkpoint. Adapter and events then equal those of an undisturbed run."""
    recipe = with_adapter(max_steps=12, adapter={"dropout": 0.2, "export": "adapter"})
    compute = {"checkpoint_every": 3, "evaluate_every": 5}
    calm, killed = (tiny_inputs.job("policy", recipe, name, **compute) for name in ("calm", "killed"))
    assert forker.run(killed, saved=8) == [-9] and len(losses(killed)) == 8
    made = [published(job, forker.run(job)) for job in (calm, killed)]
    assert any(e["text"].startswith("resumed ") for e in told(killed, "note"))
    assert timeless(told(killed, "step", "eval")) == timeless(told(calm, "step", "eval"))
    files = [(policy.folder / "adapter_model.safetensors").read_bytes() for policy in made]
    assert files[0] == files[1]
