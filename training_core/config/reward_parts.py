"""What every part of a reward has: its weight, its scale, and what a missing score means."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from training_core.config.base import Config

PART_NAME_PATTERN = r"^[a-z][a-z0-9_]*$"


class FixedScale(Config):
    """`(score - mean) / std` with numbers of your own: the same transform in every step."""

    kind: Literal["fixed"]
    """Chooses this scale: constants."""
    mean: float = 0.0
    """Score that becomes 0."""
    std: float = Field(gt=0.0)
    """Difference of scores that becomes 1."""


class RunningScale(Config):
    """`(score - mean) / std` over all present scores of the run so far, those of the same step included.

    The moments are updated first and the step's scores then scaled with them. Missing scores do not enter. While all
    scores seen are equal, the standard deviation counts as 1: they become 0. The moments are part of a checkpoint. With
    dynamic sampling they are updated after each rollout of a step, so that groups of its later rounds are scaled with
    other moments than those of its first.
    """

    kind: Literal["running"]
    """Chooses this scale: moments of the scores seen so far."""


ScaleConfig = Annotated[FixedScale | RunningScale, Field(discriminator="kind")]


class RewardPartConfig(Config):
    """Order of what happens to a score: `scale`, then `clip`, then `weight`. Metrics show it before all three."""

    weight: float = 1.0
    """Factor of this part in the sum of parts. Negative turns a reward into a penalty."""
    name: str | None = Field(default=None, pattern=PART_NAME_PATTERN)
    """Name in metrics (`reward/<name>_mean`). Default: the kind. Two parts of one kind need names."""
    scale: ScaleConfig | None = None
    """Puts the scores on another scale before they are bounded and weighted. Default: as they are."""
    clip: float | None = Field(default=None, gt=0.0)
    """Bound on the (scaled) score's absolute value. Default: none."""
    on_missing: Literal["missing", "skip"] = "missing"
    """What an answer gets when this part has no score for it. `missing`: no score at all; the answer is left out of the
    step. `skip`: the sum of its other parts, whose weights stay as they are, so it competes with answers that have this
    part as if they had gained nothing by it; an answer without any part still has no score."""

    @property
    def part_name(self) -> str:
        return self.name or str(getattr(self, "kind"))  # noqa: B009 -- `kind` is declared by each variant


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _has_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups < 1:
        raise ValueError("the pattern needs a group: what stands in its first (...) is compared")
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression (module `re`)."""

ExtractPattern = Annotated[str, AfterValidator(_has_group)]
"""A Python regular expression with at least one group."""


class MatchReward(RewardPartConfig):
    """What the rules that compare with a reference share."""

    reference_key: str = "reference"
    """Key of the reference in the prompt row's `extra`. A row without it has no score."""
    extract_pattern: ExtractPattern | None = None
    """Regular expression whose first group, at the last place of the answer where it matches, is what is compared; `.`
    matches line ends too. An answer where it does not match scores 0. Default: the whole answer."""
