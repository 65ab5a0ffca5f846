"""The config of the `check_data` stage."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training_core.config.base import Config

FormatName = Literal["auto", "pairs", "hh"]


class PreferenceFile(Config):
    """One file of preference rows."""

    path: str
    """JSONL (`.jsonl`, `.ndjson`, also `.gz`) or Parquet (`.parquet`)."""
    format: FormatName = "auto"
    """`pairs`: columns prompt, chosen, rejected (text or chat messages; without a prompt column the messages hold the
    prompt). `hh`: chosen and rejected are whole `Human:` / `Assistant:` transcripts. `auto` looks at the columns and
    writes its evidence into the report; what fits both is an error."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """The file must have this SHA-256. Null: whatever is there when the run is planned."""
    source: str | None = None
    """Name of the data for the `source` column where a row names none. Null: the file's name, as `preferences_1/NAME`
    where another data file has it too."""


class FeedbackFile(Config):
    """One file of logged feedback: rows of one answer each, with what people made of it.

    A row has `prompt` (text or chat messages), the answer as `completion`, `response` or `answer` (text or chat
    messages), and at least one of `label` (true: good), `thumb` ("up" or "down") and `rating` (a number).
    """

    path: str
    """JSONL (`.jsonl`, `.ndjson`, also `.gz`) or Parquet (`.parquet`)."""
    rating_threshold: float | None = Field(default=None, allow_inf_nan=False)
    """A row with a rating and neither label nor thumb is good from this rating on (in the file's own unit), bad below.
    Null: such a row has no label. Default: where good begins is a choice that no file states."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """The file must have this SHA-256. Null: whatever is there when the run is planned."""
    source: str | None = None
    """Name of the data for the `source` column where a row names none. Null: the file's name, as `feedback_1/NAME`
    where another data file has it too."""


class CheckDataConfig(Config):
    """What is read, which rows are good enough, and how they are split."""

    preferences: list[PreferenceFile] = Field(default_factory=list)
    """Files of preference pairs, read in this order. May be empty where `feedback` names a file: the tables of pairs
    then have no rows."""
    feedback: list[FeedbackFile] = Field(default_factory=list)
    """Files of logged thumbs and ratings, read in this order: answers judged one by one, not in pairs. Default: none,
    and no tables of feedback are written."""
    rl_prompts: str | None = None
    """File of prompts for RL: rows `{prompt: text or messages, prompt_id?}`, other columns are kept as `extra`. Prompts
    of the evaluation are taken out. Null: the distinct prompts of the training split, pairs first, then feedback."""
    eval_prompts: str | None = None
    """File of held-out prompts for the evaluation, same rows. Null: the distinct prompts of the validation split."""
    max_prompt_tokens: int = Field(default=512, gt=0)
    """Longest prompt, in tokens of the rendered chat template with the opening of the answer. Default: what TRL's
    DPOConfig long had as `max_prompt_length`."""
    max_response_tokens: int | None = Field(default=None, gt=0)
    """Longest answer in tokens, its end-of-turn token included. Null: only `max_total_tokens` counts."""
    max_total_tokens: int = Field(default=1024, gt=0)
    """Longest prompt and answer together, in tokens. A smaller `model_max_length` of the tokenizer wins. Default:
    `max_length` of TRL's RewardConfig."""
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of prompts (0 to 1) whose pairs and feedback are held out of training. A prompt's side depends on the
    prompt and the seed only. Default: a tenth, by convention."""
    min_pairs: int = Field(default=100, ge=2)
    """Fewest pairs that must be left, where there are files of pairs. Default: with fewer, the accuracy on a tenth held
    out has a standard error above 0.15."""
    min_feedback: int = Field(default=100, ge=2)
    """Fewest feedback rows that must be left, where there are files of feedback. Default: as `min_pairs`."""
    max_quarantined_fraction: float = Field(default=0.05, ge=0, le=1)
    """Largest share (0 to 1) of rows that may be quarantined, of the preference files together, of the feedback files
    together and of each prompts file; above it the stage fails. Default: about ten times what the HH-RLHF harmless-base
    test split shows."""
    duplicates: Literal["keep_first", "keep_all"] = "keep_first"
    """Pairs (or feedback rows: prompt, answer, label and rating) equal after Unicode NFC, case folding and joining of
    whitespace: keep the first and quarantine the others, or keep all. Default: a repeated row weighs double by accident
    more often than on purpose."""
    conflicts: Literal["quarantine_all", "keep_all"] = "quarantine_all"
    """A preferred to B in one row and B to A in another, for one prompt, or one answer labelled good in one feedback
    row and bad in another: quarantine every such row, or keep all (right for several annotators). Default: no row of a
    contradiction is known to be right."""
    allowed_special_tokens: list[str] = Field(default_factory=list)
    """Control tokens of the tokenizer that may occur inside a message's text. Default: none, since such text could end
    a turn."""

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if not self.preferences and not self.feedback:
            raise ValueError("preferences: []: must have at least one entry, unless feedback has one")
        return self
