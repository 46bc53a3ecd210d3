"""Print how many held-out prompts the demo's models answer correctly, before and after preference tuning.

The evaluation holds the greedy answers of both models. An answer is correct if it ends with the right word.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from assets.lineage.history import History
from training.contract.protocol.artifacts import EVALUATION
from workflows.cli.progress import at_work
from workflows.defs.demo.make import right_answers
from workflows.recipes.discovery import load_recipe

HERE = Path(__file__).parent


def is_right(answer: str, word: str) -> bool:
    return answer.endswith(f" {word}.")


def count_right(samples: Collection[Mapping[str, str]], side: str) -> int:
    """Return the number of correct answers on `side`, "before" or "after"."""
    expected = right_answers()
    return sum(is_right(sample[side], expected[sample["prompt"]]) for sample in samples)


def main() -> None:
    pipeline = load_recipe(HERE).pipeline
    with at_work() as (services, instance):
        samples = (
            History(instance, pipeline, services.store, assets=["evaluation"]).artifact(EVALUATION).json("samples.json")
        )
    before, after = count_right(samples, "before"), count_right(samples, "after")
    print(f"right answers on {len(samples)} held-out prompts: {before} before, {after} after")


if __name__ == "__main__":
    main()
