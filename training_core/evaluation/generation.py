"""Answers of several models to the same prompts, with the same settings and seeds, from one engine where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from training_core.config.evaluation import EvaluateStageConfig
from training_core.evaluation.samples import ModelSamples, Sample
from training_core.models.chat import decode_answer, encode_prompt
from training_core.models.loading import DTYPES, load_causal_lm, load_tokenizer, tokenizer_digest
from training_core.models.lora import merged_parameters
from training_core.protocol.atomic import read_json
from training_core.protocol.digests import config_digest, weights_digest
from training_core.records import PromptRow
from training_core.rollout.base import (
    RolloutEngine,
    RolloutRequest,
    SamplingSettings,
    check_rollouts,
    hand_over_weights,
)
from training_core.rollout.build import build_engine, read_eos_token_ids
from training_core.seeding import derive_seed

NOT_ARCHITECTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


@dataclass(frozen=True)
class ModelSource:
    """A model to evaluate."""

    name: str
    """`candidate`, `reference` or `champion`."""
    directory: Path
    weights_sha256: str
    tokenizer_sha256: str
    """Of the tokenizer's files, chat template included."""
    architecture_sha256: str
    """Of config.json without what does not change the computation, and of the tokens that end an answer."""

    @classmethod
    def of(cls, name: str, directory: Path) -> ModelSource:
        config = {k: v for k, v in read_json(directory / "config.json").items() if k not in NOT_ARCHITECTURE}
        return cls(
            name=name,
            directory=directory,
            weights_sha256=weights_digest(directory),
            tokenizer_sha256=tokenizer_digest(directory),
            architecture_sha256=config_digest({"config": config, "eos": read_eos_token_ids(directory)}),
        )

    def shares_engine_with(self, other: ModelSource) -> bool:
        """Return whether one engine can hold either model's weights."""
        mine = (self.architecture_sha256, self.tokenizer_sha256)
        return mine == (other.architecture_sha256, other.tokenizer_sha256)

    def equals(self, other: ModelSource) -> bool:
        """Return whether both would give the same answers: same weights, architecture and tokenizer."""
        return self.shares_engine_with(other) and self.weights_sha256 == other.weights_sha256


class EnginePool:
    """Holds at most one engine; models of one architecture and tokenizer share it by handing over their weights.

    Args:
        config: engine and sampling.
        sources: all models of the evaluation, in order. The engine of a group is built from the group's first model,
            also when an earlier attempt has sampled that one already.
        rows: the prompts.
    """

    def __init__(self, config: EvaluateStageConfig, sources: Sequence[ModelSource], rows: Sequence[PromptRow]) -> None:
        self._config = config
        self._sources = list(sources)
        self._rows = rows
        self._engine: RolloutEngine | None = None
        self._owner: ModelSource | None = None

    def engine_for(self, source: ModelSource, prompt_ids: Sequence[Sequence[int]]) -> RolloutEngine:
        if self._engine is not None and self._owner is not None and self._owner.shares_engine_with(source):
            return self._engine
        self.close()
        self._owner = next(other for other in self._sources if other.shares_engine_with(source))
        self._engine = build_engine(
            self._config.rollout,
            self._owner.directory,
            max_prompt_tokens=max(map(len, prompt_ids)),
            max_new_tokens=self._config.max_new_tokens,
        )
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._owner = None, None

    def sample(self, source: ModelSource, seed: int, report: Callable[[int], None]) -> ModelSamples:
        """Return the answers of one model to all prompts.

        The seed of an answer depends on the run's seed, the prompt's place and the sample's index: it is the same for
        every model.

        Args:
            source: the model.
            seed: the run's seed.
            report: told the number of prompts that are answered.

        Raises:
            WeightVersionError: the engine does not hold this model's weights.
            DataError: a prompt does not fit the model's template or context.
        """
        tokenizer = load_tokenizer(source.directory)
        prompt_ids = [encode_prompt(tokenizer, row.prompt) for row in self._rows]
        engine = self.engine_for(source, prompt_ids)
        version = self._sources.index(source) + 1
        model = load_causal_lm(source.directory, DTYPES[self._config.rollout.dtype])
        weights = hand_over_weights(engine, merged_parameters(model), version)
        del model
        samples: list[Sample] = []
        size = self._config.evaluation.prompts_per_batch
        for start in range(0, len(self._rows), size):
            indices = range(start, min(start + size, len(self._rows)))
            requests = self._requests(indices, prompt_ids, seed)
            rollouts = engine.generate(requests, sampling_settings(self._config))
            check_rollouts(rollouts, requests, version, weights.sha256)
            places = [index for index in indices for _ in range(self._config.evaluation.samples_per_prompt)]
            for place, rollout in zip(places, rollouts, strict=True):
                text = decode_answer(tokenizer, rollout.answer_ids)
                samples.append(Sample(place, rollout.sample_index, rollout.token_ids, text, rollout.stop_reason))
            report(indices.stop)
        return ModelSamples(samples)

    def _requests(self, indices: range, prompt_ids: Sequence[Sequence[int]], seed: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                prompt_id=self._rows[index].prompt_id,
                sample_index=sample,
                prompt_ids=tuple(prompt_ids[index]),
                seed=derive_seed(seed, "evaluation", index, sample),
            )
            for index in indices
            for sample in range(self._config.evaluation.samples_per_prompt)
        ]


def sampling_settings(config: EvaluateStageConfig) -> SamplingSettings:
    sampling = config.evaluation.sampling
    return SamplingSettings(
        max_new_tokens=config.max_new_tokens, temperature=sampling.temperature, top_p=sampling.top_p
    )
