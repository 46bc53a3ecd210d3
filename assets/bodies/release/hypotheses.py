"""The gate `anytime` at work: the hypotheses of a recipe's candidates, from their start to their end.

    start      compare a new candidate with the champion; its held-out pairs give the starting capital
    bet        on the pairs that arrived since, for each waiting candidate
    promote    the waiting candidate with the most evidence to spare, if one reaches its level
    restart    if the champion changed: a new hypothesis for each waiting candidate, at capital 1
    retire     all but the newest waiting candidates

Every step is written to the ledger, and repeating a step changes nothing. The caller holds the lock for promotions.
"""

from dataclasses import dataclass, field

from assets.bodies.release.candidate import Candidate
from assets.bodies.release.pages import describe_promoted
from assets.comparison.champion import score_against_champion
from assets.comparison.contestants import WAITING
from assets.comparison.evidence import arriving_scores, bet_differences, count_seen, rows_of_evaluation
from assets.execution.job_log import log_message
from model_registry.gate.anytime import Standing, choose_clip, clip_of, place_bet, prompt_differences
from model_registry.gate.ledger import MOST_BETS, HeldOut, Hypothesis, Ledger, State, now
from model_registry.gate.scores import Decision, PairedScores, floor_problems, values_problem
from model_registry.model_version import DECISION_TAG, REASONS_TAG, Version
from training.contract.errors import StoreError, without_code
from training.contract.protocol.artifacts import EVALUATION, PREQUENTIAL_SCORES, AssetName
from training.contract.protocol.details import EvaluationDetails, PrequentialDetails
from training.contract.store.artifact import Artifact


@dataclass
class Hypotheses:
    """The hypotheses of the candidate's recipe. `news`: sentences about promotions, restarts and retirements."""

    candidate: Candidate
    ledger: Ledger
    news: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, candidate: Candidate) -> "Hypotheses":
        """Raise RegistryError."""
        return cls(candidate, Ledger.read(candidate.registry.connection, candidate.name))

    def settle(self, champion: Version) -> bool:
        """Bring the waiting candidates up to date: bet, restart, retire, and promote one. Return whether one was promoted."""
        for entry in self._waiting:
            is_here = self.candidate.store.folder(AssetName.POLICY, entry.policy).is_dir()  # else another home's
            if is_here and entry.champions_policy != champion.fingerprint_of(AssetName.POLICY):
                self._restart(entry, champion)
        if (scores := self._arrived(champion)) is not None:
            for entry in self._waiting:
                self._bet(entry, scores)
        self._retire()
        return self._promote_best(champion)

    def decide(self, version: Version, champion: Version) -> Decision:
        """Return the decision about the candidate, registered as `version`."""
        gate = self.candidate.context.pipeline.recipe.release.gate
        evaluation = self.candidate.artifact(EVALUATION)
        figures: dict[str, float] = {"accuracy": evaluation.details.metrics["eval/rewards/accuracies"]}
        if reasons := floor_problems(evaluation.details.metrics, gate, figures):
            return Decision(False, reasons, figures)
        policy = self.candidate.inputs[AssetName.POLICY]
        if policy == champion.fingerprint_of(AssetName.POLICY):
            return Decision(False, [], figures)  # the caller says so
        known = self.ledger.of_policy(policy)
        if known and known[-1].champions_policy == champion.fingerprint_of(AssetName.POLICY):
            return self._decide_known(known[-1], version, figures)
        pairs = self._compare(evaluation, champion)
        if problems := _values_problems(pairs):
            return Decision(False, problems, figures)
        is_bet_on = gate.held_out_evidence and not any(entry.held_out for entry in known)
        entry = self._start(version, evaluation, champion, pairs, is_bet_on)
        self._retire()
        return self._decision(Standing.of(entry, self.ledger), figures)

    def promoted(self, version: Version) -> None:
        """Record that the candidate's `version` became champion."""
        for entry in self.ledger.of_policy(self.candidate.inputs[AssetName.POLICY]):
            if entry.state == State.WAITING and entry.candidate == version.number:
                self._record_promotion(entry)

    @property
    def _waiting(self) -> list[Hypothesis]:
        return self.ledger.waiting(self.candidate.context.pipeline.name)

    def _decide_known(self, entry: Hypothesis, version: Version, figures: dict[str, float]) -> Decision:
        """Decide about a policy that has a hypothesis against this champion already: it uses up no level."""
        standing = Standing.of(entry, self.ledger)
        if entry.candidate == version.number:
            return self._decision(standing, figures)
        waits = (
            f"which waits: {standing}" if entry.state == State.WAITING else f"whose hypothesis ended: {entry.reason}"
        )
        return Decision(False, [f"its policy is that of version {entry.candidate}, {waits}"], figures)

    def _decision(self, standing: Standing, figures: dict[str, float]) -> Decision:
        waits = standing.entry.state == State.WAITING
        text = str(standing) if standing.is_reached or not waits else f"it waits: {standing}"
        return Decision(standing.is_reached and waits, [text], {**figures, **standing.figures()})

    def _compare(self, evaluation: Artifact[EvaluationDetails], champion: Version) -> PairedScores:
        rows = rows_of_evaluation(self.candidate.store, evaluation)
        return score_against_champion(self.candidate.context, evaluation, rows, champion, is_by_prompt=True)

    def _start(
        self,
        version: Version,
        evaluation: Artifact[EvaluationDetails],
        champion: Version,
        pairs: PairedScores,
        is_bet_on: bool,
    ) -> Hypothesis:
        """Write a new hypothesis. With `is_bet_on`, the held-out pairs that do not choose the clip are bet on.

        With votes, exact differences of held-out pairs stay hidden: arriving pairs choose the clip.
        """
        pipeline = self.candidate.context.pipeline
        is_exact = pipeline.recipe.evaluation.disclosure == "exact"
        differences = list(prompt_differences(pairs).values()) if is_exact else []
        clip, used = choose_clip(differences, pairs.measure, pipeline.recipe.release.gate)
        champions_evaluation, champions_policy = map(champion.fingerprint_of, (AssetName.EVALUATION, AssetName.POLICY))
        assert champions_evaluation is not None, "it was compared"
        entry = Hypothesis(
            number=self.ledger.next_number,
            candidate=version.number,
            policy=version.fingerprint_of(AssetName.POLICY) or "",
            champion=champion.number,
            champions_policy=champions_policy or "",
            recipe=pipeline.name,
            alpha=pipeline.recipe.release.gate.alpha,
            metric=pairs.measure,
            clip=clip,
            held_out=HeldOut(evaluation=evaluation.fingerprint, champions=champions_evaluation, prompts_for_clip=used),
            rows=self.candidate.context.history.fingerprint(AssetName.RAW_PREFERENCES),
            started=now(),
        )
        if is_bet_on and clip is not None and (bets := differences[used:]):
            needed = Standing.of(entry, self.ledger).needed
            entry = place_bet(entry, bets, evaluation.fingerprint, len(bets), needed)
        self.ledger = self.ledger.write(entry)
        return entry

    def _restart(self, entry: Hypothesis, champion: Version) -> None:
        """End a hypothesis against an earlier champion, and start the next one at capital 1."""
        policy = champion.fingerprint_of(AssetName.POLICY)
        if policy is None:
            return  # another program made it: the hypotheses wait for a champion that can be compared
        if entry.policy == policy:
            if Standing.of(entry, self.ledger).is_reached:  # a run ended before it could record the promotion
                self._record_promotion(entry)
            else:
                self._end(entry, State.SUPERSEDED, "the user made it champion")
            return
        self._start_next(entry, champion, policy)
        self._end(entry, State.SUPERSEDED, f"version {champion.number} is champion now")

    def _start_next(self, entry: Hypothesis, champion: Version, champions_policy: str) -> None:
        """Start the candidate's next hypothesis, before the last one ends: an interrupted run loses no candidate."""
        if any(other.champions_policy == champions_policy for other in self._waiting if other.policy == entry.policy):
            return  # such a run had started it
        version = self._version(entry)
        evaluation = None if version is None else self._evaluation(version)
        if version is None or evaluation is None:
            self._announce(f"version {entry.candidate} waits no longer: it, or its evaluation, is missing")
        elif self.candidate.registry.rolled_back(version) is None:
            pairs = self._compare(evaluation, champion)
            if not _values_problems(pairs):
                self._note(self._start(version, evaluation, champion, pairs, is_bet_on=False))

    def _arrived(self, champion: Version) -> Artifact[PrequentialDetails] | None:
        """Return the latest scores of arriving pairs, if the champion is among their policies, and all prompts are fresh."""
        try:
            scores = self.candidate.context.history.find(PREQUENTIAL_SCORES)
        except StoreError:
            return None
        is_of_champion = scores is not None and scores.details.champion == champion.fingerprint_of(AssetName.POLICY)
        if scores is None or not is_of_champion or count_seen(self.candidate.store, scores).total():
            return None
        return scores

    def _bet(self, entry: Hypothesis, scores: Artifact[PrequentialDetails]) -> None:
        """Bet on pairs that arrived after the start, once. The first ones choose the clip if no held-out pairs could."""
        is_known = scores.fingerprint in {entry.clip_source, *(bet.source for bet in entry.bets)}
        if is_known or scores.derivation.inputs[AssetName.RAW_PREFERENCES].fingerprint == entry.rows:
            return
        pairs = arriving_scores(scores, entry.policy, entry.champions_policy, entry.metric)
        differences = list(prompt_differences(pairs).values())
        if not differences:
            return
        if entry.clip is None:
            entry = entry.model_copy(update={"clip": clip_of(differences), "clip_source": scores.fingerprint})
        else:
            try:
                before = bet_differences(self.candidate.store, entry)
            except StoreError as error:
                self._end(entry, State.RETIRED, f"earlier scores cannot be read: {without_code(str(error))}")
                return
            needed = Standing.of(entry, self.ledger).needed
            entry = place_bet(entry, [*before, *differences], scores.fingerprint, len(differences), needed)
        self.ledger = self.ledger.write(entry)
        self._note(entry)
        if len(entry.bets) >= MOST_BETS and not Standing.of(entry, self.ledger).is_reached:
            self._end(entry, State.RETIRED, f"it retired after {MOST_BETS} bets")

    def _retire(self) -> None:
        for entry in self._waiting[WAITING:]:
            self._end(entry, State.RETIRED, f"it retired: {WAITING} newer candidates of {entry.recipe} wait")

    def _promote_best(self, champion: Version) -> bool:
        """Promote the waiting candidate with the most evidence to spare, if one reaches its level."""
        standings = [Standing.of(entry, self.ledger) for entry in self._waiting]
        for standing in sorted(standings, key=lambda standing: standing.surplus, reverse=True):
            version = self._version(standing.entry) if standing.is_reached else None
            if version is None or not self._may_be_champion(version):
                continue
            tags = {REASONS_TAG: str(standing), DECISION_TAG: "yes"}
            version = self.candidate.registry.tag(version, tags)
            if self.candidate.registry.promote(version, over=champion):
                self._record_promotion(standing.entry)
                describe_promoted(self.candidate, version, str(standing))
                self._announce(f"version {version.number} became champion: {standing}")
                return True
        return False

    def _may_be_champion(self, version: Version) -> bool:
        """Return whether it has its files, passes the recipe's floors, and was not rolled back."""
        registry, gate = self.candidate.registry, self.candidate.context.pipeline.recipe.release.gate
        evaluation = self._evaluation(version)
        if evaluation is None or registry.rolled_back(version) is not None or not registry.has_files(version):
            return False
        return not floor_problems(evaluation.details.metrics, gate, {})

    def _evaluation(self, version: Version) -> Artifact[EvaluationDetails] | None:
        fingerprint = version.fingerprint_of(AssetName.EVALUATION)
        try:
            return None if fingerprint is None else self.candidate.store.open(EVALUATION, fingerprint)
        except StoreError:
            return None

    def _version(self, entry: Hypothesis) -> Version | None:
        versions = self.candidate.registry.versions(self.candidate.name)
        return next((version for version in versions if version.number == entry.candidate), None)

    def _record_promotion(self, entry: Hypothesis) -> None:
        standing = Standing.of(entry, self.ledger)
        self.ledger = self.ledger.write(entry.end(State.PROMOTED, "it became champion", standing.level))

    def _end(self, entry: Hypothesis, state: State, reason: str) -> None:
        self.ledger = self.ledger.write(entry.end(state, reason))
        if state == State.RETIRED:
            self._announce(f"version {entry.candidate}: {reason}")
            if (version := self._version(entry)) is not None:
                self.candidate.registry.tag(version, {REASONS_TAG: f"{reason}; {Standing.of(entry, self.ledger)}"})

    def _announce(self, text: str) -> None:
        self.news.append(text)
        context = self.candidate.context
        log_message(context.services, context.dagster.log, AssetName.RELEASED_MODEL, text)

    def _note(self, entry: Hypothesis) -> None:
        """Write the evidence so far on the candidate's version."""
        if (version := self._version(entry)) is not None:
            self.candidate.registry.tag(version, {REASONS_TAG: f"it waits: {Standing.of(entry, self.ledger)}"})


def _values_problems(pairs: PairedScores) -> list[str]:
    shared = pairs.shared
    problems = values_problem(pairs.candidate, "candidate")
    if pairs.champion is not None and shared:
        champion = pairs.champion
        problems += values_problem({pair: champion[pair] for pair in shared}, "champion")
    return problems
