"""Stage `gate`: read an evaluation, apply the rule, write the verdict.

The verdict is a value: this stage succeeds whatever it says. The `tidegate` command turns it into an exit code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training_core.config.gate import GateConfig
from training_core.errors import EvaluationError
from training_core.evaluation.gate import GateReport, judge
from training_core.evaluation.gate_rules import RuleRecord
from training_core.evaluation.samples import read_scores
from training_core.evaluation.scores import EvaluationScores
from training_core.evaluation.summary import EVALUATION_SCHEMA_VERSION
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.records import StageOutcome
from training_core.seeding import derive_seed


def run(context: StageContext) -> StageOutcome:
    """Judge and write `gate.json`.

    Raises:
        ConfigurationError: the config names a metric that was not measured.
        EvaluationError: the evaluation's files are unreadable or do not fit together.
    """
    config = GateConfig.model_validate(context.spec.config)
    scores = load_evaluation(context.input_path("evaluation"))
    report = judge(scores, config, seed=derive_seed(context.spec.seed, "gate_bootstrap"))
    write_json(context.new_output("gate.json"), report.model_dump(mode="json"))
    context.progress(1, 1, str(report.verdict))
    return StageOutcome(outputs={"gate.json": "outputs/gate.json"}, summary=summarise_report(report))


def load_evaluation(folder: Path) -> EvaluationScores:
    """Return the scores of an evaluation folder (evaluation.json and samples.parquet).

    Raises:
        EvaluationError: a file is missing, unreadable, of another schema version, or of other models.
    """
    try:
        report = read_json(folder / "evaluation.json")
        version, digest = report["schema_version"], report["evaluation_digest"]
        weights = {name: entry["weights_sha256"] for name, entry in report["models"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{folder} holds no readable evaluation.json: {error!r}") from error
    if version != EVALUATION_SCHEMA_VERSION:
        raise EvaluationError(
            f"{folder / 'evaluation.json'} has schema version {version}, this gate reads {EVALUATION_SCHEMA_VERSION}. "
            "Evaluate again"
        )
    return read_scores(folder / "samples.parquet", weights, digest)


def summarise_report(report: GateReport) -> dict[str, Any]:
    """Return what people and MLflow need: the verdict, its reasons and every rule with its numbers."""

    def dump(rule: RuleRecord | None) -> dict[str, Any] | None:
        return None if rule is None else rule.model_dump(mode="json")

    return {
        "verdict": str(report.verdict),
        "reasons": report.reasons,
        "primary": dump(report.primary),
        "champion": dump(report.champion),
        "guards": [dump(guard) for guard in report.guards],
        "num_prompts": report.num_prompts,
        "num_clusters": report.num_clusters,
        "weights_sha256": report.weights_sha256,
        "evaluation_digest": report.evaluation_digest,
    }
