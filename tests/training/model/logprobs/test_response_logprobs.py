"""`response_logprobs`, compared with plain transformers: float64, one sequence at a time, log-softmax of all logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from tests import factories
from training.contract.errors import ModelError
from training.model.attention.shared_prefix import TokenSequence
from training.model.load import load_model
from training.model.logprobs import batch_scoring
from training.model.logprobs.response_logprobs import LogProbs, collate, response_logprobs

CPU = torch.device("cpu")


def random_sequences(vocabulary: int, count: int, longest: int, seed: int = 0) -> list[TokenSequence]:
    """Return sequences of many lengths, with masks of a suffix, of separate turns, of one token, and empty masks."""
    random = np.random.default_rng(seed)
    sequences = []
    for n in range(count):
        length = int(random.integers(3, longest + 1))
        ids = torch.from_numpy(random.integers(0, vocabulary, length))
        suffix = torch.arange(length) >= int(random.integers(1, length))
        turns = torch.from_numpy(random.random(length) < 0.5) & (torch.arange(length) > 0)
        masks = [suffix, turns, torch.arange(length) == length - 1, torch.zeros(length, dtype=torch.bool)]
        sequences.append(TokenSequence(ids, masks[n % 4]))
    return sequences


def score(model: PreTrainedModel, sequences: list[TokenSequence]) -> LogProbs:
    return batch_scoring.score(model, collate(model, sequences))


def plain(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Return the log-prob of every masked token except the first token of the sequence."""
    logprobs_TV = model(input_ids=sequence.ids_T[None]).logits[0, :-1].log_softmax(-1)
    targets_T = sequence.ids_T[1:]
    return logprobs_TV[torch.arange(len(targets_T)), targets_T][sequence.mask_T[1:]]


def per_sequence(logprobs: LogProbs) -> list[np.ndarray]:
    return np.split(np.asarray(logprobs.tokens_N), np.cumsum(np.asarray(logprobs.counts_S))[:-1])


def with_rope(kind: str, **fields: object) -> PreTrainedModel:
    """Return a float64 model trained for 16 positions; heads of size 8 have four frequencies."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, **fields}
    model = factories.llama(num_hidden_layers=1, max_position_embeddings=16, rope_parameters=rope).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


@pytest.mark.parametrize("length", [15, 16, 17, 18, 40])
def test_longrope_rows_keep_the_full_length_of_their_sequence(length: int):
    """The last token predicts nothing, but transformers runs it too: 17 tokens switch to the long factors."""
    model = with_rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(length))
    sequence = TokenSequence(ids, torch.arange(length) >= 6)
    torch.testing.assert_close(score(model, [sequence]).tokens_N.double(), plain(model, sequence), atol=1e-5, rtol=0)


def test_a_sequence_beyond_dynamic_positions_raises():
    """transformers rescales the positions for a long sequence. Later short sequences would have other log-probs."""
    model = with_rope("dynamic")
    ids = torch.randint(64, (17,), generator=torch.Generator().manual_seed(1))
    fits, too_long = (TokenSequence(ids[:n], torch.arange(n) >= 6) for n in (16, 17))
    torch.testing.assert_close(score(model, [fits]).tokens_N.double(), plain(model, fits), atol=1e-5, rtol=0)
    with pytest.raises(ModelError, match=r" 17 tokens, .* 16: .*`tokenization.max_length: 16` \[sequence-too-long\]"):
        collate(model, [fits, too_long])


@pytest.fixture(params=["stories260K", "tiny-chat"])
def folder(request, shared_data) -> Path:
    return shared_data / "models" / request.param


@pytest.mark.shared
def test_log_probs_of_tokens_equal_float64(folder):
    model = load_model(folder, "float32", CPU)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    sequences = random_sequences(model.config.vocab_size, 24, 200)
    with torch.no_grad():
        found, expected = score(model, sequences), [plain(exact, s).numpy() for s in sequences]
    assert found.counts_S.tolist() == [len(e) for e in expected]
    for tokens, total, exact_tokens in zip(per_sequence(found), found.sums_S, expected, strict=True):
        np.testing.assert_allclose(tokens, exact_tokens, atol=2e-5, rtol=0)
        assert total == pytest.approx(exact_tokens.sum(), abs=1e-3)


@pytest.mark.shared
def test_a_story_is_more_probable_than_its_shuffled_tokens(shared_data):
    """The model was trained on children's stories."""
    model = load_model(shared_data / "models" / "stories260K", "float32", CPU)
    with torch.no_grad():
        story = model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False)[0]
    shuffled = torch.cat([story[:1], story[1:][torch.randperm(len(story) - 1, generator=torch.manual_seed(0))]])
    mask = torch.arange(len(story)) > 0
    story_sum, shuffled_sum = score(model, [TokenSequence(story, mask), TokenSequence(shuffled, mask)]).sums_S
    assert story_sum > shuffled_sum / 4


def gpt2(seed: int = 0) -> PreTrainedModel:
    """Return a model with learned absolute positions: a shift in its row would change the results."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def test_other_sequences_of_a_batch_do_not_change_log_probs():
    model, sequences = gpt2().double(), random_sequences(61, 12, 40)
    together = per_sequence(score(model, sequences))
    backwards = per_sequence(score(model, sequences[::-1]))[::-1]
    alone = [score(model, [s]).tokens_N for s in sequences]
    for one, other, single in zip(together, backwards, alone, strict=True):
        np.testing.assert_allclose(one, single, atol=1e-5)
        np.testing.assert_allclose(other, single, atol=1e-5)


def test_gradients_of_sums_equal_plain_transformers():
    model, sequences = gpt2().double(), random_sequences(61, 8, 30)
    weights_S = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def gradients(sums: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        (sums() * weights_S).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    found = gradients(lambda: response_logprobs(model, sequences).sums_S)
    expected = gradients(lambda: torch.stack([plain(model, s).sum() for s in sequences]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_first_token_of_a_sequence_has_no_logprob():
    all_masked = TokenSequence(torch.tensor([5, 6, 7]), torch.ones(3, dtype=torch.bool))
    assert score(gpt2(), [all_masked]).counts_S.tolist() == [2]


def test_sequences_without_response_tokens_give_no_log_probs():
    unmasked = TokenSequence(torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.bool))
    scores = score(gpt2(), [unmasked, unmasked])
    assert scores.counts_S.tolist() == [0, 0] and scores.sums_S.tolist() == [0, 0] and len(scores.tokens_N) == 0


@pytest.mark.shared
def test_bfloat16_log_probs_are_within_two_percent_of_float64(shared_data):
    """Hidden states are rounded to bfloat16, about 1% of a token's log-prob here. The head does not round."""
    folder = shared_data / "models" / "tiny-chat"
    model = load_model(folder, "bfloat16", CPU)
    exact = load_model(folder, "bfloat16", CPU).double()
    sequences = random_sequences(model.config.vocab_size, 8, 120)
    with torch.no_grad():
        expected = np.concatenate([plain(exact, s).numpy() for s in sequences])
    found = score(model, sequences).tokens_N.numpy()
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_logprobs_sum_in_float64():
    """float32 cannot hold 2**24 + 1. Float32 sums of log-probs were off by 1e-4 nats, and rewards too."""
    tokens_N = torch.tensor([-(2.0**24), -1.0, -0.5], requires_grad=True)
    sums_S = LogProbs(tokens_N, torch.tensor([2, 0, 1])).sums_S
    assert sums_S.tolist() == [-(2.0**24) - 1, 0.0, -0.5]
    sums_S[0].backward()
    assert tokens_N.grad is not None and tokens_N.grad.tolist() == [1, 1, 0]
