"""The config of the `check_data` stage."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training_core.config.base import Config

PairFormat = Literal[
    "pairs", "hh", "ultrafeedback", "ultrafeedback_binarized", "summarize", "webgpt", "shp", "safe_rlhf",
    "helpsteer2_preference", "helpsteer3", "nectar", "rewardbench2", "llama_factory_alpaca", "llama_factory_sharegpt",
]  # fmt: skip
FeedbackFormat = Literal["feedback", "helpsteer2", "llama_factory_kto", "llama_factory_alpaca_kto"]
PromptFormat = Literal["prompts", "verl", "openrlhf_prompts"]
StepwiseFormat = Literal["stepwise"]

Fraction = Annotated[float, Field(ge=0, le=1)]


class PreferenceFile(Config):
    """One file of preference rows."""

    path: str
    """JSONL (`.jsonl`, `.ndjson`), JSON (`.json`: a list of objects) or CSV (`.csv`), each also `.gz` or `.zst`,
    Parquet (`.parquet`), or a folder that `datasets.save_to_disk` wrote."""
    format: Literal["auto"] | PairFormat = "auto"
    """How rows are laid out (docs/data.md lists the formats). `auto` looks at the columns and writes its evidence into
    the report; what fits several is an error."""
    ties: Literal["drop", "keep"] | None = None
    """What becomes of pairs in which neither answer is preferred (margin 0, equal scores, a label that says so): leave
    them out, or keep them with margin 0. Null: not said, and such rows are quarantined. Default: a tie that is taken
    for a preference teaches noise, and only you know which files hold ties."""
    label: str | None = None
    """Which judgement counts in a format with several that may disagree: `helpful` or `safe` in `safe_rlhf`. Null where
    the format has one."""
    score: str | None = None
    """Which rating counts in a format with several: `overall_score` or an aspect in `ultrafeedback`. Null: the format's
    first."""
    max_pairs_per_row: int = Field(default=6, ge=1)
    """Most pairs that one row of several ranked answers becomes; further ones are dropped and counted, widest gaps
    first. Default: all pairs of four answers."""
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
    """A file as for `preferences`."""
    format: Literal["auto"] | FeedbackFormat = "auto"
    """How rows are laid out (docs/data.md lists the formats). `auto` looks at the columns."""
    score: str | None = None
    """Which rating counts in a format with several: an attribute such as `helpfulness` in `helpsteer2`. Null: the
    format's first."""
    rating_threshold: float | None = Field(default=None, allow_inf_nan=False)
    """A row with a rating and neither label nor thumb is good from this rating on (in the file's own unit), bad below.
    Null: such a row has no label. Default: where good begins is a choice that no file states."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """The file must have this SHA-256. Null: whatever is there when the run is planned."""
    source: str | None = None
    """Name of the data for the `source` column where a row names none. Null: the file's name, as `feedback_1/NAME`
    where another data file has it too."""


class Threshold(Config):
    """Limits of one number of the data set; docs/data-checks.md lists the numbers and their limits."""

    warn: float | None = None
    """Beyond this the check warns. Null: the suite's own limit."""
    fail: float | None = None
    """Beyond this the check fails. Null: the suite's own limit."""


class NearDuplicates(Config):
    """When two prompts count as one for the split."""

    similarity: float = Field(default=0.8, gt=0.5, le=1)
    """Jaccard similarity (0 to 1) of the sets of five-character pieces from which on prompts belong together. Default:
    as in NeMo Curator's fuzzy deduplication."""


class Contamination(Config):
    """When a training row holds a prompt of the evaluation."""

    ngram_words: int = Field(default=8, ge=3, le=50)
    """Length of the word sequences that are compared. Default: Tulu 3's decontamination."""
    containment: Fraction = 0.5
    """A row is contaminated when at least this share of an evaluation prompt's word sequences occurs in it. Default:
    Tulu 3's decontamination."""


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
    rl_prompts_format: Literal["auto"] | PromptFormat = "auto"
    """How rows of `rl_prompts` are laid out. `auto` looks at the columns."""
    eval_prompts_format: Literal["auto"] | PromptFormat = "auto"
    """How rows of `eval_prompts` are laid out. `auto` looks at the columns."""
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
    """Pairs (or feedback rows: prompt, answer, label and rating) of one annotator, or of rows that name none, equal
    after Unicode NFC, case folding and joining of whitespace: keep the first and quarantine the others, or keep all.
    What several annotators say alike is kept. Default: a repeated row weighs double by accident more often than on
    purpose."""
    conflicts: Literal["quarantine_all", "keep_all"] = "quarantine_all"
    """A preferred to B in one row and B to A in another, for one prompt and one annotator (or rows that name none), or
    one answer labelled good in one feedback row and bad in another: quarantine every such row, or keep all. What
    several annotators say otherwise is kept, and their agreement reported. Default: no row of a contradiction is known
    to be right."""
    max_pairs_per_prompt: int | None = Field(default=None, ge=1)
    """Most pairs of one prompt that are used, the first in file order; further ones are dropped and counted. Null:
    all."""
    secrets: Literal["quarantine", "keep"] = "quarantine"
    """Rows in which a key or password stands (its shape and randomness say so): leave out, or keep. Default: a model
    repeats what it was trained on."""
    near_duplicates: NearDuplicates | None = Field(default_factory=NearDuplicates)
    """Prompts that are nearly the same go to one side of the split. Null: only equal prompts do."""
    contamination: Contamination = Field(default_factory=Contamination)
    """What counts as an evaluation prompt inside a training row."""
    languages: list[str] = Field(default_factory=list)
    """ISO 639-1 codes of the languages that rows may be in, as `["en"]`. Default: none named, and no language is a
    defect."""
    sample_rows: int = Field(default=20_000, ge=100)
    """Rows that the costly checks look at (language, toxicity, shortcuts, label noise); those with the smallest hash,
    so the choice does not depend on row order. Default: a fraction's standard error is then at most 0.4 points."""
    semantic_duplicates: bool = False
    """Also look for prompts of the sample that say the same in other words. Default: off, it costs about a second for
    ten thousand prompts."""
    metric_engine: Literal["duckdb", "spark"] = "duckdb"
    """Where numbers over all rows are computed: in this process, or on the Spark cluster of the environment (extra
    `spark`; the root must then lie on storage that its executors see). The numbers are the same. Default: needs no
    cluster."""
    thresholds: dict[str, Threshold] = Field(default_factory=dict)
    """Other limits for checks, by the check's name. Default: those of the suites in `data_checks/suites`."""
    allowed_special_tokens: list[str] = Field(default_factory=list)
    """Control tokens of the tokenizer that may occur inside a message's text. Default: none, since such text could end
    a turn."""

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if not self.preferences and not self.feedback:
            raise ValueError("preferences: []: must have at least one entry, unless feedback has one")
        return self


class FileCheckConfig(CheckDataConfig):
    """The config of checking one file of any kind, prompts and steps included."""

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        return self
