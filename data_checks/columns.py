"""One part (prompt, chosen or rejected answer) of many examples, held so that the common case costs little."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from data_checks.canonical import MESSAGES
from data_checks.rows import Turn, Turns

MESSAGE_FIELDS = list(MESSAGES.value_type)


class TurnColumn(Sequence[Turns | None]):
    """The turns of one part of each example. Most are one turn of one role: of these only the text is held."""

    def __init__(self, role: str, turns: Iterable[Turns | None] = ()) -> None:
        """Make a column.

        Args:
            role: of the single turn that most examples have here.
            turns: of the first examples; None where an example has no such part or could not be read.
        """
        self.role = role
        self.texts: list[str | None] = []
        """Contents of the turns, joined by line breaks; None without turns."""
        self.others: dict[int, Turns | None] = {}
        """Place -> turns, where they are not one turn of `role`."""
        for item in turns:
            self.append(item)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> Turns | None:  # type: ignore[override]
        if place in self.others:
            return self.others[place]
        return (Turn(self.role, self.texts[place]),)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Turns | None]:
        return (self[place] for place in range(len(self)))

    def append(self, turns: Turns | None) -> None:
        self.texts.append(None)
        self.put(len(self.texts) - 1, turns)

    def extend_texts(self, texts: Iterable[str]) -> None:
        """Add examples whose part is one turn of `role`."""
        self.texts.extend(texts)

    def put(self, place: int, turns: Turns | None) -> None:
        """Replace the turns of an example."""
        if turns is not None and len(turns) == 1 and turns[0][0] == self.role:
            self.texts[place] = turns[0][1]
            self.others.pop(place, None)
        else:
            self.texts[place] = None if turns is None else "\n".join([content for _, content in turns])
            self.others[place] = turns

    def messages(self) -> pa.Array:
        """Return the column as an Arrow array of lists of messages, null where there are none."""
        size = len(self)
        if not self.others:
            roles, contents = pa.repeat(self.role, size), pa.array(self.texts, pa.string())
            offsets, mask = np.arange(size + 1, dtype=np.int32), None
        else:
            turns = list(self)
            flat = [turn for item in turns if item for turn in item]
            roles, contents = (pa.array([turn[at] for turn in flat], pa.string()) for at in (0, 1))
            lengths = [0 if item is None else len(item) for item in turns]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            mask = pa.array([item is None for item in turns])
        values = pa.StructArray.from_arrays([roles, contents], fields=MESSAGE_FIELDS)
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=MESSAGES, mask=mask)
