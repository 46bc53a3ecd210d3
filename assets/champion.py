"""What a candidate is compared with: the champion's evaluation, wherever it was released."""

from dataclasses import dataclass

from assets.event_log import tell
from assets.held_out import common_measure, measured, prompts, rows_by_messages, rows_by_pair
from assets.step import Step
from model_registry.gate import MIN_PROMPTS, Measure, Prompts, Values
from model_registry.versions import Version
from training.contract.errors import CorruptArtifact, RegistryAway, RegistryError
from training.contract.store import Artifact


@dataclass(frozen=True)
class Compared:
    """What `measure` says of the pairs of a candidate and of the champion, and which prompts they have."""

    measure: Measure
    candidate: Values
    champion: Values
    prompts: Prompts


def compared(step: Step, evaluation: Artifact, raw_preferences: str, champion: Version) -> Compared:
    """What can be compared of a candidate's `evaluation`, made from `raw_preferences`, and the champion's.

    Where no ten pairs have the same tokens, as after another template, a pair is known by its messages, and only its rank,
    over the reference that each has, can be compared. Raises RegistryError where the champion's is nowhere; CorruptArtifact.
    """
    theirs, said = (
        _artifact_of(step, champion, "evaluation"),
        step.services.store.open("raw_preferences", raw_preferences),
    )
    rows, others, measure = rows_by_pair(evaluation), rows_by_pair(theirs), common_measure(evaluation, theirs)
    if len(rows.keys() & others.keys()) < MIN_PROMPTS:
        measure, rows = Measure.ERROR_RATE, rows_by_messages(evaluation, said)
        others = rows_by_messages(theirs, _artifact_of(step, champion, "raw_preferences"))
    return Compared(measure, measured(measure, rows, others), measured(measure, others, others), prompts(rows, said))


def _artifact_of(step: Step, champion: Version, kind: str) -> Artifact:
    """From this store; that of another home goes with the version, if it is its evaluation.

    Raises RegistryError where another program made it champion, or another home has what is needed; CorruptArtifact.
    """
    store, found = step.services.store, champion.fingerprint_of(kind)
    whose = f"version {champion.number} of {champion.name}, the champion,"
    if found is None:
        raise RegistryError(
            f"{whose} was not released by a recipe, so nothing can be compared with it: let the alias `champion` point at "
            "a version that was, or at none"
        )
    if (folder := store.folder(kind, found)).is_dir():
        try:
            return store.open(kind, found)
        except CorruptArtifact as error:
            place = store.set_aside(kind, found)
            text = f"{error}. Set aside in {place}; that among the version's files is taken."
            tell(step.services, step.context.log, "released_model", text)
    try:
        with store.staging() as staging:
            return store.adopt(step.services.registry.fetch(champion, kind, staging), kind, found)
    except RegistryAway:
        raise
    except RegistryError as error:
        raise RegistryError(
            f"{whose} was released in another home, whose {kind} is neither in this store nor among the version's files, so "
            f"nothing can be compared with it: copy that home's folder {folder.relative_to(store.root.parent)} to {folder}, "
            f"or release into another `release.model_name` ({error})"
        ) from error
