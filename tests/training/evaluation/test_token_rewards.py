"""Rewards of single tokens, against plain transformers and the sums that the loss uses."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.training.runs import on_two_ranks
from tests.training.tiny_inputs import TinyInputs
from training.contract.config.loss import Loss
from training.contract.protocol.events import EventWriter
from training.contract.store.logprob_table import LogProbTable
from training.data.templates.tokenizer import load_tokenizer
from training.data.tokenization.pair_dataset import SIDES, Pairs
from training.distributed import ALONE
from training.evaluation.examples import examined_positions
from training.evaluation.token_rewards import ExaminedPairs, score_tokens, token_texts
from training.scoring.pairs import ScoredPairs, score_pairs

POSITIONS = [44, 3, 40, 17]


@pytest.fixture
def models(tiny_inputs: TinyInputs) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a policy, and the reference model it was moved from."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_inputs.model).eval() for _ in range(2))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
    return policy, reference


def plain_logprobs(model: LlamaForCausalLM, example: dict[str, Any], side: str) -> torch.Tensor:
    """Return the log-probs of the trained tokens, from one unpadded sequence and all logits."""
    ids, mask = torch.tensor(example[f"{side}_ids"]), torch.tensor(example[f"{side}_mask"])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask[1:]]


def examined(inputs: TinyInputs, models: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> ExaminedPairs:
    pairs = Pairs.open(inputs.pairs)
    return ExaminedPairs(pairs, POSITIONS, *(score_tokens(model, pairs, POSITIONS, ALONE) for model in models))


def test_score_tokens_equals_plain_transformers(tiny_inputs, models):
    pairs = Pairs.open(tiny_inputs.pairs)
    found = score_tokens(models[0], pairs, POSITIONS, ALONE)
    expected = [plain_logprobs(models[0], tiny_inputs.examples[n], side) for side in SIDES for n in POSITIONS]
    assert len(found) == len(expected) == 8
    for logprobs, plain in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(plain.numpy(), abs=1e-4)


def test_score_tokens_on_two_ranks_gives_every_rank_all_tokens(tiny_inputs, models, tmp_path):
    pairs = Pairs.open(tiny_inputs.pairs)
    both = on_two_ranks(
        tmp_path, lambda group: [row.tolist() for row in score_tokens(models[0], pairs, POSITIONS, group)]
    )
    assert both[0] == both[1] == [row.tolist() for row in score_tokens(models[0], pairs, POSITIONS, ALONE)]


def held_out(inputs: TinyInputs, policy: LlamaForCausalLM, loss: Loss) -> ScoredPairs:
    pairs, table = Pairs.open(inputs.pairs), LogProbTable.read(inputs.reference, len(inputs.examples))
    return score_pairs(policy, pairs, np.array(POSITIONS), table, loss, ALONE, EventWriter(None))


@pytest.mark.parametrize("loss", [{}, {"type": "ipo", "beta": 0.5}, {"divergence": {"type": "js"}}], ids=str)
def test_token_rewards_sum_to_the_rewards_of_the_pairs(tiny_inputs, models, loss):
    settings = Loss.model_validate(loss)
    columns = held_out(tiny_inputs, models[0], settings).columns()
    found = examined(tiny_inputs, models).rewards(settings, load_tokenizer(tiny_inputs.pairs / "tokenizer"), {})
    assert found.beta == settings.beta and [pair.row for pair in found.pairs] == columns["row"]
    for number, pair in enumerate(found.pairs):
        for side, response in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            rewards = [token.reward for token in response.tokens]
            assert sum(rewards) == pytest.approx(response.total) and response.count == len(rewards)
            assert response.total == pytest.approx(columns[f"reward_{side}"][number], abs=1e-4)


def test_token_rewards_without_reference_in_the_loss_are_log_ratios(tiny_inputs, models):
    loss = Loss.model_validate({"type": "simpo", "beta": 2.0})
    columns = held_out(tiny_inputs, models[0], loss).columns()
    found = examined(tiny_inputs, models).rewards(loss, load_tokenizer(tiny_inputs.pairs / "tokenizer"), {})
    ratios = np.subtract(columns["policy_chosen_logprob"], columns["reference_chosen_logprob"])
    assert found.beta is None
    assert [pair.chosen.total for pair in found.pairs] == pytest.approx(ratios, abs=1e-4)


def test_token_rewards_show_the_beginning_of_a_response_and_untrained_tokens(tiny_inputs, models, monkeypatch):
    """The word of an id is `w` and the id. The third trained token of the chosen response gets no reward."""
    monkeypatch.setattr("training.evaluation.token_rewards._SHOWN_TOKENS", 2)
    found = examined(tiny_inputs, models)
    example = tiny_inputs.examples[POSITIONS[0]]
    first = found.rewards(Loss(), load_tokenizer(tiny_inputs.pairs / "tokenizer"), {example["row"]: "user: hi"}).pairs[
        0
    ]
    response_ids = example["chosen_ids"][example["prompt_length"] :]
    assert [token.text.strip() for token in first.chosen.tokens] == [f"w{n}" for n in response_ids[:2]]
    assert first.chosen.omitted == len(response_ids) - 2 > 0 and first.chosen.count == len(response_ids)
    assert first.prompt == "user: hi" and first.row == example["row"]


def test_examined_positions_are_samples_and_greatest_losses_once(tiny_inputs, models):
    pairs, table = Pairs.open(tiny_inputs.pairs), LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    positions_V = np.arange(38)
    scored = score_pairs(models[0], pairs, positions_V, table, Loss(), ALONE, EventWriter(None))
    losses = scored.columns()["loss"]
    worst = sorted(range(38), key=lambda place: -losses[place])[:10]
    sampled = [worst[3], *(place for place in range(38) if place not in worst)]
    assert examined_positions(scored, sampled) == [*sampled[:8], *(place for place in worst if place != worst[3])]


@pytest.mark.shared
@pytest.mark.parametrize("name", ["tiny-chat", "stories260K"])
def test_token_texts_join_to_the_decoded_text(shared_data, name):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(shared_data / "models" / name)
    ids = tokenizer("One day, a cat saw a big dog.\n\n They were happy!", add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids)
    assert any(text.startswith(" ") for text in texts)
