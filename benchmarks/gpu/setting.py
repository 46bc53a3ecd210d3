"""Settings of both sides of the comparison on a GPU: sizes, made-up pairs, peaks of chips. It imports neither side.

Pairs are random words of a vocabulary. Its word number n is token number n, so trainers for text and for tokens get the same
data. Each prompt has two responses, and each response ends with the end-of-sequence token.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

END = 0
WARM_UP = 3  # warm-up
TEXTS = "order.json"
# Dense bfloat16 peak of tensor cores, in FLOP/s, by a part of the device's name; from the vendor's data sheets.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


@dataclass(frozen=True)
class Size:
    """A Llama, untied, and the amount of its training data; lengths are the shortest and the longest."""

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
        """The pairs of one forward of about `micro_tokens`, unpadded, if both sequences run whole."""
        fitting = max(1, self.micro_tokens // (sum(self.prompt) + sum(self.response)))
        return max(count for count in range(1, fitting + 1) if self.batch % count == 0)


SIZES = {
    "1b": Size(2048, 8192, 16, 32, 8, 32_768, (256, 768), (64, 384), batch=16, micro_tokens=4096),
    "tiny": Size(64, 96, 2, 4, 2, 512, (8, 24), (4, 16), batch=8, micro_tokens=160),
}
Pair = tuple[list[int], list[int], list[int]]


def made_up(size: Size) -> list[Pair]:
    """Return prompts, chosen and rejected responses, as tokens."""
    drawn = random.Random(0)

    def words(lengths: tuple[int, int]) -> list[int]:
        return [drawn.randrange(1, size.vocabulary) for _ in range(drawn.randint(*lengths))]

    pairs = [(words(size.prompt), words(size.response), words(size.response)) for _ in range(size.batch * size.steps)]
    return [(prompt, [*chosen, END], [*rejected, END]) for prompt, chosen, rejected in pairs]


def write_texts(pairs: list[Pair], folder: Path) -> None:
    """Write rows of text, without the end token: a trainer on texts adds it."""
    rows = [(text(prompt), " " + text(chosen[:-1]), " " + text(rejected[:-1])) for prompt, chosen, rejected in pairs]
    named = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    (folder / TEXTS).write_text(json.dumps(named), encoding="utf-8")


def text(tokens: list[int]) -> str:
    return " ".join(map(word, tokens))


def word(token: int) -> str:
    return f"w{token}"


def peak_of(device: str) -> float | None:
    """Return the peak of a device by its name, None if it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
