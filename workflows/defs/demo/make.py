"""Make the demo's inputs: synthetic preference pairs, a small tokenizer and a model with random weights.

The questions are about opposites, capitals, colours and past tenses. Each fact appears in twelve phrasings. The recipe holds
out about one phrasing in ten, so a model meets every fact in training, but none of the held-out prompts.

1. Half of the chosen answers are right and brief. The rejected answer dodges the question, is wrong, or goes on.
2. Half of the chosen answers dodge the question. The rejected answer dodges it at greater length.

A model that imitates the chosen answers learns all facts, but dodges about every second question. The pairs prefer right
answers to dodges. So after preference tuning, the model answers the questions it dodged.

The output is a function of the constants below: a second run writes the same bytes.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).parent
VOCABULARY = 1024  # enough for every word to become one token

TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""

OPPOSITES = """hot cold, big small, fast slow, light dark, early late, hard soft, full empty, high low, young old, wet dry,
rich poor, loud quiet, open closed, near far, strong weak, happy sad, clean dirty, thick thin, sharp blunt, sweet bitter,
deep shallow, wide narrow, smooth rough, true false"""
CAPITALS = """France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Norway Oslo, Greece Athens, Peru Lima,
Kenya Nairobi, Cuba Havana, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Hungary Budapest, Chile Santiago"""
COLOURS = """grass green, snow white, coal black, blood red, butter yellow, chocolate brown, ash grey, salmon pink,
a carrot orange, the sky blue, a lemon yellow, a tomato red"""
PAST_TENSES = """go went, see saw, eat ate, take took, give gave, run ran, write wrote, speak spoke, drink drank, sing sang,
swim swam, know knew, buy bought, teach taught"""

TOPICS = {
    "the opposite of": OPPOSITES,
    "the capital of": CAPITALS,
    "the colour of": COLOURS,
    "the past tense of": PAST_TENSES,
}
QUESTIONS = ("What is {}?", "Tell me {}.", "Do you know {}?", "I would like to know {}.")
MANNERS = ("{}", "Please answer: {}", "I have a question. {}")
RAMBLES = (
    "Well, that is a good question and many people ask it.",
    "Well, let me think about this for a while.",
    "Well, how interesting that you ask me this today.",
)
# The rejected answers for right ones. As many other pairs prefer a dodge to a longer dodge.
WORSE = ("dodge", "right, going on", "dodge", "wrong", "dodge", "right, going on")
KINDS = [kind for worse in WORSE for kind in (("right", worse), ("dodge", "dodge, going on"))]


@dataclass(frozen=True)
class Fact:
    topic: str
    thing: str
    answer: str

    @property
    def prompts(self) -> list[str]:
        subject = f"{self.topic} {self.thing}"
        return [manner.format(question.format(subject)) for question in QUESTIONS for manner in MANNERS]


def facts() -> list[Fact]:
    entries = [(topic, entry.strip().rsplit(" ", 1)) for topic, text in TOPICS.items() for entry in text.split(",")]
    return [Fact(topic, thing, answer) for topic, (thing, answer) in entries]


def chance(*parts: str) -> float:
    """Return a number in [0, 1), a function of `parts` alone."""
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def pairs() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield a pair for each prompt. The kinds alternate over the prompts of a fact, in the order of the prompts' hashes."""
    known = facts()
    kinds = itertools.cycle(KINDS)
    for fact in known:
        wrong_answers = sorted({f.answer for f in known if f.topic == fact.topic and f.answer != fact.answer})
        kind_of = dict(zip(sorted(fact.prompts, key=lambda prompt: chance("kind", prompt)), kinds, strict=False))
        for prompt in fact.prompts:
            texts = responses(prompt, fact.answer, wrong_answers[int(chance("wrong", prompt) * len(wrong_answers))])
            chosen, rejected = kind_of[prompt]
            yield conversation(prompt, texts[chosen], texts[rejected])


def responses(prompt: str, answer: str, wrong: str) -> dict[str, str]:
    """Return a response of each kind to `prompt`."""
    ramble, more = (RAMBLES[int(chance(use, prompt) * len(RAMBLES))] for use in ("ramble", "more"))
    right, dodge = f"It is {answer}.", f"{ramble} I would rather not say."
    return {
        "right": right,
        "wrong": f"It is {wrong}.",
        "dodge": dodge,
        "right, going on": f"{right} {more}",
        "dodge, going on": f"{dodge} {more}",
    }


def right_answers() -> dict[str, str]:
    """Return the right answer to each prompt."""
    return {prompt: fact.answer for fact in facts() for prompt in fact.prompts}


def conversation(prompt: str, chosen: str, rejected: str) -> dict[str, list[dict[str, str]]]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def make_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def write_data(
    folder: Path, rows: list[dict[str, list[dict[str, str]]]], vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Write the pairs and a tokenizer trained on their texts. Return the tokenizer."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "preferences.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [message["content"] for row in rows for side in row.values() for message in side]
    tokenizer = make_tokenizer(texts, vocabulary)
    tokenizer.save_pretrained(folder / "base")
    return tokenizer


def main() -> None:
    rows = list(pairs())
    disable_progress_bar()
    make_model(write_data(HERE, rows)).save_pretrained(HERE / "base")
    print(f"{len(rows)} pairs in preferences.jsonl, tokenizer and random weights in {HERE.name}/base")


if __name__ == "__main__":
    main()
