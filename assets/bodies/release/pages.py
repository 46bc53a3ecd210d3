"""The pages about a release: the version's description in MLflow, and the report with the release on top."""

from typing import Any

import dagster as dg

from assets.bodies.evaluation import evaluation_sentence
from assets.bodies.release.candidate import Candidate
from assets.views.evidence_chart import evidence_picture
from assets.views.history_page import render_history
from assets.views.pages import publish_history, publish_report, publish_version
from assets.views.report_page import ReleaseSummary, add_release
from model_registry.gate.history import model_history
from model_registry.gate.scores import Decision
from model_registry.model_version import Version
from training.contract.errors import StoreError
from training.contract.protocol.artifacts import EVALUATION, AssetName

_GATE_FOLDER = "gate"  # among the artifacts of a run
_SECONDS = len("2026-11-28T15:00")


def find_run(candidate: Candidate) -> str | None:
    """Return the id of the policy's MLflow run; None if the server does not answer."""
    context = candidate.context
    derivation = context.history.derivation(AssetName.POLICY, candidate.inputs[AssetName.POLICY])
    return context.services.tracker.find_run(context.pipeline.family, derivation.key)


def describe_version(candidate: Candidate, decision: Decision, run_id: str | None) -> str:
    """Return the Markdown text of the version's page: the decision with its reasons, the result, and links to its run."""
    tracker, result = candidate.context.services.tracker, evaluation_sentence(candidate.artifact(EVALUATION))
    decided = "Champion" if decision.promote else "Not champion"
    text = f"{decided}: {'; '.join(decision.reasons)}\n\nRecipe {candidate.context.pipeline.name}. {result}"
    if run_id is None:
        return text
    report = tracker.run_link(run_id, "artifacts/evaluation/report.html")
    history = tracker.run_link(run_id, f"artifacts/{_GATE_FOLDER}/{candidate.context.pipeline.name}-history.html")
    return f"{text}\n\n[report]({report}) · [charts]({tracker.run_link(run_id)}) · [history of promotions]({history})"


def describe_promoted(candidate: Candidate, version: Version, reasons: str) -> None:
    """Replace the decision on the page of a waiting version that became champion. The rest of the page stays."""
    page = candidate.registry.description(version)
    _, _, rest = page.partition("\n\n")
    candidate.registry.describe(version, f"Champion: {reasons}\n\n{rest}" if rest else f"Champion: {reasons}")


def publish_model_history(candidate: Candidate) -> dict[str, Any]:
    """Publish the history of the registered model, here and in the policy's MLflow run. Return its metadata and a picture."""
    context = candidate.context
    history = model_history(candidate.registry, candidate.name)
    file = publish_history(context.services.home, context.pipeline, render_history(history))
    if (run_id := find_run(candidate)) is not None:
        context.services.tracker.log_page(run_id, file, _GATE_FOLDER)
    return evidence_picture(history.comparisons)


def publish_release(
    candidate: Candidate, version: Version, is_champion: bool, reasons: str
) -> dict[str, dg.MetadataValue[Any]]:
    """Publish the report with the release on top, and the link of the version. Return the report's metadata, if it exists."""
    context = candidate.context
    home, link = context.services.home, candidate.registry.link(version)
    publish_version(home, context.pipeline, link)
    try:
        evaluation = candidate.store.open(EVALUATION, candidate.inputs[AssetName.EVALUATION], hashes=False)
        page = evaluation.file("report.html").read_text(encoding="utf-8")
    except (StoreError, OSError):  # a version that is registered already does not need it
        return {}
    summary = ReleaseSummary(
        recipe=context.pipeline.name,
        version=version.number,
        registered_model=version.name,
        date=f"{evaluation.manifest.created[:_SECONDS].replace('T', ' ')} UTC",
        is_champion=is_champion,
        reasons=reasons.split("; "),
        links={"version in MLflow": link},
    )
    return publish_report(home, context.pipeline, add_release(page, summary))
