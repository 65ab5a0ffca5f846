"""Stage `reward_model`: learn from people's judgements how good an answer is.

The score is a scalar read at the answer's EOS. It is learned from pairs, by −log σ(r_chosen − r_rejected) (Bradley and
Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1), or from ratings of single answers. One optimizer step is
`batch_size` items; its loss is the sum over items divided by their number, however they are cut into micro-batches.
"""

from __future__ import annotations

import gc

from training_core.config.reward_model import RewardModelConfig
from training_core.determinism import make_deterministic
from training_core.memory import release_free_memory
from training_core.models.heads import num_positions
from training_core.models.loading import load_tokenizer
from training_core.protocol.context import StageContext
from training_core.protocol.digests import tree_digest
from training_core.records import StageOutcome
from training_core.reward_modelling.data import open_data
from training_core.reward_modelling.measure import measure_members
from training_core.reward_modelling.members import train_members


def run(context: StageContext) -> StageOutcome:
    """Train and save a reward model, and measure what was saved: that is what answers will be scored with.

    Raises:
        ConfigurationError: the model has no layers that an option asks for.
        DataError: rows that cannot be trained on.
        TrainingDivergedError: a gradient is not finite.
        EvaluationError: a validation score is not finite, all are equal, or scores depend on the batch.
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
    report = measure_members(output, data, config)
    summary = {"weights_sha256": tree_digest(output, suffix=".safetensors"), **report}
    values = {name: report[name] for name in ("accuracy", "rmse") if name in report}
    context.progress(report["num_steps"], report["num_steps"], "done", **values)
    return StageOutcome(outputs={"reward_model": f"outputs/{output.name}"}, summary=summary)
