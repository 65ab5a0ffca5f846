"""Plain values that pass between the parts of a check: rows, what was found in them, and why one is not used."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "tool")


class Turn(NamedTuple):
    """One chat turn; the content is exactly what the file holds."""

    role: str
    content: str


Turns = tuple[Turn, ...]


class Reason(StrEnum):
    """Why a row is not used. A row with several is counted under the first in this order."""

    MALFORMED_JSON = "malformed_json"
    INVALID_UNICODE = "invalid_unicode"
    NUL_CHARACTER = "nul_character"
    ROW_TOO_LARGE = "row_too_large"
    WRONG_TYPE = "wrong_type"
    LAST_TURN_NOT_ASSISTANT = "last_turn_not_assistant"
    LAST_TURN_NOT_USER = "last_turn_not_user"
    PROMPT_MISMATCH = "prompt_mismatch"
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_RESPONSE = "empty_response"
    ROLE_ORDER = "role_order"
    IDENTICAL_RESPONSES = "identical_responses"
    UNDECLARED_TIE = "undeclared_tie"
    MISSING_JUDGEMENT = "missing_judgement"
    SECRET = "secret"
    SPECIAL_TOKENS = "special_tokens_in_content"
    TEMPLATE_FAILED = "template_failed"
    PROMPT_TOO_LONG = "prompt_too_long"
    RESPONSE_TOO_LONG = "response_too_long"
    TOO_LONG = "too_long"
    GOLD_REJECTED = "gold_rejected"
    PROMPT_IN_EVALUATION = "prompt_in_evaluation"
    CONFLICTING_PAIR = "conflicting_pair"
    CONFLICTING_LABELS = "conflicting_labels"
    DUPLICATE_PAIR = "duplicate_pair"
    DUPLICATE_FEEDBACK = "duplicate_feedback"
    DUPLICATE_PROMPT = "duplicate_prompt"


class Policy(StrEnum):
    """Why a row is left out because the config says so: it has no defect."""

    TIE = "tie"
    PAIRS_PER_ROW = "pairs_per_row"
    PAIRS_PER_PROMPT = "pairs_per_prompt"


REASON_ORDER = {reason: position for position, reason in enumerate(Reason)}

ADVICE: dict[Reason, str] = {
    Reason.MALFORMED_JSON: "the line is no JSON object (JSONL has one object a line): repair or remove it",
    Reason.INVALID_UNICODE: "write the file as UTF-8, without lone surrogates",
    Reason.NUL_CHARACTER: "remove NUL characters: they end strings in other programs",
    Reason.ROW_TOO_LARGE: "a row is larger than the reader takes: no conversation is that long. Look at the file",
    Reason.WRONG_TYPE: "a column is missing or of another type: prompt, chosen and rejected are text or lists of "
    "{role, content}; in format hh, chosen and rejected are whole transcripts; feedback has prompt, one of completion, "
    "response and answer, and label (true or false), thumb (up or down) or rating (a number)",
    Reason.LAST_TURN_NOT_ASSISTANT: "end both sides with the assistant's answer that is compared",
    Reason.LAST_TURN_NOT_USER: "end a prompt with the user's (or a tool's) turn",
    Reason.PROMPT_MISMATCH: "give both sides the same conversation up to the compared answers",
    Reason.EMPTY_PROMPT: "a prompt needs text in each of its user and assistant turns",
    Reason.EMPTY_RESPONSE: "an answer is blank after trimming: remove the pair",
    Reason.ROLE_ORDER: "let user and assistant alternate, after at most one system turn; an answer holds no user turn",
    Reason.IDENTICAL_RESPONSES: "answers equal in text or in tokens hold no preference: remove the pair",
    Reason.UNDECLARED_TIE: "neither answer is preferred, and the config does not say what to do with ties: set `ties: "
    "drop` or `ties: keep` beside the file's path",
    Reason.SECRET: "a key or password stands in the text: revoke it, remove the row, or set data.secrets: keep",
    Reason.GOLD_REJECTED: "the verifier does not accept the row's own ground truth as an answer: repair it",
    Reason.MISSING_JUDGEMENT: "nobody judged the answer: log label, thumb or rating, or leave such rows out",
    Reason.SPECIAL_TOKENS: "remove the tokenizer's control token from the text, or add it to "
    "data.allowed_special_tokens",
    Reason.TEMPLATE_FAILED: "the tokenizer's chat template does not render these turns",
    Reason.PROMPT_TOO_LONG: "shorten the prompt, or raise data.max_prompt_tokens",
    Reason.RESPONSE_TOO_LONG: "shorten the answer, or raise data.max_response_tokens",
    Reason.TOO_LONG: "shorten the row, or raise data.max_total_tokens up to the model's limit",
    Reason.PROMPT_IN_EVALUATION: "evaluation prompts are held out, with what is nearly equal to them or holds them: "
    "take them out of one of the two files; `data.near_duplicates: null` lets prompts made from one template pass",
    Reason.CONFLICTING_PAIR: "two answers are preferred both ways: settle the label, or set data.conflicts: keep_all",
    Reason.CONFLICTING_LABELS: "one answer is labelled good and bad: settle the label, or set data.conflicts: keep_all",
    Reason.DUPLICATE_PAIR: "the pair was seen before: remove it, or set data.duplicates: keep_all",
    Reason.DUPLICATE_FEEDBACK: "the same judgement of the same answer was seen before: remove it, or set "
    "data.duplicates: keep_all",
    Reason.DUPLICATE_PROMPT: "the prompt or its prompt_id was seen before in this file: remove it",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect of a row. `detail` may end up in logs: it may name columns of the row, but never quotes a value."""

    reason: Reason
    detail: str
    side: str | None = None
    """`chosen` or `rejected` where the defect is in one transcript."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example without a defect that a policy of the config leaves out."""

    policy: Policy
    detail: str


@dataclass(slots=True)
class RawRow:
    """A row as read: either a mapping without its null columns, or the finding that says why there is none."""

    file: str
    number: int
    """Line of a JSONL file, row of any other file, from 1."""
    raw: str
    """The row as text, kept for the quarantine."""
    value: dict[str, Any] | None
    finding: Finding | None = None
    offset: int | None = None
    """Where the line starts, in bytes of the uncompressed file; None where rows are no lines."""

    def without_value(self) -> RawRow:
        """Return the row to remember once its value has been used."""
        return RawRow(self.file, self.number, self.raw, None, self.finding, self.offset)


@dataclass(slots=True)
class PairRow:
    """A preference row cut into prompt and answers, defects included."""

    origin: RawRow
    source: str
    chosen_prompt: Turns
    chosen: Turns
    rejected_prompt: Turns
    rejected: Turns
    margin: float | None = None
    chosen_score: float | None = None
    rejected_score: float | None = None
    findings: list[Finding] = field(default_factory=list)
    prompt_tokens: int | None = None
    chosen_tokens: int | None = None
    """Tokens of the chosen answer, its end-of-turn token included."""
    rejected_tokens: int | None = None
    is_tie: bool = False
    """Neither answer is preferred: which one is called chosen says nothing."""
    chosen_position: int | None = None
    """1 or 2: which of the two answers, in the order people saw them, was chosen. None where the file does not say."""
    annotator: str | None = None
    tools: str | None = None
    """The tools the model was offered, as JSON text."""
    extra: str = "{}"
    """The columns that no other field holds, as JSON text."""

    @property
    def prompt(self) -> Turns:
        return self.chosen_prompt


@dataclass(slots=True)
class FeedbackRow:
    """One judged answer cut from its prompt, defects included."""

    origin: RawRow
    source: str
    prompt: Turns
    answer: Turns
    label: bool | None = None
    """True: a good answer."""
    rating: float | None = None
    findings: list[Finding] = field(default_factory=list)
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    """Tokens of the answer, its end-of-turn token included."""
    annotator: str | None = None
    tools: str | None = None
    extra: str = "{}"


@dataclass(slots=True)
class StepwiseRow:
    """An answer in steps, each judged (process supervision), defects included."""

    origin: RawRow
    source: str
    prompt: Turns
    answer: Turns
    """One assistant turn a step."""
    labels: tuple[bool, ...]
    findings: list[Finding] = field(default_factory=list)
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    extra: str = "{}"


@dataclass(slots=True)
class PromptItem:
    """A prompt for RL or evaluation, defects included."""

    origin: RawRow | None
    """None for a prompt taken from a pair or from feedback."""
    prompt: Turns
    prompt_id: str
    extra: str = "{}"
    """The row's other columns as JSON text: rewards read them by name."""
    findings: list[Finding] = field(default_factory=list)
    prompt_tokens: int | None = None
    source: str = ""
    ground_truth: str | None = None
    """What a verifier compares an answer with, as JSON text."""
    data_source: str | None = None
    ability: str | None = None
    tools: str | None = None


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null or missing" if value is None else names.get(type(value), f"of type {type(value).__name__}")


def primary(findings: list[Finding]) -> Finding:
    """Return the finding under which a row is counted: the first in the order of `Reason`."""
    return min(findings, key=lambda finding: REASON_ORDER[finding.reason])


def describe_findings(findings: list[Finding]) -> str:
    """Return one text that names every finding of a row, the counted one first."""
    first = primary(findings)
    if len(findings) == 1:
        return f"{first.side}: {first.detail}" if first.side else first.detail
    ordered = [first, *(finding for finding in findings if finding is not first)]
    texts = [f"{f.side}: {f.detail}" if f.side else f.detail for f in ordered]
    also = [f"{f.reason} ({text})" for f, text in zip(ordered[1:], texts[1:], strict=True)]
    return f"{texts[0]}; also {', '.join(also)}"
