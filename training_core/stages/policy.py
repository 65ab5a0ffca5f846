"""Stage `policy`: train the policy with the algorithm of the config. docs/stages.md has inputs and outputs."""

from __future__ import annotations

from training_core.config.algorithms import PREFERENCE_NAMES, PolicyStageConfig
from training_core.config.preference import PreferenceStageConfig
from training_core.determinism import make_deterministic
from training_core.protocol.context import StageContext
from training_core.records import StageOutcome


def run(context: StageContext) -> StageOutcome:
    """Train and save the policy, and say what came out.

    Raises:
        TidegateError: of the type that says what went wrong; see training_core/errors.py.
    """
    make_deterministic()
    config = context.spec.config
    if config["algorithm"]["name"] in PREFERENCE_NAMES:
        from training_core.preference import stage as preference

        return preference.train(context, PreferenceStageConfig.model_validate(config).algorithm)
    from training_core.rl import stage as online

    return online.run(context, PolicyStageConfig.model_validate(config))
