"""Stage `evaluate`: candidate and baselines on the same held-out prompts, in one process, with the same seeds.

The work is cut into units (answers of a model, its reward-model scores, its divergence). After each one the state is
saved as a checkpoint, so an evaluation that was stopped goes on with the next unit and ends in the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from training_core.config.evaluation import KL_METRIC, EvaluateStageConfig
from training_core.config.gate import REWARD_MODEL_METRIC
from training_core.data.prompts import read_prompts
from training_core.determinism import make_deterministic
from training_core.errors import ConfigurationError
from training_core.evaluation.generation import EnginePool, ModelSource
from training_core.evaluation.measures import measure_answers
from training_core.evaluation.samples import (
    EvaluationPrompt,
    ModelSamples,
    add_scores,
    load_state,
    save_state,
    write_table,
)
from training_core.evaluation.scores import CANDIDATE, CHAMPION, MODEL_NAMES, REFERENCE
from training_core.evaluation.scoring import RewardScorer, kl_to_reference
from training_core.evaluation.summary import describe_settings, summarise
from training_core.protocol.atomic import write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import weights_digest
from training_core.records import Message, PromptRow, StageOutcome

REWARD_MODEL_INPUT = "reward_model"


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is saved before the next one starts."""

    name: str
    work: Callable[[], None]


@dataclass
class Evaluation:
    """One run of the stage; `tables` grows unit by unit."""

    context: StageContext
    config: EvaluateStageConfig
    rows: list[PromptRow]
    prompts: list[EvaluationPrompt]
    sources: list[ModelSource]
    """Models that are sampled, reference first; those equal to an earlier one are left out."""
    tables: dict[str, ModelSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = EnginePool(self.config, self.sources, self.rows)
        self._scorer: RewardScorer | None = None
        self._unit = 0

    @property
    def reference(self) -> ModelSource:
        return self.sources[0]

    def units(self) -> list[Unit]:
        """Return all units; those of one kind follow each other, so that few models are in memory at a time."""
        units = [Unit(f"answers_{s.name}", lambda s=s: self.answer(s)) for s in self.sources]  # type: ignore[misc]
        if self.config.evaluation.reward_model:
            units += [Unit(f"reward_model_{s.name}", lambda s=s: self.score(s)) for s in self.sources]  # type: ignore[misc]
        if self.config.evaluation.kl:
            units += [Unit(f"kl_{s.name}", lambda s=s: self.diverge(s)) for s in self.sources]  # type: ignore[misc]
        return units

    def run(self) -> None:
        """Do the units that no checkpoint holds yet."""
        store = self.context.checkpoints(keep_last=1)
        latest = store.latest()
        done = latest.step if latest else 0
        self.tables = load_state(latest.path) if latest else {}
        self.context.timings.truncate_after(done)
        units = self.units()
        try:
            for number, unit in enumerate(units[done:], start=done + 1):
                self._unit = number
                started = time.monotonic()
                self.progress(0)
                unit.work()
                self.context.stop.raise_if_swallowed()
                store.save(number, lambda directory: save_state(directory, self.tables))
                self.context.timings.write(number, {f"time/{unit.name}_seconds": time.monotonic() - started})
        finally:
            self.engines.close()

    def progress(self, num_prompts: int) -> None:
        units = self.units()
        total = len(units) * len(self.rows)
        done = (self._unit - 1) * len(self.rows) + num_prompts
        self.context.progress(done, total, units[self._unit - 1].name)

    def answer(self, source: ModelSource) -> None:
        table = self.engines.sample(source, self.context.spec.seed, self.progress)
        rules = self.config.evaluation.metrics
        measure_answers(source.name, table, self.rows, self.prompts, rules, self.config.max_new_tokens)
        self.tables[source.name] = table

    def score(self, source: ModelSource) -> None:
        self.engines.close()
        if self._scorer is None:
            directory = self.context.input_path(REWARD_MODEL_INPUT)
            self._scorer = RewardScorer(directory, self.config.evaluation.max_tokens_per_batch)
        table = self.tables[source.name]
        scores = self._scorer.score(source, table, self.rows, self.prompts)
        add_scores(source.name, table, REWARD_MODEL_METRIC, scores, self.prompts)

    def diverge(self, source: ModelSource) -> None:
        self.engines.close()
        self._scorer = None
        table = self.tables[source.name]
        if source.name == REFERENCE:
            scores: list[float | None] = [0.0] * len(table.samples)
        else:
            scores = kl_to_reference(
                source,
                self.reference,
                table,
                self.rows,
                dtype=self.config.rollout.dtype,
                temperature=self.config.evaluation.sampling.temperature,
                max_tokens_per_batch=self.config.evaluation.max_tokens_per_batch,
            )
        add_scores(source.name, table, KL_METRIC, scores, self.prompts)


def run(context: StageContext) -> StageOutcome:
    """Evaluate and write `evaluation/evaluation.json` and `evaluation/samples.parquet`.

    Raises:
        ConfigurationError: the config asks for a reward model that the spec does not give.
        DataError: prompts cannot be read or do not fit the models.
        EvaluationError: a score is not finite; names prompt and metric.
        WeightVersionError: the engine does not hold the weights it was given.
    """
    make_deterministic()
    config = EvaluateStageConfig.model_validate(context.spec.config)
    if config.evaluation.reward_model and not context.has_input(REWARD_MODEL_INPUT):
        raise ConfigurationError(
            "evaluation.reward_model is true, but this pipeline trains no reward model. Set it to false, or add a "
            "reward_model section"
        )
    rows, prompts = read_evaluation_prompts(context.input_path("eval_prompts"), config.evaluation.num_prompts)
    names = [REFERENCE, CANDIDATE, *([CHAMPION] if context.has_input(CHAMPION) else [])]
    sources = [ModelSource.of(name, context.input_path(name)) for name in names]
    distinct = [s for i, s in enumerate(sources) if not any(s.equals(earlier) for earlier in sources[:i])]
    evaluation = Evaluation(context, config, rows, prompts, distinct)
    evaluation.run()
    tables = with_equal_models(evaluation.tables, sources)
    reward_model = weights_digest(context.input_path(REWARD_MODEL_INPUT)) if config.evaluation.reward_model else None
    settings = describe_settings(config, rows, sources[0], reward_model, context.spec.seed)
    metrics = config.evaluation.metric_names()
    report = summarise(settings, sorted(sources, key=lambda s: MODEL_NAMES.index(s.name)), tables, prompts, metrics)
    output = context.new_output("evaluation")
    output.mkdir()
    write_table(output / "samples.parquet", tables, prompts, metrics)
    write_json(output / "evaluation.json", report)
    total = len(evaluation.units()) * len(rows)
    context.progress(total, total, "done")
    models = {
        name: {"weights_sha256": entry["weights_sha256"], **entry["means"]} for name, entry in report["models"].items()
    }
    return StageOutcome(
        outputs={"evaluation": "outputs/evaluation"},
        summary={
            "models": models,
            "evaluation_digest": report["evaluation_digest"],
            "num_prompts": len(rows),
            "num_samples_per_prompt": config.evaluation.samples_per_prompt,
        },
    )


def with_equal_models(tables: dict[str, ModelSamples], sources: list[ModelSource]) -> dict[str, ModelSamples]:
    """Return tables for all models, in their fixed order; a model equal to a sampled one has the same answers."""
    complete = dict(tables)
    for index, source in enumerate(sources):
        if source.name not in complete:
            twin = next(earlier for earlier in sources[:index] if source.equals(earlier))
            complete[source.name] = complete[twin.name].copy()
    return {name: complete[name] for name in MODEL_NAMES if name in complete}


def read_evaluation_prompts(path: Path, limit: int | None) -> tuple[list[PromptRow], list[EvaluationPrompt]]:
    """Return the first `limit` prompts (None: all) for models, and as the samples table shows them."""
    rows = read_prompts(path)[:limit]
    groups = pq.read_table(path, columns=["group_id"]).column("group_id").to_pylist()
    prompts = [
        EvaluationPrompt(row.prompt_id, group, show_messages(row.prompt))
        for row, group in zip(rows, groups[: len(rows)], strict=True)
    ]
    return rows, prompts


def show_messages(messages: list[Message]) -> str:
    """Return a prompt for people: the text of a single user message, else one `role: text` block a message.

    >>> show_messages([Message(role="user", content="Hello")])
    'Hello'
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
