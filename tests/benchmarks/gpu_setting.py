"""What both sides of the comparison on a GPU share: sizes, made-up pairs, peaks of chips. It imports neither of them.

Pairs are random words of a vocabulary in which word number n is token number n, so a trainer that takes text and one that
takes tokens get the same. Each prompt has two responses, and each response ends with the end-of-sequence token.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

END = 0
WARM_UP = 3  # steps that are not counted
TEXTS = "order.json"
# Dense bfloat16 of tensor cores, in FLOP/s, by what the name of a device contains; from the vendor's data sheets.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


@dataclass(frozen=True)
class Size:
    """A Llama, untied, and how much it is trained on; lengths are the shortest and the longest."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    batch: int
    micro_tokens: int
    steps: int = 12

    @property
    def micro_pairs(self) -> int:
        """Pairs of one forward, for about as many tokens, of a trainer that runs both sequences whole; padding comes on top."""
        fitting = max(1, self.micro_tokens // (sum(self.prompt) + sum(self.response)))
        return max(count for count in range(1, fitting + 1) if self.batch % count == 0)


SIZES = {
    "1b": Size(2048, 8192, 16, 32, 8, 32_768, (256, 768), (64, 384), batch=16, micro_tokens=4096),
    "tiny": Size(64, 96, 2, 4, 2, 512, (8, 24), (4, 16), batch=8, micro_tokens=160),
}
Pair = tuple[list[int], list[int], list[int]]


def made_up(size: Size) -> list[Pair]:
    """Prompts, chosen and rejected responses, as tokens."""
    drawn = random.Random(0)

    def words(lengths: tuple[int, int]) -> list[int]:
        return [drawn.randrange(1, size.vocabulary) for _ in range(drawn.randint(*lengths))]

    pairs = [(words(size.prompt), words(size.response), words(size.response)) for _ in range(size.batch * size.steps)]
    return [(prompt, [*chosen, END], [*rejected, END]) for prompt, chosen, rejected in pairs]


def write_texts(pairs: list[Pair], folder: Path) -> None:
    """As rows of text, without the end that a trainer on texts adds."""
    rows = [(text(prompt), " " + text(chosen[:-1]), " " + text(rejected[:-1])) for prompt, chosen, rejected in pairs]
    named = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    (folder / TEXTS).write_text(json.dumps(named), encoding="utf-8")


def text(tokens: list[int]) -> str:
    return " ".join(map(word, tokens))


def word(token: int) -> str:
    return f"w{token}"


def peak_of(device: str) -> float | None:
    """The peak of a device by its name, if it is known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
