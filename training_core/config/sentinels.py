"""What watches a training run, and what each watcher does when it sees something.

Each sentinel reads one or two metrics of every step; docs/metrics.md says what they measure. A step that does not
report a metric is within that sentinel's limit, so one whose metric a trainer never reports is silent.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training_core.config.base import Config

Action = Literal["warn", "stop", "roll_back", "off"]


class Sentinel(Config):
    """What all sentinels but `non_finite` have."""

    action: Action = "warn"
    """What an alarm does. `warn`: a row in alarms.jsonl and a line in the log. `stop`: these, and the stage ends with
    exit code 5. `roll_back`: training goes on from the newest checkpoint with changed knobs (see `roll_back`). `off`:
    not watched. Default: warn, since a limit that suits every model is not known."""
    after_step: int = Field(default=0, ge=0)
    """Steps at the start that do not count. Default: 0."""


class PatientSentinel(Sentinel):
    """A sentinel that waits for several steps in a row beyond its limit."""

    patience_steps: int = Field(default=3, ge=1)
    """Steps in a row that have to be beyond the limit. Default: 3, so that one odd batch is no alarm."""


class NonFiniteSentinel(Config):
    """A loss, gradient or metric that is NaN or infinite. Losses and gradients are seen before the optimizer step."""

    action: Literal["stop", "roll_back"] = "stop"
    """What happens then; it cannot be off, nor only a warning: there is no update to go on with. Default: stop, since
    the cause is more often a bug or bad data than bad luck."""


class GradNormSentinel(PatientSentinel):
    """The norm of the gradient before clipping (`policy/grad_norm`) is above a limit."""

    limit: float = Field(default=10.0, gt=0.0)
    """Highest norm. Default: 10, ten times the usual clipping norm of 1: from there on the direction is what one batch
    says and the step's length is the clipping's."""
    patience_steps: int = Field(default=1, ge=1)
    """Steps in a row that have to be beyond the limit. Default: 1, since one step is enough to do harm."""


class RewardStalledSentinel(Sentinel):
    """The mean reward (`reward/mean`) does not rise: its mean over the last `window_steps` steps is no better than over
    as many steps before them (fewer at the start, at least one)."""

    window_steps: int = Field(default=10, ge=1)
    """Steps of each of the two windows. Default: 10."""
    min_improvement: float = Field(default=0.0, ge=0.0)
    """How much more, in reward units, counts as better. Default: 0, anything more."""


class KlBudgetSentinel(PatientSentinel):
    """The policy has moved further from the reference than allowed. Silent while both limits are null, and where no KL
    is measured (`kl.placement: none` without `kl.measure`)."""

    action: Action = "stop"
    """What an alarm does; see the other sentinels. Default: stop, since a limit that was set is a budget."""
    limit_nats_per_token: float | None = Field(default=None, gt=0.0)
    """Highest KL(policy || reference), mean over tokens (`kl/policy_ref_nats`). Default: null, no limit."""
    limit_nats_per_answer: float | None = Field(default=None, gt=0.0)
    """Highest KL of whole answers, mean over answers (`kl/policy_ref_answer_nats`). Default: null, no limit. Gao et al.
    2022 (arXiv 2210.10760) plot gold reward over this quantity; where it turns depends on the reward model."""
    patience_steps: int = Field(default=1, ge=1)
    """Steps in a row that have to be beyond the limit. Default: 1: what was spent stays spent."""


class EntropyFloorSentinel(PatientSentinel):
    """The policy hardly explores any more: its entropy (`policy/entropy_nats`, a token) is below a limit."""

    limit_nats: float = Field(default=0.02, gt=0.0)
    """Lowest entropy. Default: 0.02, as if one token in 35 were a coin toss and the others sure; Cui et al. 2025 (arXiv
    2505.22617) show that what reinforcement learning gains is paid in entropy, and ends where none is left."""


class EntropyCeilingSentinel(PatientSentinel):
    """The policy falls apart: its entropy (`policy/entropy_nats`, a token) is above a limit."""

    limit_nats: float = Field(default=6.0, gt=0.0)
    """Highest entropy. Default: 6, as spread out as 400 equally likely tokens; text of a trained model has 0.1 to 3."""


class ClipFractionSentinel(PatientSentinel):
    """Many tokens give no gradient because their ratio left the clip range (`policy/clip_fraction`)."""

    limit_fraction: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Highest share of tokens. Default: 0.3: token-wise clipping has under 0.01 and GSPO, which clips whole answers,
    about 0.15 (Zheng et al. 2025, arXiv 2507.18071, figure 2); twice that says that updates are too large."""


class ZeroVarianceSentinel(PatientSentinel):
    """Most groups have equal scores, so there is little to learn from (`rollout/zero_variance_group_fraction`)."""

    limit_fraction: float = Field(default=0.8, gt=0.0, lt=1.0)
    """Highest share of groups. Default: 0.8: of five prompts only one teaches anything. Yu et al. 2025 (arXiv
    2503.14476, section 3.2) sample on until none is left."""


class TruncationSentinel(PatientSentinel):
    """Many answers are cut by the token limit (`rollout/truncated_fraction`)."""

    limit_fraction: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Highest share of answers. Default: 0.5: from there on, most scores are about the limit and not the answer (reward
    noise of truncation: arXiv 2503.14476, section 3.4)."""


class LengthDriftSentinel(PatientSentinel):
    """Answers become much longer or shorter than at the start (`rollout/length_mean_tokens`)."""

    limit_ratio: float = Field(default=2.0, gt=1.0)
    """Highest ratio to the mean length of the first steps; the lowest is one over it. Default: 2: length is the feature
    that reward models are exploited by first (Singhal et al. 2023, arXiv 2310.03716)."""
    num_first_steps: int = Field(default=5, ge=1)
    """Steps at the start that the length is compared with. Default: 5."""


class RewardErrorsSentinel(PatientSentinel):
    """Many answers have no score, or a reward failed on many (`reward/missing_fraction`, `reward/error_fraction`).

    The larger of the two counts: where a failed part is skipped (`on_missing: skip`), answers still have a score."""

    limit_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Highest share of answers. Default: 0.1: an answer without a score teaches nothing, and which ones those are is
    seldom chance."""
    patience_steps: int = Field(default=1, ge=1)
    """Steps in a row that have to be beyond the limit. Default: 1."""


class SamplerMismatchSentinel(Sentinel):
    """The rollout engine gives its tokens other probabilities than the trainer
    (`rollout/sampler_trainer_kl_nats`): it samples with other weights, another temperature or in another precision."""

    action: Action = "stop"
    """What an alarm does; see the other sentinels. Default: stop, since learning from answers of another model is not
    what the algorithm says: the step is given up before its first update, with the message in error.json and no row in
    alarms.jsonl."""
    limit_nats: float = Field(default=0.1, gt=0.0)
    """Highest KL, nats a token. Default: 0.1, a hundred times what bfloat16 costs."""


class ProxyUpGoldDownSentinel(Sentinel):
    """The reward trained on rises while a part that measures what is wanted falls: the reward is being exploited.

    Compares the older with the newer half of the last `window_steps` steps, in `reward/mean` and in the gold part. A
    rise or fall counts when it is larger than `min_standard_errors` standard errors of the difference. Overoptimisation
    as in Gao et al. 2022 (arXiv 2210.10760).
    """

    gold: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the part of the reward that is the better measure (`reward/<gold>_mean`); give it weight 0 to have it
    measured only. Default: null, not watched."""
    window_steps: int = Field(default=10, ge=4)
    """Steps compared, half against half. Default: 10."""
    min_standard_errors: float = Field(default=2.0, ge=0.0)
    """How clear both changes have to be. Default: 2, so that noise alone rarely looks like it."""


class RollBackConfig(Config):
    """What happens when a sentinel's action is `roll_back`: the newest checkpoint of the schedule (at the least that of
    the start, which is then saved) is loaded, what was written after it is dropped, and training goes on with other
    knobs; the same ones would lead to the same place. Sentinels with a window wait until it is full of new steps."""

    max_times: int = Field(default=2, ge=1)
    """Roll-backs of a run; the alarm after the last one stops it with exit code 5. Default: 2."""
    learning_rate_factor: float = Field(default=0.5, gt=0.0, le=1.0)
    """Factor on the learning rate at each roll-back. Default: 0.5."""
    kl_coefficient_factor: float = Field(default=2.0, ge=1.0)
    """Factor on the coefficient of the KL term, where there is one, at each roll-back. Default: 2."""

    @model_validator(mode="after")
    def _changes_something(self) -> RollBackConfig:
        if self.learning_rate_factor == 1.0 and self.kl_coefficient_factor == 1.0:
            raise ValueError(
                "learning_rate_factor and kl_coefficient_factor are both 1, so the same steps would be done again, to "
                "the bit. Set one of them to another value, or the sentinels' actions to stop"
            )
        return self


class SentinelsConfig(Config):
    """Every sentinel, and how a roll-back changes the run."""

    non_finite: NonFiniteSentinel = NonFiniteSentinel()
    """NaN or infinity. Default: stop."""
    grad_norm: GradNormSentinel = GradNormSentinel()
    """Large gradients. Default: warn above 10."""
    reward_stalled: RewardStalledSentinel = RewardStalledSentinel()
    """No progress. Default: warn after 10 steps."""
    kl_budget: KlBudgetSentinel = KlBudgetSentinel()
    """Distance to the reference. Default: no limit; stop when one is given."""
    entropy_floor: EntropyFloorSentinel = EntropyFloorSentinel()
    """Too little exploration. Default: warn below 0.02 nats a token."""
    entropy_ceiling: EntropyCeilingSentinel = EntropyCeilingSentinel()
    """Incoherence. Default: warn above 6 nats a token."""
    clip_fraction: ClipFractionSentinel = ClipFractionSentinel()
    """Updates that leave the clip range. Default: warn above 0.3."""
    zero_variance_groups: ZeroVarianceSentinel = ZeroVarianceSentinel()
    """Groups without a signal. Default: warn above 0.8."""
    truncation: TruncationSentinel = TruncationSentinel()
    """Answers cut by the token limit. Default: warn above 0.5."""
    length_drift: LengthDriftSentinel = LengthDriftSentinel()
    """Answers of another length than at the start. Default: warn beyond a factor of 2."""
    reward_errors: RewardErrorsSentinel = RewardErrorsSentinel()
    """Answers without a score. Default: warn above 0.1."""
    sampler_mismatch: SamplerMismatchSentinel = SamplerMismatchSentinel()
    """Sampler and trainer disagree. Default: stop above 0.1 nats a token."""
    proxy_up_gold_down: ProxyUpGoldDownSentinel = ProxyUpGoldDownSentinel()
    """The reward rises while a better measure falls. Default: not watched; warn when `gold` names one."""
    roll_back: RollBackConfig = RollBackConfig()
    """What a roll-back changes, and how often one may happen."""

    @model_validator(mode="after")
    def _floor_is_below_ceiling(self) -> SentinelsConfig:
        if self.entropy_floor.limit_nats >= self.entropy_ceiling.limit_nats:
            raise ValueError(
                f"entropy_floor.limit_nats ({self.entropy_floor.limit_nats}) must be below entropy_ceiling.limit_nats "
                f"({self.entropy_ceiling.limit_nats})"
            )
        return self

    @property
    def may_roll_back(self) -> bool:
        """Whether any sentinel's action is `roll_back`."""
        sentinels = (getattr(self, name) for name in type(self).model_fields)
        return any(getattr(sentinel, "action", None) == "roll_back" for sentinel in sentinels)
