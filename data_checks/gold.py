"""Whether prompts for RL can be rewarded: a verifier must accept a row's own ground truth, and not a wrong answer."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import orjson
import xxhash

from data_checks.ground_truths import MARKER, is_structured, loads_or, shape_of, unreadable_latex
from data_checks.rows import Finding, PromptItem, Reason
from training_core.config.reward_parts import MatchReward
from training_core.config.reward_rules import ExactMatchReward
from training_core.config.verifiers import MathVerifyReward, NumericMatchReward
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores, no_poll
from training_core.rewards.matching import build_exact_match, build_numeric_match
from training_core.rewards.mathematics import as_expression, build_math_verify
from training_core.rewards.number_text import BOXED, number_at

WRONG_NUMBER = "-918273645.5"
"""No ground truth is this by accident."""
WRONG_SHARE = 1 / 64
"""Share of the expressions and numbers that are also compared with a wrong one."""
MAX_REMEMBERED = 100_000
MAX_REMEMBERED_LENGTH = 200

NO_GROUND_TRUTH = "no ground truth"
STRUCTURED = "a ground truth of its own structure (an object or a list of them), for a verifier of yours"
CODE = "ability is code: tests are run in training, in a sandbox"
TOO_SLOW = "comparing the ground truth with itself took too long"
ACCEPTS_WRONG = "the verifier accepts a wrong or empty answer as well"
NOT_SAMPLED = "mathematics outside the sample that is compared"
SHAPES = ("text", "number", "solution", "latex")
"""In the order of the verifiers for them."""


class Outcome(NamedTuple):
    """What became of one ground truth; neither: the verifier accepts it, and nothing wrong."""

    finding: Finding | None = None
    unjudged: str | None = None
    """Why nothing is known."""


class Trial(NamedTuple):
    """One question to a verifier."""

    verifier: int
    reference: Any
    right: Sequence[str]
    """Answers of which one must be accepted."""
    wrong: Sequence[str]
    """Answers of which none may be."""


class GoldChecker:
    """Asks verifiers about ground truths, each distinct one once.

    Defects 24 of the catalogue: a row whose own ground truth gets no reward teaches that right answers are wrong, and
    one that rewards a wrong answer (a blank ground truth equals an empty answer) teaches to say nothing.

    Args:
        rewards: the rewards of the training that these prompts are for. Those that compare an answer with the row
            (`exact_match`, `numeric_match`, `math_verify`) are asked, each about the column that it reads. None of
            them: the shape of `PromptItem.ground_truth` chooses, see `shape_of`.
        math_share: share (0 to 1) of distinct ground truths that are compared as mathematics; which ones depends on
            their text alone. One takes about 3 ms of a processor core.
        timeout_seconds: wall-clock limit on one comparison of mathematics where no reward of `rewards` says another.
        poll: called about every quarter of a second while mathematics is compared; may raise to stop.

    Raises:
        ConfigurationError: `rewards` names `math_verify`, which is not installed.
    """

    def __init__(
        self,
        rewards: Iterable[Any] = (),
        *,
        math_share: float = 1.0,
        timeout_seconds: float = 10.0,
        poll: Callable[[], None] = no_poll,
    ) -> None:
        self.configs: list[MatchReward] = [reward for reward in rewards if isinstance(reward, MatchReward)]
        self.by_shape = not self.configs
        if self.by_shape:
            key = "ground_truth"
            self.configs = [
                ExactMatchReward(kind="exact_match", reference_key=key),
                NumericMatchReward(kind="numeric_match", reference_key=key),
                NumericMatchReward(kind="numeric_match", reference_key=key, marker=MARKER),
                MathVerifyReward(kind="math_verify", reference_key=key, timeout_seconds=timeout_seconds, num_workers=1),
            ]
        self.rules: dict[int, RewardFunction] = {}
        self.math_share = math_share
        self.poll = poll
        self.remembered: dict[Any, Outcome] = {}
        self.num_judged = 0
        """Rows whose ground truth a verifier was asked about."""
        self.unjudged: Counter[str] = Counter()
        """Why a verifier was not asked -> rows."""

    def findings(self, items: Sequence[PromptItem]) -> list[Finding | None]:
        """Return one finding an item, None where its ground truth is good or nothing is known of it.

        Raises:
            TemporaryError: a process that compares mathematics did not start.
            What `poll` raises.
        """
        keys = [self._key(item) for item in items]
        new = [key for key in dict.fromkeys(keys) if key not in self.remembered]
        outcomes = self.remembered | self._judge(new) if new else self.remembered
        found = [outcomes[key] for key in keys]
        if new:
            self._remember({key: outcomes[key] for key in new})
        for outcome in found:
            if outcome.unjudged is None:
                self.num_judged += 1
            else:
                self.unjudged[outcome.unjudged] += 1
        return [outcome.finding for outcome in found]

    def _key(self, item: PromptItem) -> Any:
        """Return all that an outcome depends on, as JSON text."""
        if self.by_shape:
            return item.ground_truth if item.ability not in ("code", "coding") else CODE
        extra = loads_or(item.extra, {})
        wanted = dict.fromkeys(config.reference_key for config in self.configs)
        return orjson.dumps({key: extra.get(key) for key in wanted}).decode()

    def _remember(self, outcomes: dict[Any, Outcome]) -> None:
        if len(self.remembered) + len(outcomes) > MAX_REMEMBERED:
            self.remembered = {}
        self.remembered.update(
            (key, value) for key, value in outcomes.items() if len(key or "") <= MAX_REMEMBERED_LENGTH
        )

    def _judge(self, keys: Sequence[Any]) -> dict[Any, Outcome]:
        outcomes: dict[Any, Outcome] = {}
        trials: list[tuple[Any, Trial]] = []
        for key in keys:
            planned = self._trials_by_shape(key) if self.by_shape else self._trials_of_rewards(key)
            if isinstance(planned, Outcome):
                outcomes[key] = planned
            else:
                trials += ((key, trial) for trial in planned)
        verdicts: dict[Any, list[Outcome]] = {}
        for verifier in range(len(self.configs)):
            mine = [(key, trial) for key, trial in trials if trial.verifier == verifier]
            for (key, _), outcome in zip(mine, self._ask(verifier, [trial for _, trial in mine]), strict=True):
                verdicts.setdefault(key, []).append(outcome)
        # Of several ground truths one must be accepted; of several rewards of the config, every one must accept.
        combine = _any_accepts if self.by_shape else _all_accept
        return outcomes | {key: combine(found) for key, found in verdicts.items()}

    def _trials_by_shape(self, text: str | None) -> list[Trial] | Outcome:
        if text is None:
            return Outcome(unjudged=NO_GROUND_TRUTH)
        if text == CODE:  # No JSON text, so never a row's own.
            return Outcome(unjudged=CODE)
        value = loads_or(text, {})
        if value is None:
            return Outcome(unjudged=NO_GROUND_TRUTH)
        several = [one for one in value if one is not None] if isinstance(value, list) else [value]
        if not several:
            return _rejected("the ground truth is an empty list: no answer is right")
        if any(isinstance(one, dict | list) or is_structured(one) for one in several):
            return Outcome(unjudged=STRUCTURED)
        trials, skipped = [], []
        for one in several:
            shape = shape_of(one)
            broken = unreadable_latex(one) if shape == "latex" else None
            if broken:
                skipped.append(_rejected(broken))
            elif shape == "latex" and _chance(one) >= self.math_share:
                skipped.append(Outcome(unjudged=NOT_SAMPLED))
            else:
                verifier = SHAPES.index(shape)
                trials.append(Trial(verifier, one, [self._answer(verifier, one)], self._wrong_answers(verifier, one)))
        return trials or _any_accepts(skipped)

    def _trials_of_rewards(self, text: str) -> list[Trial] | Outcome:
        row = orjson.loads(text)
        trials, skipped = [], NO_GROUND_TRUTH
        for verifier, config in enumerate(self.configs):
            reference = row[config.reference_key]
            if reference is None:
                continue
            if isinstance(config, MathVerifyReward) and _chance(text) >= self.math_share:
                skipped = NOT_SAMPLED
                continue
            several = reference if isinstance(reference, list) else [reference]
            right = [self._answer(verifier, one) for one in several]
            trials.append(Trial(verifier, reference, right, self._wrong_answers(verifier, reference)))
        return trials or Outcome(unjudged=skipped)

    def _answer(self, verifier: int, gold: Any) -> str:
        """Return the answer that says just this, in the form that the verifier reads."""
        config, text = self.configs[verifier], str(gold)
        if isinstance(config, MathVerifyReward):
            return as_expression(text) if config.reference_form == "expression" else text
        if not isinstance(config, NumericMatchReward) or config.marker is None:
            return text
        if number_at(text, config.marker, config.percent) is not None:
            return text
        return f"{BOXED}{{{text}}}" if config.marker == BOXED else f"{config.marker} {text}"

    def _wrong_answers(self, verifier: int, reference: Any) -> list[str]:
        """Return what must not be accepted.

        Mathematics and numbers without an absolute tolerance differ from a wrong one for sure where they can be read,
        so that a sample is enough to see that the rule is at work.
        """
        config, text = self.configs[verifier], str(reference)
        if not isinstance(config, MathVerifyReward | NumericMatchReward):
            return [""]
        tolerant = isinstance(config, NumericMatchReward) and config.absolute_tolerance > 0.0
        if not tolerant and _chance(text) >= WRONG_SHARE:
            return []
        # On the other side of 0: no relative tolerance (below 1) reaches it.
        wrong = WRONG_NUMBER.removeprefix("-") if text.lstrip().startswith(("-", "[-")) else WRONG_NUMBER
        return [self._answer(verifier, wrong)]

    def _ask(self, verifier: int, trials: Sequence[Trial]) -> list[Outcome]:
        if not trials:
            return []
        answers = [answer for trial in trials for answer in (*trial.right, *trial.wrong)]
        references = [trial.reference for trial in trials for _ in range(len(trial.right) + len(trial.wrong))]
        scores = self._scores(verifier, answers, references)
        outcomes, start = [], 0
        for trial in trials:
            middle, end = start + len(trial.right), start + len(trial.right) + len(trial.wrong)
            outcomes.append(_outcome(scores, range(start, middle), range(middle, end)))
            start = end
        return outcomes

    def _scores(self, verifier: int, answers: Sequence[str], references: Sequence[Any]) -> Scores:
        config = self.configs[verifier]
        if verifier not in self.rules:
            self.rules[verifier] = _build(config)
        extras = [{config.reference_key: reference} for reference in references]
        context = RewardContext([], [], extras, 0, poll=self.poll)
        scores = self.rules[verifier]([], answers, context)
        assert isinstance(scores, Scores)
        return scores


def gold_findings(items: Sequence[PromptItem], rewards: Sequence[Any] = (), **limits: Any) -> list[Finding | None]:
    """Return one finding an item, None where nothing is wrong.

    Without rewards and limits, all calls of a process share one `GoldChecker`: its processes start once.

    Args:
        items: prompts.
        rewards, limits: as for `GoldChecker`.
    """
    checker = GoldChecker(rewards, **limits) if rewards or limits else _shared_checker(os.getpid())
    return checker.findings(items)


@functools.lru_cache(maxsize=1)
def _shared_checker(process_id: int) -> GoldChecker:
    """Return the checker of this process: one that another was forked from may hold pipes to the same workers."""
    return GoldChecker()


def _build(config: MatchReward) -> RewardFunction:
    # What an answer is cut from is not asked about: the ground truth stands for what was cut.
    whole = config.model_copy(update={"extract_pattern": None})
    if isinstance(whole, MathVerifyReward):
        return build_math_verify(whole)
    if isinstance(whole, NumericMatchReward):
        return build_numeric_match(whole)
    assert isinstance(whole, ExactMatchReward)
    return build_exact_match(whole)


def _outcome(scores: Scores, right: range, wrong: range) -> Outcome:
    causes = {scores.causes[index] for index in right}
    if any((scores[index] or 0.0) > 0.0 for index in wrong):
        return _rejected(ACCEPTS_WRONG)
    if any((scores[index] or 0.0) > 0.0 for index in right):
        return Outcome()
    if Cause.TIMEOUT in causes:
        return Outcome(unjudged=TOO_SLOW)
    if Cause.UNREADABLE_REFERENCE in causes:
        return _rejected("the verifier cannot read the ground truth")
    if Cause.ERROR in causes:
        return _rejected("the verifier fails on the ground truth")
    return _rejected("the verifier does not accept the ground truth as an answer")


def _rejected(detail: str) -> Outcome:
    return Outcome(Finding(Reason.GOLD_REJECTED, detail))


def _any_accepts(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of alternatives: one that is accepted is enough, unless a wrong answer is accepted too."""
    for outcome in outcomes:
        if outcome.finding is not None and outcome.finding.detail == ACCEPTS_WRONG:
            return outcome
    # Accepted, then not known, then rejected.
    return min(outcomes, key=lambda outcome: (outcome.finding is not None, outcome.unjudged is not None))


def _all_accept(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of several rewards: each that says something must accept."""
    return min(outcomes, key=lambda outcome: (outcome.finding is None, outcome.unjudged is not None))


def _chance(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return xxhash.xxh3_64_intdigest(text.encode()) / 2**64
