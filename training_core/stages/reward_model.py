"""Stage `reward_model`: learn from people's judgements how good an answer is.

The score is a scalar read at the answer's EOS. It is learned from pairs, by −log σ(r_chosen − r_rejected) (Bradley and
Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1), or from ratings of single answers. One optimizer step is
`batch_size` items; its loss is the sum over items divided by their number, however they are cut into micro-batches.

Afterwards the model must show that it is better than rules that read no answer (`reward_modelling/acceptance.py`): what
is trained against a reward model costs more than the reward model.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_core.config.reward_model import RewardModelConfig
from training_core.determinism import make_deterministic
from training_core.memory import release_free_memory
from training_core.models.heads import num_positions
from training_core.models.loading import load_tokenizer
from training_core.protocol.atomic import write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import tree_digest
from training_core.records import StageOutcome
from training_core.reward_modelling.acceptance import accept, metrics_of, stop_or_warn
from training_core.reward_modelling.data import RewardData, open_data
from training_core.reward_modelling.measure import measure_members
from training_core.reward_modelling.members import train_members
from training_core.reward_modelling.validation import split_pairs

ACCEPTANCE_FILE = "acceptance.json"


def run(context: StageContext) -> StageOutcome:
    """Train and save a reward model, and measure what was saved: that is what answers will be scored with.

    Raises:
        ConfigurationError: the model has no layers that an option asks for.
        DataError: rows that cannot be trained on.
        TrainingDivergedError: a gradient is not finite.
        EvaluationError: a validation score is not finite, all are equal, or scores depend on the batch; or the model is
            not accepted. Model and acceptance.json are in `outputs` then, too.
        PreemptedError: SIGTERM; state is saved.
    """
    make_deterministic()
    config = RewardModelConfig.model_validate(context.spec.config)
    source = context.input_path("model")
    data = open_data(context, config, load_tokenizer(source), num_positions(source))
    output = train_members(context, config, data)
    # The float32 weights and their optimizer state are gone before the saved ones are loaded.
    gc.collect()
    release_free_memory()
    context.progress(0, 1, "validate")
    scores, report = measure_members(output, data, config)
    acceptance = judge(context, config, data, scores)
    if numbers := metrics_of(acceptance):
        context.metrics.write(report["num_steps"] + 1, numbers)
    write_json(context.new_output(ACCEPTANCE_FILE), acceptance)
    stop_or_warn(acceptance, config.acceptance, context.directory.outputs_path)
    weights = tree_digest(output, suffix=".safetensors")
    summary = {"weights_sha256": weights, **report, "acceptance": acceptance}
    values = {name: report[name] for name in ("accuracy", "rmse") if name in report}
    context.progress(report["num_steps"], report["num_steps"], "done", **values)
    outputs = {"reward_model": f"outputs/{output.name}", ACCEPTANCE_FILE: f"outputs/{ACCEPTANCE_FILE}"}
    return StageOutcome(outputs=outputs, summary=summary)


def judge(
    context: StageContext, config: RewardModelConfig, data: RewardData, scores: Sequence[float]
) -> dict[str, Any]:
    """Return the acceptance report of the saved model from its validation scores.

    A difference of scores is the log-odds of a preference for one Bradley-Terry model; not for the common score of an
    ensemble, in units of standard deviations, nor for predicted ratings.
    """
    pairs = data.validation_pairs
    groups: list[str] = []
    if pairs is not None:
        numbers, names = pairs.group_numbers()
        groups = [names[number] for number in numbers]

    def given(name: str) -> Path | None:
        return context.input_path(name) if context.has_input(name) else None

    return accept(
        split_pairs(scores, pairs),
        groups,
        given("validation_pairs"),
        given("baselines"),
        config.acceptance,
        context.spec.seed,
        log_odds=config.num_members == 1 and not config.needs_feedback,
    )
