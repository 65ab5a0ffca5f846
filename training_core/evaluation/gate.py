"""The gate: from scores to a verdict. Pure; nothing here reads a file.

Order: identical weights are a FAIL (training changed nothing). Then the preconditions; if one is violated the verdict
is ERROR, whatever the numbers look like. Then the rules: one ERROR makes the verdict ERROR, else one FAIL makes it
FAIL, else one INCONCLUSIVE makes it INCONCLUSIVE, else it is PASS.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from training_core.config.gate import GateConfig, guard_name
from training_core.errors import ConfigurationError, EvaluationError
from training_core.evaluation.gate_guards import judge_guard
from training_core.evaluation.gate_rules import (
    RuleContext,
    RuleRecord,
    finite,
    judge_champion,
    judge_primary,
)
from training_core.evaluation.scores import CANDIDATE, CHAMPION, REFERENCE, EvaluationScores, ModelScores
from training_core.records import Record, Verdict

GATE_SCHEMA_VERSION = 1
RULE_VERSION = "standard-1"
IDENTICAL_WEIGHTS = "identical_weights"
SEVERITY = (Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE)


class Precondition(Record):
    """Something that must be so before the numbers are looked at."""

    name: str
    holds: bool
    detail: str


class GateReport(Record):
    """gate.json: the verdict and every number behind it."""

    schema_version: int = GATE_SCHEMA_VERSION
    rule_version: str = RULE_VERSION
    verdict: Verdict
    reasons: list[str]
    """`code: sentence`, one for each thing that stood in the way; empty for a pass."""
    primary: RuleRecord | None = None
    """Null when a precondition was violated or nothing was trained."""
    champion: RuleRecord | None = None
    """Null when there is no champion, too."""
    guards: list[RuleRecord] = Field(default_factory=list)
    preconditions: list[Precondition] = Field(default_factory=list)
    num_prompts: int
    num_clusters: int
    num_samples_per_prompt: int
    weights_sha256: dict[str, str]
    """Digest of each model's weights; the candidate's is the only one that may be registered on this verdict."""
    evaluation_digest: str
    seed: int
    config: dict[str, object]
    """The gate's config: metric, gain, alpha, guards."""


def judge(scores: EvaluationScores, config: GateConfig, *, seed: int) -> GateReport:
    """Return the verdict on the candidate.

    Args:
        scores: of candidate, reference and, when there is one, champion.
        config: the rule.
        seed: of the bootstrap; the same seed gives the same report.

    Raises:
        ConfigurationError: the config names a metric that the evaluation does not have.
    """
    _check_metric_names(scores, config)
    if _is_identical(scores):
        reason = f"{IDENTICAL_WEIGHTS}: training changed nothing, candidate and reference have the same weights"
        return _report(scores, config, seed, Verdict.FAIL, [reason])
    preconditions = check_preconditions(scores, config)
    violated = [f"{p.name}: {p.detail}" for p in preconditions if not p.holds]
    if violated:
        return _report(scores, config, seed, Verdict.ERROR, violated, preconditions=preconditions)
    context = RuleContext(scores, config, seed)
    primary = _decided(lambda: judge_primary(context), "primary", config.primary.metric)
    champion = None
    if CHAMPION in scores.models:
        champion = _decided(lambda: judge_champion(context), "champion", config.primary.metric)
    guards = [
        _decided(lambda guard=guard: judge_guard(context, guard), guard_name(guard), guard.metric)  # type: ignore[misc]
        for guard in config.guards
    ]
    rules = [primary, *([champion] if champion else []), *guards]
    verdict = next((level for level in SEVERITY if any(r.verdict is level for r in rules)), Verdict.PASS)
    reasons = [f"{r.name}.{r.reason}: {r.detail}" for r in rules if r.verdict is not Verdict.PASS]
    return _report(
        scores,
        config,
        seed,
        verdict,
        reasons,
        preconditions=preconditions,
        primary=primary,
        champion=champion,
        guards=guards,
    )


def check_preconditions(scores: EvaluationScores, config: GateConfig) -> list[Precondition]:
    """Check baselines, items, sizes, coverage and finiteness; later ones are left out once models do not line up."""
    found = [_baselines(scores)]
    if not found[0].holds:
        return found
    found.append(_same_items(scores))
    if not found[-1].holds:
        return found
    candidate = scores.models[CANDIDATE]
    num_prompts, num_clusters = len(candidate.prompt_ids), len(set(candidate.group_ids))
    found.append(_at_least("enough_prompts", num_prompts, config.min_prompts, "prompts", "gate.min_prompts"))
    found.append(
        _at_least("enough_clusters", num_clusters, config.min_clusters, "groups of prompts", "gate.min_clusters")
    )
    found.append(_finite_scores(scores, config))
    found.append(_coverage(scores, config))
    return found


def metrics_used(config: GateConfig, name: str) -> list[str]:
    """Return the metrics of model `name` that the rules look at."""
    if name == CHAMPION:
        return [config.primary.metric]
    return list(dict.fromkeys([config.primary.metric, *(guard.metric for guard in config.guards)]))


def _check_metric_names(scores: EvaluationScores, config: GateConfig) -> None:
    known = set(scores.metric_names).union(*(model.metrics for model in scores.models.values()))
    unknown = [name for name in metrics_used(config, CANDIDATE) if name not in known]
    if unknown:
        raise ConfigurationError(
            f"the gate looks at {', '.join(map(repr, unknown))}, which the evaluation did not measure. "
            f"Metrics there: {', '.join(sorted(known)) or 'none'}. Change gate.primary.metric or the metrics of "
            "gate.guards, or add it to evaluation.metrics"
        )


def _is_identical(scores: EvaluationScores) -> bool:
    candidate, reference = scores.models.get(CANDIDATE), scores.models.get(REFERENCE)
    return bool(candidate and reference and candidate.weights_sha256 == reference.weights_sha256)


def _baselines(scores: EvaluationScores) -> Precondition:
    missing = [name for name in (CANDIDATE, REFERENCE) if name not in scores.models]
    detail = f"the evaluation has no {' and no '.join(missing)}" if missing else "candidate and reference are there"
    return Precondition(name="missing_baseline" if missing else "baselines", holds=not missing, detail=detail)


def _same_items(scores: EvaluationScores) -> Precondition:
    candidate = scores.models[CANDIDATE]
    problem = ""
    if len(set(candidate.prompt_ids)) != len(candidate.prompt_ids):
        problem = "the candidate has a prompt twice"
    for name, model in scores.models.items():
        if model.prompt_ids != candidate.prompt_ids or model.group_ids != candidate.group_ids:
            shared = len(set(model.prompt_ids) & set(candidate.prompt_ids))
            problem = (
                f"candidate and {name} were not measured on the same prompts in the same order: "
                f"{len(candidate.prompt_ids)} and {len(model.prompt_ids)} prompts, {shared} in common"
            )
        elif _shapes(model) - {(len(model.prompt_ids), _num_samples(candidate))}:
            problem = f"{name} does not have {_num_samples(candidate)} answers for each prompt"
    return Precondition(name="same_items", holds=not problem, detail=problem or "the same prompts for every model")


def _shapes(model: ModelScores) -> set[tuple[int, ...]]:
    return {array.shape for metric in model.metrics.values() for array in (metric.values, metric.present)}


def _num_samples(model: ModelScores) -> int:
    return next((m.values.shape[1] for m in model.metrics.values() if m.values.ndim == 2), 0)


def _at_least(name: str, number: int, minimum: int, what: str, key: str) -> Precondition:
    return Precondition(name=name, holds=number >= minimum, detail=f"{number} {what} ({key} allows at least {minimum})")


def _finite_scores(scores: EvaluationScores, config: GateConfig) -> Precondition:
    problems = [
        f"{metrics[metric].num_not_finite} of {name}'s {metric} scores are NaN or infinite"
        for name, metrics in _metrics_by_model(scores)
        for metric in metrics_used(config, name)
        if metric in metrics and metrics[metric].num_not_finite
    ]
    return Precondition(
        name="finite_scores", holds=not problems, detail="; ".join(problems) or "all measured scores are finite"
    )


def _coverage(scores: EvaluationScores, config: GateConfig) -> Precondition:
    problems = []
    for name, metrics in _metrics_by_model(scores):
        for metric in metrics_used(config, name):
            share = metrics[metric].coverage if metric in metrics else 0.0
            if share < config.min_coverage:
                problems.append(f"{name} has {metric} scores for {100 * share:.2f} % of its answers")
    detail = "; ".join(problems) or "scores are complete"
    allowed = f"gate.min_coverage allows at least {100 * config.min_coverage:.2f} %"
    return Precondition(name="coverage", holds=not problems, detail=f"{detail} ({allowed})")


def _metrics_by_model(scores: EvaluationScores):  # type: ignore[no-untyped-def]
    return [(name, model.metrics) for name, model in scores.models.items()]


def _decided(rule: Callable[[], RuleRecord], name: str, metric: str) -> RuleRecord:
    """Return the rule's record, or an ERROR in its place when its numbers came out as NaN or infinite."""
    try:
        record = rule()
        if finite(record):
            return record
        problem = "a number of this rule is NaN or infinite"
    except EvaluationError as error:
        problem = str(error)
    kind = name if name in ("primary", "champion") else name.rsplit(".", 1)[-1]
    return RuleRecord.model_validate(
        {
            "name": name,
            "kind": kind,
            "metric": metric,
            "baseline": CHAMPION if name == CHAMPION else REFERENCE,
            "verdict": Verdict.ERROR,
            "reason": "not_computable",
            "detail": f"{metric}: {problem}",
        }
    )


def _report(
    scores: EvaluationScores,
    config: GateConfig,
    seed: int,
    verdict: Verdict,
    reasons: list[str],
    *,
    preconditions: list[Precondition] | None = None,
    primary: RuleRecord | None = None,
    champion: RuleRecord | None = None,
    guards: list[RuleRecord] | None = None,
) -> GateReport:
    candidate = scores.models.get(CANDIDATE)
    return GateReport(
        verdict=verdict,
        reasons=reasons,
        primary=primary,
        champion=champion,
        guards=guards or [],
        preconditions=preconditions or [],
        num_prompts=len(candidate.prompt_ids) if candidate else 0,
        num_clusters=len(set(candidate.group_ids)) if candidate else 0,
        num_samples_per_prompt=_num_samples(candidate) if candidate else 0,
        weights_sha256={name: model.weights_sha256 for name, model in scores.models.items()},
        evaluation_digest=scores.evaluation_digest,
        seed=seed,
        config=config.model_dump(mode="json"),
    )
