"""How a mixture-of-experts policy keeps its experts in use, and its routing in step."""

from __future__ import annotations

from pydantic import Field, model_validator

from training_core.config.base import Config


class MoeConfig(Config):
    """Router losses and routing replay; for policies that route tokens to experts.

    Both need a forward pass of the policy before the first update of a step, which algorithms with one update a
    rollout do not make otherwise. Rollout engines do not hand out their routing.
    """

    auxiliary_coefficient: float = Field(default=0.001, ge=0.0)
    """Weight of the load-balancing loss, reward units: E times the sum over experts of their share of the update's
    tokens and the router's mean probability for them; the number of chosen experts when tokens are spread evenly.
    Shares are counted over the whole update before its first backward pass, in the policy as it was before the step.
    Default: 0.001, what Mixtral and Qwen3-MoE are configured with; 0 leaves the loss out."""
    z_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the router z-loss, which keeps router logits small, as a multiple of the load-balancing loss's.
    Default: none; ST-MoE (Zoph et al. 2022, arXiv 2202.08906) trains with a tenth of it."""
    replay: bool = False
    """Send each token in the updates to the experts that it went to before the first update, so that ratios compare the
    same experts. Default: false; sequence-level losses (gspo) are stable without it (Zheng et al. 2025, arXiv
    2507.18071, section 5.3), token-level ones (clipped_surrogate) often are not."""

    @model_validator(mode="after")
    def _z_needs_its_unit(self) -> MoeConfig:
        if self.z_coefficient > 0.0 and self.auxiliary_coefficient == 0.0:
            raise ValueError(
                "z_coefficient is a multiple of auxiliary_coefficient, which is 0: it would do nothing. Set "
                "auxiliary_coefficient above 0"
            )
        return self

    @property
    def needs_pass_before(self) -> bool:
        """Whether the policy's routing is needed before the first update."""
        return self.replay or self.auxiliary_coefficient > 0.0
