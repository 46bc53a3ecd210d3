"""Muon: its parameters, and its updates compared with torch's Muon and with its author's algorithm in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, CohereConfig, PreTrainedModel

from tests.training.runs import on_two_ranks
from training.contract.config.optimizer import AdamW, Muon
from training.distributed import Group
from training.optim.distributed_muon import MatrixAssignment
from training.optim.optimizer import Optimizers, build_optimizer, hidden_matrices, norm_weights, set_learning_rate
from training.parallel.matrix_ownership import ReplicatedAssignment, ShardedAssignment


def assert_split(model: PreTrainedModel, matrices: set[str]) -> None:
    """Assert that Muon has exactly `matrices`, and AdamW each other parameter once."""
    parameters = dict(model.named_parameters())
    groups = build_optimizer(Muon(type="muon"), parameters, hidden_matrices(model)).param_groups
    muon = [name for group in groups if "momentum" in group for name in group["param_names"]]
    adamw = [name for group in groups if "betas" in group for name in group["param_names"]]
    assert set(muon) == matrices
    assert sorted(muon + adamw) == sorted(parameters)


LLAMA_MATRICES = {
    f"model.layers.0.{part}.weight"
    for part in [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
}


def test_norms_with_a_row_per_head_are_left_to_adamw_without_decay():
    shape = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = CohereConfig(vocab_size=16, intermediate_size=8, use_qk_norm=True, pad_token_id=0, **shape)
    model = AutoModelForCausalLM.from_config(config)
    norms = {f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"}
    parameters = dict(model.named_parameters())
    assert all(parameters[name].ndim == 2 for name in norms)
    assert_split(model, LLAMA_MATRICES)
    groups = build_optimizer(AdamW(), parameters, {}, norm_weights(model)).param_groups
    assert norms <= {name for group in groups if not group["weight_decay"] for name in group["param_names"]}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_matrices_of_llamas_layers(tied: bool):
    model = build("llama", tie_word_embeddings=tied)
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    assert_split(model, LLAMA_MATRICES)


def test_muon_excludes_positions_and_the_tied_head_of_gpt2():
    """Its projections are transposed matrices (Conv1D). `wte` is also the head; `wpe` are positions."""
    blocks = {f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert_split(build("gpt2", n_embd=8, n_layer=1, n_head=2), blocks)


def test_muon_excludes_fused_experts():
    """Fused experts are tensors of three dimensions; router and shared expert are matrices."""
    model = build(
        "qwen2_moe", num_experts=3, num_experts_per_tok=1, moe_intermediate_size=4, shared_expert_intermediate_size=4
    )
    assert any(p.ndim == 3 for p in model.parameters())
    mlp = {f"model.layers.0.mlp.{p}.weight" for p in ("gate", "shared_expert_gate")}
    shared = {f"model.layers.0.mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")}
    attention = {name for name in LLAMA_MATRICES if "self_attn" in name}
    assert_split(model, mlp | shared | attention)


def test_muon_excludes_stacked_biases_of_experts():
    """Each row of such a matrix is the bias of one expert."""
    model = build("gpt_oss", num_local_experts=3, num_experts_per_tok=1, head_dim=4, layer_types=["full_attention"])
    biases = {n for n, p in model.named_parameters() if n.endswith("bias") and p.ndim == 2}
    assert biases == {f"model.layers.0.mlp.experts.{part}_proj_bias" for part in ("gate_up", "down")}
    attention = {name for name in LLAMA_MATRICES if "self_attn" in name}
    assert_split(model, attention | {"model.layers.0.mlp.router.weight"})


def test_muon_takes_the_factors_of_an_adapter():
    """Except the factors of an adapter on the head."""
    model = build("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = build_optimizer(Muon(type="muon"), trained, hidden_matrices(model)).param_groups
    muon = {name for group in groups if "momentum" in group for name in group["param_names"]}
    assert muon == {f"model.layers.0.self_attn.q_proj.lora_{factor}.default.weight" for factor in "AB"}
    assert {name for name in trained if "lm_head" in name} == set(trained) - muon


def build(kind: str, **changes: Any) -> PreTrainedModel:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | heads | changes)))


MUON = Muon(
    type="muon",
    learning_rate=0.02,
    weight_decay=0.1,
    momentum=0.9,
    adamw=AdamW(learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.2),
)
SHAPES = {"wide.weight": (6, 20), "tall.weight": (24, 8), "embed.weight": (5, 4), "norm.weight": (7,)}
MATRICES = ("wide.weight", "tall.weight")
FACTORS = [1.0, 0.5, 0.9, 0.1, 1.0, 0.8, 0.6, 0.4, 0.2, 0.3]


def random_parameters() -> dict[str, Parameter]:
    random = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=random)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def take(optimizer: Optimizers, parameters: dict[str, Parameter], steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        set_learning_rate(optimizer, FACTORS[step])
        optimizer.step()


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize(("adjust_lr", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_muon_and_adamw_equal_torchs_optimizers(steps: int, adjust_lr: str, nesterov: bool):
    settings = MUON.model_copy(update={"adjust_lr": adjust_lr, "nesterov": nesterov, "ns_steps": 4})
    found, expected = random_parameters(), random_parameters()
    take(build_optimizer(settings, found, MATRICES), found, range(steps))
    muon = torch.optim.Muon(
        [expected[n] for n in MATRICES], 0.02, 0.1, 0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust_lr
    )
    groups = [{"params": [expected["embed.weight"]], "weight_decay": 0.2}, {"params": [expected["norm.weight"]]}]
    adamw = torch.optim.AdamW(groups, 0.01, (0.8, 0.9), weight_decay=0.0, fused=True)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            expected[name].grad = gradient
        muon.param_groups[0]["lr"] = 0.02 * FACTORS[step]
        for group in adamw.param_groups:
            group["lr"] = 0.01 * FACTORS[step]
        muon.step()
        adamw.step()
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize(("adjust_lr", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_muon_equals_its_authors_algorithm(adjust_lr: str, nesterov: bool):
    """One step in float64. torch iterates in bfloat16: this changes the update by a few percent of its norm."""
    settings = MUON.model_copy(update={"adjust_lr": adjust_lr, "nesterov": nesterov})
    parameters = random_parameters()
    before = {name: parameters[name].detach().double() for name in MATRICES}
    take(build_optimizer(settings, parameters, MATRICES), parameters, range(1))
    for name in MATRICES:
        gradient = gradients(0)[name].double()
        momentum = (1 - 0.9) * gradient
        direction = _newton_schulz((1 - 0.9) * gradient + 0.9 * momentum if nesterov else momentum)
        rows, columns = gradient.shape
        scale = math.sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, columns))
        expected = 0.02 * scale * direction + 0.02 * 0.1 * before[name]
        found = before[name] - parameters[name].detach().double()
        assert (found - expected).norm() < 0.06 * expected.norm()


def _newton_schulz(matrix: Tensor) -> Tensor:
    """Run five iterations of Jordan's quintic on the matrix or its transpose, the one with fewer rows."""
    if len(matrix) > matrix.shape[1]:
        return _newton_schulz(matrix.T).T
    matrix = matrix / matrix.norm()
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix - 4.7750 * square @ matrix + 2.0315 * square @ square @ matrix
    return matrix


def test_muon_restored_from_its_state_gives_the_same_bits():
    """Three steps, a restore of both optimizers, and three more steps equal six steps."""
    straight, first, second = (random_parameters() for _ in range(3))
    optimizers = [build_optimizer(MUON, parameters, MATRICES) for parameters in (straight, first, second)]
    take(optimizers[0], straight, range(6))
    take(optimizers[1], first, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizers[1].tensors().items()}
    moments = {
        f"{state}/{name}" for state in ("step", "exp_avg", "exp_avg_sq") for name in SHAPES.keys() - set(MATRICES)
    }
    assert set(saved) == moments | {f"momentum_buffer/{name}" for name in MATRICES}
    optimizers[2].restore(saved.items())
    for name, parameter in second.items():
        parameter.data.copy_(first[name])
    take(optimizers[2], second, range(3, 6))
    assert all(torch.equal(straight[name], second[name]) for name in SHAPES)


MANY = {f"{name}.{number}": shape for number, shape in enumerate([(6, 20), (24, 8), (3, 5)]) for name in ("a", "b")}
ODD = {**MANY, "alone": (9, 4), "in one row": (1, 8)}


def halves(name: str) -> list[int]:
    """Return the number of rows of a tensor of `ODD` on each of two ranks."""
    rows = ODD[name][0]
    return [-(-rows // 2), rows // 2]


def seeded(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=random) for name, shape in ODD.items()}


def run_steps(cut: Any, turns: MatrixAssignment | None) -> tuple[dict[str, Any], int]:
    """Run three steps on the rows that `cut` takes from each matrix. Return the rows, and the flops of matrix products."""
    parameters = {name: Parameter(cut(name, tensor)) for name, tensor in seeded(9).items()}
    optimizer = build_optimizer(MUON, parameters, ODD, turns=turns)
    with FlopCounterMode(display=False) as operations:
        for step in range(3):
            for name, gradient in seeded(step).items():
                parameters[name].grad = cut(name, gradient)
            optimizer.step()
    return {name: parameter.tolist() for name, parameter in parameters.items()}, operations.get_total_flops()


@pytest.mark.parametrize("held", ["shards", "copies"])
def test_two_ranks_share_the_matrices_and_equal_one_process(tmp_path: Path, held: str):
    """Eight matrices, six of them in pairs of equal shape. Together the ranks do the work of one process, each about half of
    it. An update is rounded once more than in torch, which may change a bit."""

    def work(group: Group) -> Any:
        if held == "copies":
            return run_steps(lambda _, tensor: tensor, ReplicatedAssignment(group))
        turns = ShardedAssignment(dist.group.WORLD, halves)
        return run_steps(lambda name, tensor: tensor.split(halves(name))[group.rank].clone(), turns)

    (first, flops_first), (second, flops_second) = on_two_ranks(tmp_path, work)
    alone, flops = run_steps(lambda _, tensor: tensor, None)
    assert flops_first + flops_second == flops and min(flops_first, flops_second) > 0.4 * flops
    if held == "copies":
        assert first == second
    found = first if held == "copies" else {name: first[name] + second[name] for name in alone}
    for name, tensor in alone.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(tensor), rtol=1e-6, atol=1e-7)
