"""What is measured on the held-out prompts, and how answers are sampled for it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from training_core.config.base import Config
from training_core.config.gate import REWARD_MODEL_METRIC
from training_core.config.rewards import RuleConfig, check_plain_metrics, check_rules_fit
from training_core.config.rollout import RolloutConfig

LENGTH_METRIC = "length_tokens"
TRUNCATED_METRIC = "truncated"
REPETITION_METRIC = "repetition"
SAME_OPENING_METRIC = "same_opening"
KL_METRIC = "kl_to_reference"
ALWAYS_MEASURED = (LENGTH_METRIC, TRUNCATED_METRIC, REPETITION_METRIC, SAME_OPENING_METRIC)
PAIRWISE_METRICS = (SAME_OPENING_METRIC,)
"""Metrics whose mean is one over pairs of answers, so that values of two prompts are not independent."""
RESERVED_NAMES = (*ALWAYS_MEASURED, KL_METRIC, REWARD_MODEL_METRIC, "num_tokens")


class EvaluationSampling(Config):
    """How answers are sampled. The same for every model, with the same seeds."""

    temperature: float = Field(default=0.7, ge=0.0, le=10.0)
    """Divides the logits; 0 takes the most probable token. Default 0.7, a usual setting of chat servers."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Smallest probability mass that is kept. Default: 1, all of it."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens, the end-of-turn token included. Default: that of `rollout`."""


class EvaluationConfig(Config):
    """What is measured on the held-out prompts, besides `length_tokens`, `truncated`, `repetition`, `same_opening`."""

    metrics: list[RuleConfig] = Field(default_factory=list)
    """Gold metrics, independent of the reward model: rules of the kinds that rewards have. The metric's name is the
    rule's `name`, by default its kind; weights play no part."""
    reward_model: bool = False
    """Score answers with the pipeline's reward model as well: metric `reward_model_score`, in standard deviations of
    the scores on its held-out pairs, by the rules of the reward of that kind and in the number format in which it was
    saved (`reward_model.dtype`). A conversation longer than its positions has no score (null, counted in
    `num_missing`)."""
    kl: bool = True
    """Estimate the divergence from the reference: metric `kl_to_reference`, nats an answer. Costs one more forward
    pass of model and reference over every answer."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Use only the first so many of the held-out prompts. Default: all."""
    samples_per_prompt: int = Field(default=1, ge=1, le=256)
    """Answers sampled for each prompt; a prompt's score is their mean. Default: 1."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How answers are sampled."""
    prompts_per_batch: int = Field(default=128, ge=1)
    """Prompts handed to the engine at a time: progress against speed. Default: 128."""
    max_tokens_per_batch: int = Field(default=1024, ge=1)
    """Most tokens, padding included, in one forward pass of reward model or KL estimate. Default: 1024; on a CPU with
    135 M parameters, 4096 took a seventh longer, and needs four times the memory for activations."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        check_plain_metrics(self.metrics)
        names = [metric.part_name for metric in self.metrics]
        for name in names:
            if name in RESERVED_NAMES:
                raise ValueError(f"metric name {name!r} is taken by a built-in measure: give the rule another `name`")
            if names.count(name) > 1:
                raise ValueError(f"two metrics are called {name!r}: give each a `name` of its own")
        return self

    def metric_names(self) -> list[str]:
        """Return the names of all metrics that the evaluation will hold, in the order of its columns."""
        names = [metric.part_name for metric in self.metrics]
        if self.reward_model:
            names.append(REWARD_MODEL_METRIC)
        if self.kl:
            names.append(KL_METRIC)
        return [*names, *ALWAYS_MEASURED]


class EvaluateStageConfig(Config):
    """The config of stage `evaluate`: two sections of the pipeline's config."""

    evaluation: EvaluationConfig
    """What is measured."""
    rollout: RolloutConfig
    """The engine; temperature and length come from `evaluation.sampling`. The KL estimate has its number format."""

    @property
    def max_new_tokens(self) -> int:
        """Longest answer in tokens: that of `evaluation.sampling`, else that of `rollout`."""
        return self.evaluation.sampling.max_new_tokens or self.rollout.max_new_tokens

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        check_rules_fit(self.evaluation.metrics, self.max_new_tokens)
        return self
