"""The details of each kind of artifact: small facts in its manifest (training.contract.store.artifact_kind).

Field names are stored. Renaming one needs a migration.
"""

from pydantic import Field

from training.contract.config.json_object import JsonObject
from training.contract.protocol.votes import ACCURACY_VOTES
from training.contract.store.artifact_kind import Details, Figure, StoredModel


class SourceDetails(Details):
    """`preference_source`. `rows`: by file; None if only a job can count them."""

    files: int = 0
    bytes: int = 0
    rows: dict[str, int | None] = Field(default={})


class ModelDetails(Details):
    """`base_model`: the sizes of its weights."""

    tensors: int
    bytes: int


class TokenizationDetails(Details):
    """`tokenization_spec`. `template_tokens`: ids by token that the template writes. `files`: sha256 by name."""

    files: dict[str, str] = Field(default={})
    template_tokens: dict[str, int] = Field(default={})


class ReleaseFilesDetails(Details):
    """`release_spec`."""

    files: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


class RowCounts(StoredModel):
    """Counts of rows: read = pairs + quarantined + left out by `fraction` + dropped duplicates."""

    pairs: int
    quarantined: int
    train: int
    validation: int
    rows_read: int
    left_out: int = 0
    duplicates: int = 0
    conflicting: int = 0


class QuarantinedRow(StoredModel):
    source: str
    line: int
    reason: str
    detail: str
    text: str


class RowsDetails(Details):
    """`raw_preferences`. `formats`: by file. `pair_rules`: of the pair caches it reads."""

    counts: RowCounts
    formats: dict[str, str] = Field(default={})
    reasons: dict[str, int] = Field(default={})
    quarantine_examples: tuple[QuarantinedRow, ...] = ()
    examples: tuple[JsonObject, ...] = ()  # messages
    pair_rules: tuple[str, ...] = ()
    cached_rows: int | None = None
    cache_bytes: int | None = None


class PairCounts(StoredModel):
    pairs: int
    train: int
    validation: int
    dropped: int = 0
    prompt_tokens: int = 0
    chosen_tokens: int = 0
    rejected_tokens: int = 0
    trained_tokens: int = 0


class DroppedRow(StoredModel):
    row: int
    reason: str
    detail: str


class PairText(StoredModel):
    """The tokens of a pair as text, control tokens included."""

    row: int
    prompt: str
    chosen: str
    rejected: str


class LengthHistogram(StoredModel):
    """Counts of sequences by their tokens. `edges` has one entry more than the counts."""

    edges: tuple[float, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


class PairsDetails(Details):
    """`tokenized_pairs`. `percentiles`: of lengths in tokens, by sequence, such as `p99`."""

    counts: PairCounts
    reasons: dict[str, int] = Field(default={})
    dropped_examples: tuple[DroppedRow, ...] = ()
    empty_masks: int = 0
    prefix_violations: int = 0
    first_prefix_violation: str = ""
    left_out: int = 0
    first_left_out: str = ""
    shared_prompts: int = 0
    first_shared_prompt: str = ""
    percentiles: dict[str, dict[str, float]] = Field(default={})
    histogram: LengthHistogram | None = None
    largest_token: int | None = None
    tokenized: int | None = None
    cached_rows: int | None = None
    cache_bytes: int | None = None
    token_rules: tuple[str, ...] = ()
    examples: tuple[PairText, ...] = ()


class LogProbsDetails(Details):
    """`reference_logprobs`: counts of distinct sequences, found in the cache (`hits`) or scored, and of pairs and tokens."""

    sequences: int
    hits: int
    scored: int
    pairs: int
    finite: int
    tokens: int
    rule: str
    seconds: float | None = None


class ScoredPolicy(StoredModel):
    """The scores of one policy on fresh pairs: counts, and means of their losses and accuracies.

    `policy`: its fingerprint. `hits`: sequences found in the log-prob cache; `scored`: sequences scored by the job.
    """

    policy: str
    pairs: int
    prompts: int
    finite: int
    hits: int
    scored: int
    loss: Figure
    accuracy: Figure


class PrequentialDetails(Details):
    """`prequential_scores`. `champion`: the fingerprint of its policy, if it was scored."""

    champion: str | None = None
    policies: tuple[ScoredPolicy, ...] = ()


class RunDetails(Details):
    """The figures of a training, by `RunState`. `train`: metrics of the last step. `series`: about 200 values of a metric.

    `objective`: the state of a loss that depends on earlier batches.
    """

    steps: int = 0
    tokens: int = 0
    peak_memory_mb: float = 0.0
    seconds: dict[str, float] = Field(default={})
    peaks_mb: dict[str, float] = Field(default={})
    train: dict[str, Figure] = Field(default={})
    series: dict[str, list[Figure]] = Field(default={})
    objective: dict[str, Figure] | None = None
    world: int = 1


class ReferenceModelDetails(RunDetails):
    """`reference_model`: empty for a pointer to the base model. `pairs`: the number of trained pairs."""

    pairs: int = 0


class TrainedPairs(StoredModel):
    train: int = 0
    validation: int = 0


class PolicyDetails(RunDetails):
    """`policy`. `step0_...`: the loss before the first step (training.scoring.reference_check). `eval`: held-out metrics.

    `step0_apart`: nats a response between policy and table before training, if their dtypes differ.
    """

    pairs: TrainedPairs = TrainedPairs()
    rewards_finite: bool
    step0_loss: Figure
    step0_expected: float
    step0_allowed: float
    step0_apart: Figure | None = None
    eval: dict[str, Figure] = Field(default={})


class SampledAnswer(StoredModel):
    row: int
    prompt: str
    before: str
    after: str
    chosen: str


class EvaluationDetails(Details):
    """`evaluation`. `interval`: 95%, of the accuracy. `sources`: metrics by named source.

    `accuracy_votes`: the accuracy by votes; None if exact figures may be shown. With votes, the other fields are for the gate
    alone, and there are no samples.
    """

    metrics: dict[str, Figure]
    interval: tuple[Figure, Figure]
    sources: tuple[JsonObject, ...] = ()
    samples: tuple[SampledAnswer, ...] = ()
    accuracy_votes: float | None = None

    @property
    def shown_metrics(self) -> dict[str, Figure]:
        """The metrics that users may see."""
        return self.metrics if self.accuracy_votes is None else {ACCURACY_VOTES: self.accuracy_votes}

    @property
    def independent_pairs(self) -> int:
        """The number of held-out prompts; it is below the number of pairs if some share a prompt."""
        return int(self.metrics.get("eval/prompts", self.metrics["eval/pairs"]))


class RescoredDetails(Details):
    """`proof`. `tolerance`: nats per root of the count of response tokens."""

    tolerance: float
    dtype: str = "float32"


class RescoredSide(StoredModel):
    """A response's log-prob in the table, scored again, and the allowed difference, in nats."""

    stored: Figure
    live: Figure
    allowed: Figure


class RescoredPair(StoredModel):
    row: int
    chosen: RescoredSide
    rejected: RescoredSide
