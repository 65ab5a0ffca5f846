"""One file of clean rows for each defect of the catalogue, and a few rows of it that have the defect.

    python tests/scripted/defect_files.py        writes them anew to tests/data_checks/fixtures/defects

Which defect is which number: docs/data-checks.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clean_rows import Writer, as_comparison, as_messages

FOLDER = Path(__file__).parent.parent / "data_checks" / "fixtures" / "defects"
NUM_ROWS = 240
NUM_BAD = 10
"""A twenty-fourth of the rows: more than what any limit on shares allows, less than what may be quarantined."""
Row = dict[str, Any]
Line = Row | bytes


@dataclass(frozen=True)
class DefectFile:
    """A file with one defect."""

    number: int
    """In the catalogue."""
    name: str
    lines: list[Line]
    kind: str = "preferences"
    """What the file is, in the words of the config."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the config, beside the file."""
    quarantined: dict[str, int] = field(default_factory=dict)
    """Reason -> rows."""
    verdict: str = "fail"
    """Of the whole check."""
    needs_tokenizer: bool = False
    beside: list[Line] | None = None
    """Rows of a file of evaluation prompts."""

    @property
    def file_name(self) -> str:
        return f"{self.number:02}_{self.name}.jsonl"


def spread(clean: list[Row], change: Callable[[Row, int], Line], number: int = NUM_BAD) -> list[Line]:
    """Return the rows with some of them changed, evenly spread."""
    step = len(clean) // number
    places = {index * step: index for index in range(number)}
    return [change(dict(row), places[at]) if at in places else row for at, row in enumerate(clean)]


def pairs(seed: int, number: int = NUM_ROWS) -> list[Row]:
    """Return clean pairs; a tenth of the prompts goes to validation by chance, whatever they say."""
    return Writer(seed).pairs(number)


def both(row: Row, change: Callable[[str], str]) -> Row:
    """Return a pair with both answers changed alike: nothing tells them apart."""
    return row | {side: change(row[side]) for side in ("chosen", "rejected")}


def again(rows: list[Row], change: Callable[[Row], Row] = dict) -> list[Line]:
    """Return the rows, and the first ones once more, changed."""
    return [*rows, *(change(row) for row in rows[:NUM_BAD])]


def exchanged(row: Row) -> Row:
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


def noisy(seed: int, flipped: int = 4) -> list[Line]:
    """Return pairs whose better answer shows in its words, every `flipped`-th labelled the other way."""
    writer = Writer(seed)
    draw = writer.draw
    # As long as each other: length tells nothing.
    good = ("gentle", "honest", "polite", "steady", "caring", "bright", "modest")
    poor = ("sloppy", "boring", "hollow", "clumsy", "stupid", "sullen", "shabby")
    rows: list[Line] = []
    for at in range(560):
        chosen, rejected = (" ".join(draw.choice(kind) for _ in range(3)) for kind in (good, poor))
        row = {"prompt": writer.prompt(), "chosen": f"{chosen}.", "rejected": f"{rejected}."}
        rows.append(exchanged(row) if flipped and at % flipped == 0 else row)
    return rows


def scored(row: Row, chosen: float, rejected: float) -> Row:
    return row | {"chosen_score": chosen, "rejected_score": rejected}


def longer(row: Row) -> Row:
    """Return the pair with the longer answer chosen."""
    ordered = sorted((row["chosen"], row["rejected"]), key=len)
    return row | {"chosen": ordered[1], "rejected": ordered[0]}


def mismatched(row: Row, _: int) -> Row:
    found = as_messages(row)
    found["rejected"][0] = {"role": "user", "content": f"{row['prompt']} Or not?"}
    return found


def ends_with_user(row: Row, _: int) -> Row:
    found = as_messages(row)
    found["chosen"].append({"role": "user", "content": "Thank you."})
    return found


def twice_user(row: Row, _: int) -> Row:
    found = as_messages(row)
    extra = {"role": "user", "content": "Well?"}
    return {side: [extra, *turns] for side, turns in found.items()}


def in_messages(rows: Iterable[Line], change: Callable[[Row, int], Line]) -> list[Line]:
    """Return pairs as messages, some of them changed."""
    changed = spread([row for row in rows if isinstance(row, dict)], change)
    return [as_messages(row) if isinstance(row, dict) and "prompt" in row else row for row in changed]


def reflowed(text: str) -> str:
    """Return a text with line breaks where spaces were."""
    return text.replace(" ", "\n")


LONG_SENTENCE = (
    "The gardener walked along the river with a basket of apples while the children counted the boats that came back "
    "from the island and the evening bells rang over the"
)


def whole(text: str) -> str:
    """Return a text of several sentences."""
    return f"{text} It was late. {LONG_SENTENCE} town."


def cut(text: str) -> str:
    """Return what `whole` gave without the last word."""
    return text.removesuffix(" town.")


def toxic(row: Row, _: int) -> Row:
    return row | {
        "chosen": "Shut up, you stupid fucking idiot, nobody wants that shit here."[: len(row["chosen"]) + 40]
    }


def refusing(row: Row, _: int) -> Row:
    refusal = "I'm sorry, but I can't help with that."
    return row | {"chosen": refusal, "rejected": row["rejected"]}


def bold(row: Row, _: int) -> Row:
    words = row["chosen"].split(" ")
    return row | {"chosen": " ".join([f"**{words[0]}**", *words[1:]]), "rejected": f"{row['rejected'][:-1]}****."}


def german(row: Row, _: int) -> Row:
    text = "Das Wasser läuft heute wieder sehr langsam durch die alte Leitung unter dem Haus, sagte meine Nachbarin."
    return both(row, lambda _: text[:-1] + f" {len(row['prompt'])}.") | {"rejected": text}


def comparisons(seed: int, first: Callable[[int], bool], number: int = NUM_ROWS) -> list[Line]:
    """Return choices between two summaries; `first` says where the first one was chosen."""
    rows = enumerate(pairs(seed, number))
    return [as_comparison(row, 0 if first(at) else 1, f"worker {at % 5}") for at, row in rows]


def questions(seed: int, number: int = NUM_ROWS) -> list[Row]:
    """Return prompts with a number as ground truth."""
    writer = Writer(seed)
    return [{"prompt": writer.prompt(), "ground_truth": str(7 * at + 3)} for at in range(number)]


def near(row: Row) -> Row:
    """Return the same prompt but for one word more."""
    return row | {"prompt": row["prompt"][:-1] + " now?"}


def templated(rows: list[Row]) -> list[Line]:
    """Return the rows, a third of them with nearly the prompt of another one."""
    third = len(rows) // 3
    return [
        *rows[: 2 * third],
        *(row | {"prompt": near(other)["prompt"]} for row, other in zip(rows[2 * third :], rows, strict=False)),
    ]


def reworded(rows: list[Row]) -> list[Line]:
    """Return the rows, a third of them with the words of another one's prompt, the other way round."""
    third = len(rows) // 3
    turned = zip(rows[2 * third :], rows, strict=False)
    return [
        *rows[: 2 * third],
        *(row | {"prompt": " ".join(reversed(other["prompt"][:-1].split(" "))) + "?"} for row, other in turned),
    ]


def _one_prompt(row: Row, _: int) -> Row:
    return row | {"prompt": "What should a visitor know about the harbour?"}


def all_files() -> list[DefectFile]:
    """Return every file, in the order of the catalogue."""
    held_out = [Writer(900).prompt() + " Say why in a few words, and name the source of each." for _ in range(1)]
    evaluation: list[Line] = [{"prompt": prompt} for prompt in held_out]
    inside = Writer(19)
    return [
        DefectFile(1, "repeated_pairs", again(pairs(1)), quarantined={"duplicate_pair": NUM_BAD}),
        DefectFile(
            2,
            "identical_answers",
            spread(pairs(2), lambda row, _: row | {"rejected": f" {row['chosen']}\n"}),
            quarantined={"identical_responses": NUM_BAD},
        ),
        DefectFile(3, "both_ways", again(pairs(3), exchanged), quarantined={"conflicting_pair": 2 * NUM_BAD}),
        DefectFile(4, "wrong_labels", noisy(4), verdict="warn"),
        DefectFile(
            5,
            "ties",
            spread([scored(row, 4, 2) for row in pairs(5)], lambda row, _: scored(row, 3, 3)),
            quarantined={"undeclared_tie": NUM_BAD},
        ),
        DefectFile(6, "scores_upside_down", spread([scored(r, 4, 2) for r in pairs(6)], lambda r, _: scored(r, 1, 5))),
        DefectFile(7, "longer_is_better", [longer(row) for row in pairs(7)]),
        DefectFile(
            8, "two_prompts", in_messages(pairs(8), mismatched), quarantined={"prompt_mismatch": NUM_BAD}
        ),
        DefectFile(
            9, "blank_answers", spread(pairs(9), lambda row, _: row | {"chosen": " \t "}),
            quarantined={"empty_response": NUM_BAD},
        ),
        DefectFile(
            10,
            "cut_answers",
            spread([both(row, whole) for row in pairs(10, 120)], lambda row, _: both(row, cut), 30),
            verdict="warn",
        ),
        DefectFile(
            11, "user_has_the_last_word", in_messages(pairs(11), ends_with_user),
            quarantined={"last_turn_not_assistant": NUM_BAD},
        ),
        DefectFile(12, "user_speaks_twice", in_messages(pairs(12), twice_user), quarantined={"role_order": NUM_BAD}),
        DefectFile(
            13, "broken_encoding", spread(pairs(13), lambda r, _: both(r, lambda t: f"{t[:-1]}, donâ€™t you know.")),
            verdict="warn",
        ),
        DefectFile(14, "invisible_characters", spread(pairs(14), lambda r, _: both(r, lambda t: f"\u202e{t}"))),
        DefectFile(
            15, "control_tokens", spread(pairs(15), lambda r, _: both(r, lambda t: f"{t} <|im_end|>")),
            quarantined={"special_tokens_in_content": NUM_BAD}, needs_tokenizer=True,
        ),
        DefectFile(
            16, "personal_data", spread(pairs(16), lambda r, at: both(r, lambda t: f"{t} Write to ann{at}@posteo.de."))
        ),
        DefectFile(17, "other_language", spread(pairs(17), german, 40)),
        DefectFile(18, "toxic_is_better", spread(pairs(18), toxic, 24), verdict="warn"),
        DefectFile(
            19,
            "evaluation_inside",
            spread(pairs(19), lambda row, _: row | {"prompt": f"{inside.sentence()} {held_out[0]}"}),
            quarantined={"prompt_in_evaluation": NUM_BAD}, beside=evaluation, verdict="warn",
        ),
        DefectFile(
            20,
            "evaluation_in_other_lines",
            spread(pairs(20), lambda row, at: row | {"prompt": f"{at} {reflowed(held_out[0])}"}),
            quarantined={"prompt_in_evaluation": NUM_BAD}, beside=evaluation, verdict="warn",
        ),
        DefectFile(21, "nearly_the_same_prompts", templated(pairs(21)), verdict="warn"),
        DefectFile(
            22, "same_in_other_words", reworded(pairs(22)), fields={"semantic_duplicates": True}, verdict="warn"
        ),
        DefectFile(
            23, "too_long", spread(pairs(23), lambda r, _: both(r, lambda t: " ".join([t] * 12))),
            fields={"max_total_tokens": 200}, quarantined={"too_long": NUM_BAD}, needs_tokenizer=True, verdict="warn",
        ),
        DefectFile(
            24, "unreadable_gold", spread(questions(24), lambda r, _: r | {"ground_truth": "\\boxed{\\frac{1}{"}),
            kind="rl_prompts", quarantined={"gold_rejected": NUM_BAD},
        ),
        DefectFile(
            25, "nothing_to_learn",
            [row | {"pass_rate": (0.0, 1.0, 1.0, 0.5)[at % 4]} for at, row in enumerate(questions(25))],
            kind="rl_prompts", verdict="warn",
        ),
        DefectFile(
            26, "broken_lines", spread(pairs(26), lambda row, _: json.dumps(row).encode()[:-5]),
            quarantined={"malformed_json": NUM_BAD},
        ),
        DefectFile(27, "one_prompt_too_often", spread(pairs(27), _one_prompt, 40), verdict="warn"),
        DefectFile(28, "refusals_are_better", spread(pairs(28), refusing, 60), verdict="warn"),
        DefectFile(29, "first_is_better", comparisons(29, lambda at: at % 5 > 0), verdict="warn"),
        DefectFile(30, "bold_is_better", spread(pairs(30), bold, 200)),
    ]  # fmt: skip


def clean_files() -> list[DefectFile]:
    """Return the rows that defects are planted into, of each layout."""
    layouts: dict[str, list[Line]] = {
        "pairs": [*pairs(40)],
        "messages": [as_messages(row) for row in pairs(41)],
        "scores": [scored(row, 4, 2) for row in pairs(42)],
        "long answers": [both(row, whole) for row in pairs(43, 120)],
        "answers of worth": noisy(44, flipped=0),
        "comparisons": comparisons(45, lambda at: at % 2 == 0),
    }
    asked = DefectFile(0, "questions", [*questions(46)], kind="rl_prompts", verdict="pass", needs_tokenizer=True)
    judged = [DefectFile(0, *item, verdict="pass", needs_tokenizer=item[0] == "pairs") for item in layouts.items()]
    return [*judged, asked]


def content(lines: Iterable[Line]) -> bytes:
    """Return rows as JSON lines."""
    encoded = (line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines)
    return b"".join(line + b"\n" for line in encoded)


def written_files() -> dict[str, bytes]:
    """Return what each file of the folder must hold."""
    found = {defect.file_name: content(defect.lines) for defect in all_files()}
    return found | {
        f"{defect.number:02}_evaluation_prompts.jsonl": content(defect.beside)
        for defect in all_files()
        if defect.beside is not None
    }


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, data in written_files().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
