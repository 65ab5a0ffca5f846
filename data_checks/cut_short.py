"""Answers of which their row says that the generator stopped them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

from data_checks.rows import FeedbackRow, PairRow, PromptItem, StepwiseRow

NAME = "finish_reason"
OF_ANSWERS = {NAME: "chosen"}
OF_PAIRS = {f"{side}_{NAME}": side for side in ("chosen", "rejected")}
CUT = frozenset({"length", "max_tokens", "MAX_TOKENS"})
"""What the interfaces of OpenAI, Anthropic and Google write where the limit on tokens was reached."""


def cut_short(rows: Mapping[int, PairRow | FeedbackRow | PromptItem | StepwiseRow]) -> Iterator[tuple[int, str]]:
    """Yield place and part (`chosen` or `rejected`; `chosen` for an answer judged alone) of each such answer.

    Read are the columns `finish_reason` of judged answers, and `chosen_finish_reason` and `rejected_finish_reason` of
    pairs.
    """
    for place, row in rows.items():
        if NAME not in row.extra:
            continue
        columns = orjson.loads(row.extra)
        for column, part in (OF_PAIRS if isinstance(row, PairRow) else OF_ANSWERS).items():
            if isinstance(value := columns.get(column), str) and value in CUT:
                yield place, part
