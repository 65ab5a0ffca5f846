"""What files of defects are made of: clean rows in several layouts, and a sheet of rows to plant defects into."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from clean_rows import Writer, as_comparison, as_judged, as_messages

Row = dict[str, Any]
Line = Row | bytes
"""A row, or a line as it stands."""
Change = Callable[[Row, int], Line]
"""Takes a clean row and how many were changed before it."""


@dataclass
class Sheet:
    """Rows in file order, and which of them must not be used."""

    rows: list[Line]
    bad: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> numbers of rows, from 1."""
    taken: set[int] = field(default_factory=set)

    def plant(self, number: int, change: Change, reason: str | None = None) -> Sheet:
        """Change so many rows, evenly spread, none of them twice.

        Args:
            number: of rows.
            change: what becomes of one.
            reason: why such a row is quarantined; None: it is used all the same.
        """
        for index in range(number):
            place = index * len(self.rows) // number
            while place in self.taken:
                place += 1
            row = self.rows[place]
            assert isinstance(row, dict)
            self.rows[place] = change(dict(row), index)
            self.mark(place + 1, reason)
        return self

    def append(self, rows: Sequence[Row], reason: str | None = None) -> Sheet:
        """Add rows at the end."""
        for row in rows:
            self.rows.append(row)
            self.mark(len(self.rows), reason)
        return self

    def mark(self, number: int, reason: str | None) -> None:
        self.taken.add(number - 1)
        if reason is not None:
            self.bad[reason] = sorted([*self.bad.get(reason, []), number])


Found = dict[str, tuple[Literal["warn", "fail"], float | None]]


@dataclass(frozen=True)
class DefectFile:
    """A file, and all that a check must say of it."""

    number: int
    """In the catalogue; 0: there is nothing wrong with it."""
    name: str
    sheet: Sheet
    found: Found = field(default_factory=dict)
    """Check -> its verdict and number (None: no round one). Every other check passes or is skipped."""
    linked: Found = field(default_factory=dict)
    """The same for checks of another number that see the same thing by nature: kept as short as possible."""
    kind: Literal["preferences", "feedback", "rl_prompts"] = "preferences"
    of_file: dict[str, Any] = field(default_factory=dict)
    """What the config says of the file."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other fields of the config."""
    tokenizer: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    """What the report must say beside the checks."""
    evaluation: list[str] = field(default_factory=list)
    """Prompts of a file of evaluation prompts."""
    suffix: str = ".jsonl"

    @property
    def file_name(self) -> str:
        return f"{self.number:02}_{self.name}{self.suffix}"

    @property
    def evaluation_name(self) -> str | None:
        return f"{self.number:02}_evaluation_prompts.jsonl" if self.evaluation else None


def pairs(seed: int, number: int = 150, num_sentences: int = 1) -> list[Row]:
    """Return clean pairs of texts."""
    return Writer(seed).pairs(number, num_sentences)


def sheet(seed: int, number: int = 150, num_sentences: int = 1) -> Sheet:
    return Sheet([*pairs(seed, number, num_sentences)])


def messages(seed: int, number: int = 120) -> Sheet:
    """Return pairs as two whole conversations."""
    return Sheet([as_messages(row) for row in pairs(seed, number)])


def transcripts(seed: int, number: int = 150) -> Sheet:
    """Return pairs as two transcripts, as in HH-RLHF."""
    return Sheet(
        [{s: transcript(row["prompt"], row[s]) for s in ("chosen", "rejected")} for row in pairs(seed, number)]
    )


def transcript(*texts: str) -> str:
    """Return a dialogue of a human (who begins) and an assistant."""
    return "".join(f"\n\n{('Human', 'Assistant')[at % 2]}: {text}" for at, text in enumerate(texts))


def judged(seed: int, number: int = 150) -> Sheet:
    """Return pairs of which every other one has scores of both answers, the others a margin."""
    rows = enumerate(pairs(seed, number))
    return Sheet([row | ({"chosen_score": 4, "rejected_score": 2} if at % 2 else {"margin": 2}) for at, row in rows])


def binarized(seed: int, number: int = 120) -> Sheet:
    """Return pairs with scores from 0 to 10, in the layout of UltraFeedback's binarized version."""
    return Sheet([binarized_row(r) for r in pairs(seed, number)])


def binarized_row(row: Row) -> Row:
    sides = as_messages(row)
    return {"prompt": row["prompt"], **sides, "messages": sides["chosen"], **scores(8.5, 6.0)}


def scores(chosen: float, rejected: float) -> Row:
    return {"score_chosen": chosen, "score_rejected": rejected}


def comparisons(seed: int, is_first: Callable[[int], bool], number: int = 150) -> Sheet:
    """Return the choices of five workers between two summaries; `is_first`: whether the first one was chosen."""
    rows = enumerate(pairs(seed, number))
    return Sheet([as_comparison(row, 0 if is_first(at) else 1, f"worker {at % 5}") for at, row in rows])


def feedback(seed: int, number: int = 150) -> Sheet:
    """Return answers judged one by one, half of them good."""
    return Sheet([as_judged(row, at % 2 == 0) for at, row in enumerate(pairs(seed, number))])


def worded(seed: int, number: int = 560) -> Sheet:
    """Return pairs whose better answer shows in its words, not in its length."""
    writer = Writer(seed)
    good = ("gentle", "honest", "polite", "steady", "caring", "bright", "modest")
    poor = ("sloppy", "boring", "hollow", "clumsy", "untidy", "sullen", "shabby")
    rows: list[Line] = []
    for _ in range(number):
        chosen, rejected = (" ".join(writer.draw.choice(kind) for _ in range(3)) for kind in (good, poor))
        rows.append({"prompt": writer.prompt(), "chosen": f"{chosen}.", "rejected": f"{rejected}."})
    return Sheet(rows)


def questions(seed: int, number: int = 150) -> Sheet:
    """Return prompts for RL with ground truths (numbers and texts) and pass rates, in verl's layout."""
    writer = Writer(seed)
    truths = (lambda at: str(7 * at + 3), lambda at: writer.draw.choice(("Crete", "a red kettle", "the mayor")))
    return Sheet(
        [
            {
                "data_source": "made_up",
                "prompt": [{"role": "user", "content": writer.prompt()}],
                "ability": "questions",
                "reward_model": {"style": "rule", "ground_truth": truths[at % 2](at)},
                "extra_info": {"index": at, "pass_rate": (0.25, 0.5, 0.875)[at % 3]},
            }
            for at in range(number)
        ]
    )


def prompts(seed: int, number: int = 40) -> list[str]:
    """Return prompts of an evaluation, with more words than the pairs' have."""
    writer = Writer(seed)
    return [f"{writer.prompt()[:-1]}, and which of them does your aunt remember?" for _ in range(number)]


def exchanged(row: Row) -> Row:
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


def on_one_side(change: Callable[[str, int], str]) -> Change:
    """Return a change of one answer, the chosen and the rejected one in turn."""

    def changed(row: Row, index: int) -> Row:
        side = ("chosen", "rejected")[index % 2]
        return row | {side: change(row[side], index)}

    return changed


def longer(row: Row, _: int = 0) -> Row:
    """Return the pair with the longer answer chosen; answers of one length get a word more."""
    short, long = sorted((row["chosen"], row["rejected"]), key=len)
    return row | {"chosen": long if len(short) < len(long) else f"Well. {long}", "rejected": short}


def shorter(row: Row, _: int = 0) -> Row:
    return exchanged(longer(row))


FOREIGN = (
    (
        ("Der Besitzer", "Meine Nachbarin", "Unser Gärtner", "Fast jeder hier"),
        ("empfiehlt uns", "kauft immer", "benutzt am liebsten", "sucht noch"),
        ("warmes Wasser und ein weiches Tuch", "die zweite Schublade von links", "frische Farbe für die Wand"),
    ),
    (
        ("Le propriétaire", "Ma voisine", "Notre jardinier", "Presque tout le monde"),
        ("nous recommande", "achète toujours", "préfère depuis longtemps", "cherche encore"),
        ("de l'eau chaude et un chiffon doux", "le deuxième tiroir à gauche", "de la peinture pour le mur"),
    ),
    (
        ("El dueño", "Mi vecina", "Nuestro jardinero", "Casi todo el mundo"),
        ("nos recomienda", "compra siempre", "prefiere desde hace tiempo", "busca todavía"),
        ("agua caliente y un trapo suave", "el segundo cajón de la izquierda", "pintura nueva para la pared"),
    ),
)
"""Sentences in German, French and Spanish."""


def in_another_language(row: Row, index: int) -> Row:
    """Return the pair with both answers in one of three other languages."""
    parts = FOREIGN[index % 3]
    sides = ("chosen", "rejected")
    drawn = {
        s: [words[(index // 3 + n * (k + 1)) % len(words)] for n, words in enumerate(parts)]
        for k, s in enumerate(sides)
    }
    return row | {side: " ".join(words) + "." for side, words in drawn.items()}


def write(path: Path, lines: Sequence[Line]) -> None:
    """Write rows; the name says how: .jsonl, .csv or .parquet."""
    if path.suffix == ".parquet":
        pq.write_table(
            pa.Table.from_pylist([line for line in lines if isinstance(line, dict)]), path, compression="zstd"
        )
    else:
        path.write_bytes(content(path.suffix, lines))


def content(suffix: str, lines: Sequence[Line]) -> bytes:
    """Return rows as JSON lines or CSV."""
    if suffix == ".csv":
        rows = [line for line in lines if isinstance(line, dict)]
        stream = io.StringIO(newline="")
        table = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        return stream.getvalue().encode()
    encoded = (line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines)
    return b"".join(line + b"\n" for line in encoded)


def is_written(path: Path, lines: Sequence[Line]) -> bool:
    """Return whether a file holds what `write` writes; how Parquet packs it may differ between versions."""
    if path.suffix == ".parquet":
        return bool(pq.read_table(path).to_pylist() == [*lines])
    return path.read_bytes() == content(path.suffix, lines)
