"""Models with activation checkpointing (equal bits) and compiling (equal but for rounding), compared with plain models."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import factories
from training.contract.config.recipe import Compute
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter, read_events
from training.model.attention.shared_prefix import TokenSequence
from training.model.logprobs.logprob_tiles import KEPT_BYTES
from training.model.logprobs.response_logprobs import response_logprobs
from training.model.training_setup import check_trainable, prepare_for_training

VOCABULARY = 61
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 256}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
WINDOWS = LLAMA | {"sliding_window": 5}
GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.1}
SILENT = EventWriter(None)


def build(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, initializer_range=0.2, **changes
    )
    return AutoModelForCausalLM.from_config(config).eval()


def pair(length: int) -> list[TokenSequence]:
    """Return two responses of `length` and `length + 3` tokens to a prompt of `length` tokens."""
    random = torch.Generator().manual_seed(length)
    prompt = torch.randint(VOCABULARY, (length,), generator=random)
    runs = [torch.cat([prompt, torch.randint(VOCABULARY, (n,), generator=random)]) for n in (length, length + 3)]
    return [TokenSequence(ids, torch.arange(len(ids)) >= length) for ids in runs]


def learn(model: PreTrainedModel, length: int = 9) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of a pair and the gradients of their difference, with a fixed seed."""
    torch.manual_seed(length)
    model.zero_grad()
    found = response_logprobs(model, pair(length), [2])
    (found.sums_S[0] - found.sums_S[1]).backward()
    return found.tokens_N.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


MODELS = [
    pytest.param("llama", LLAMA, False, id="llama"),
    pytest.param("llama", LLAMA | {"attention_dropout": 0.3}, True, id="llama, attention dropout, a row each"),
    pytest.param("mistral", WINDOWS | {"attention_dropout": 0.0}, False, id="mistral, window"),
    pytest.param("gpt2", SIZES | GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, False, id="gpt2"),
    pytest.param("gpt2", SIZES | GPT2 | {"resid_pdrop": 0.3}, True, id="gpt2, dropout"),
    pytest.param("gpt2", SIZES | GPT2 | {"resid_pdrop": 0.3}, False, id="gpt2, dropout in the config alone"),
    pytest.param("gemma2", LLAMA | {"head_dim": 8, "attention_dropout": 0.0}, False, id="gemma2, a row each"),
]


@pytest.mark.parametrize(("kind", "changes", "training"), MODELS)
def test_activation_checkpointing_changes_no_bit(kind: str, changes: dict[str, object], training: bool):
    plain, checkpointed = build(kind, **changes), build(kind, **changes)
    prepare_for_training(checkpointed, Compute(activation_checkpointing=True), SILENT, training)
    (tokens_N, gradients), (found_N, found) = (learn(model.train(training)) for model in (plain, checkpointed))
    assert torch.equal(found_N, tokens_N)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    if training:
        assert not torch.equal(learn(plain.eval())[0], tokens_N), "dropout is drawn"


def saved_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the tensors saved for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = response_logprobs(model, pair(60), [2])
    assert logprobs.tokens_N.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def test_activation_checkpointing_keeps_only_inputs_of_layers():
    """With 32 hidden and 48 intermediate units a plain layer keeps over 300 numbers per token, a checkpointed one 32."""
    plain, checkpointed = (build("llama", **LLAMA | {"num_hidden_layers": 12}) for _ in range(2))
    prepare_for_training(checkpointed, Compute(activation_checkpointing=True), SILENT, own_dropout=False)
    assert saved_bytes(checkpointed) < saved_bytes(plain) / 5


def test_a_prepared_model_is_saved_like_a_plain_one(tmp_path: Path):
    plain, prepared = build("llama", **LLAMA), build("llama", **LLAMA)
    prepare_for_training(prepared, Compute(activation_checkpointing=True), SILENT, own_dropout=False)
    for name, model in {"plain": plain, "prepared": prepared}.items():
        model.save_pretrained(tmp_path / name)
    files = {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "prepared").iterdir()} == files


def test_a_model_without_layers_to_prepare_raises():
    model = build("mamba", num_hidden_layers=1, hidden_size=8, state_size=4, time_step_rank=2)
    for module in model.modules():
        if type(module).__name__ == "MambaModel":
            module.layers = torch.nn.ModuleList([torch.nn.Identity()])
    with pytest.raises(ModelError, match=r"MambaForCausalLM .* \[no-layers\]"):
        prepare_for_training(model, Compute(activation_checkpointing=True), SILENT, own_dropout=False)
    check_trainable(model, factories.recipe(compute={"activation_checkpointing": False, "compile": False}))
    for setting in ("activation_checkpointing", "compile"):  # jobs before training, which may take hours, raise too
        with pytest.raises(ModelError, match=r"MambaForCausalLM .* \[no-layers\]"):
            check_trainable(model, factories.recipe(compute={setting: True}))


def test_a_float8_head_on_a_cpu_raises():
    with pytest.raises(ModelError, match=r" 8\.9 .* device cpu.* \[no-float8\]"):
        prepare_for_training(build("llama", **LLAMA), Compute(), SILENT, own_dropout=False, float8_head=True)


def count(body: torch.nn.Module, *_: object) -> None:
    body.runs.add_(1)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])])
def test_a_compiled_model_differs_by_rounding_only_and_compiles_once(tmp_path: Path, monkeypatch, device: str):
    """With dropout and activation checkpointing. The warm-up changes neither generators, buffers nor gradients."""
    random_state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    plain = build("gpt2", **SIZES | GPT2 | {"resid_pdrop": 0.3}).to(device).train()
    compiled = copy.deepcopy(plain)
    compiled.base_model.register_buffer("runs", torch.zeros(1, device=device))
    counting = compiled.base_model.register_forward_hook(count)
    with_gradient = compiled.lm_head.weight
    with_gradient.grad = torch.zeros_like(with_gradient)
    state = random_state()
    events = EventWriter(tmp_path / "events.jsonl")
    prepare_for_training(compiled, Compute(compile=True, activation_checkpointing=True), events, own_dropout=True)
    assert [event["phase"] for event in read_events(tmp_path / "events.jsonl")] == ["compiling"]
    assert torch.equal(random_state(), state) and compiled.training
    assert all(parameter.grad is None for parameter in compiled.parameters() if parameter is not with_gradient)
    assert with_gradient.grad is not None and not with_gradient.grad.any()
    assert compiled.base_model.runs == 0
    counting.remove()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for length in (4, 9, 14, 23, 31, 40, 57, 64, 71, 80):
        monkeypatch.setitem(KEPT_BYTES, device, 0 if length > 50 else 1 << 20)
        (tokens_N, gradients), (found_N, found) = learn(plain, length), learn(compiled, length)
        torch.testing.assert_close(found_N, tokens_N, atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() < 1e-5 * gradient.norm().clamp(min=1e-3), name
    with torch.no_grad():
        scored = [response_logprobs(model.eval(), pair(33), [2]).tokens_N for model in (compiled, plain)]
    torch.testing.assert_close(*scored, atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == graphs, "rows of other lengths use the same graph"
