"""Text that looks like a control token of a chat template (catalogue: special tokens inside content)."""

from __future__ import annotations

import re

from data_checks.features.column import Rows, TextColumn

_NAMED = (
    "start_of_turn|end_of_turn|start_of_image|end_of_image|start_header_id|end_header_id|bos|eos|pad|unk|sep|cls|eop|eod"
    "|begin_of_text|end_of_text|endoftext|im_start|im_end|end_of_utterance|fim_prefix|fim_middle|fim_suffix"
)
_MARKER = (
    r"<\|[^\s|<>]{1,60}\|>"
    r"|<｜[^\s｜<>]{1,60}｜>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|<</?SYS>>"
    r"|<extra_id_\d{1,4}>"
    rf"|</?(?:{_NAMED})>"
)
_CANDIDATE = rf"{_MARKER}|</?s>"
_MARKER_HERE = re.compile(_MARKER)
_SENTENCE = re.compile(r"(?<!\w)<s>|</s>")
_STRUCK_OUT = re.compile(r"(?<=[^\n])<s>[^<>\n]{1,500}</s>|<s>[^<>\n]{1,500}</s>(?=[^\n])")
"""HTML's crossed-out text: a pair on one line that is not the whole line."""


def may_have_marker(column: TextColumn) -> Rows:
    return column.matching(_CANDIDATE, column.rows_with("<", "["))


def has_marker(text: str) -> bool:
    """Return whether a text holds what some tokenizer takes for a control token.

    Section marks that models write as text (<think>, <tool_call>) and HTML are none.
    """
    return _MARKER_HERE.search(text) is not None or _SENTENCE.search(_STRUCK_OUT.sub("", text)) is not None
