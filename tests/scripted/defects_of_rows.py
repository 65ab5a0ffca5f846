"""Files with the defects 1 to 14 of the catalogue: repeats and contradictions, labels, what single rows are made of."""

from __future__ import annotations

from collections.abc import Callable

import defect_rows as made
from clean_rows import Writer, as_comparison
from defect_rows import DefectFile, Found, Line, Row, Sheet, on_one_side


def duplicates() -> DefectFile:
    clean = made.pairs(1, 144)
    change: list[Callable[[str], str]] = [
        str,
        str.upper,
        lambda text: f" {text}\n",
        lambda text: text.replace(" ", "\t "),
    ]
    again = [{name: change[at % 4](text) for name, text in row.items()} for at, row in enumerate(clean[10:70:10])]
    found: Found = {"duplicate_fraction": ("fail", 6 / 150)}
    return DefectFile(1, "repeated_pairs", Sheet([*clean]).append(again, "duplicate_pair"), found)


def identical() -> DefectFile:
    sheet = made.sheet(2).plant(
        5, lambda row, at: row | {"rejected": (row["chosen"], f" {row['chosen']}\n")[at % 2]}, "identical_responses"
    )
    sheet.plant(
        3, lambda row, at: row | {"rejected": (row["chosen"].upper(), row["chosen"].replace(" ", "  "))[at % 2]}
    )
    found: Found = {"identical_fraction": ("fail", 5 / 150), "same_words_fraction": ("warn", 3 / 145)}
    return DefectFile(2, "identical_answers", sheet, found)


def contradictions() -> DefectFile:
    clean = made.pairs(3, 165)
    sheet = Sheet([*clean])
    for number in range(1, 11):
        sheet.mark(number, "conflicting_pair")
    sheet.append([made.exchanged(row) for row in clean[:10]], "conflicting_pair")
    writer = Writer(103)
    for row in clean[20:30]:
        third = writer.answer()
        sheet.append([{**row, "chosen": row["rejected"], "rejected": third}])
        sheet.append([{**row, "chosen": third, "rejected": row["chosen"]}])
    rows = len(sheet.rows)
    found: Found = {"conflicting_fraction": ("fail", 20 / rows), "cycle_fraction": ("fail", 30 / rows)}
    return DefectFile(3, "contradictions", sheet, found, options={"max_quarantined_fraction": 0.2})


def people_who_differ() -> DefectFile:
    """Three people judge the same answers: they repeat and contradict each other, which is no defect."""
    writer = Writer(203)
    rows: list[Line] = []
    for at in range(60):
        pair = writer.pair()
        rows += (as_comparison(pair if at % 3 or n else made.exchanged(pair), (at + n) % 2, f"w{n}") for n in range(3))
    agreement = (40 * 3 + 20) / (60 * 3)
    numbers = {"annotator_agreement_fraction": agreement, "num_items_judged_by_several": 60}
    return DefectFile(3, "people_who_differ", Sheet(rows), numbers=numbers)


def wrong_labels() -> DefectFile:
    sheet = made.worded(4).plant(140, lambda row, _: made.exchanged(row))
    found: Found = {"label_noise_fraction": ("warn", None), "label_noise_rate": ("warn", None)}
    return DefectFile(4, "wrong_labels", sheet, found, suffix=".parquet")


def ties() -> DefectFile:
    def tied(row: Row, _: int) -> Row:
        return row | ({"margin": 0.0} if "margin" in row else {"chosen_score": 3, "rejected_score": 3})

    found: Found = {"ties_without_policy_fraction": ("fail", 6 / 150)}
    return DefectFile(5, "ties", made.judged(5, 150).plant(6, tied, "undeclared_tie"), found)


def inverted() -> DefectFile:
    sheet = made.binarized(6).plant(3, lambda row, _: row | made.scores(1.0, 7.5))
    sheet.plant(2, lambda row, _: row | made.scores(85.0, 7.5))
    found: Found = {"score_inverted_fraction": ("fail", 3 / 120), "score_out_of_range": ("fail", 2)}
    return DefectFile(6, "scores_against_labels", sheet, found, suffix=".parquet")


def length() -> DefectFile:
    sheet = made.sheet(7)
    sheet.plant(135, made.longer).plant(15, made.shorter)
    found: Found = {"chosen_longer_share": ("fail", 0.9)}
    linked: Found = {"shortcut_accuracy_lower_bound": ("fail", None), "shortcut_auc_lower_bound": ("fail", None)}
    return DefectFile(7, "longer_is_better", sheet, found, linked)


def length_of_source() -> DefectFile:
    """Length tells the label in each of two sources, and nothing over both."""
    sources = ("forum", "letters")
    rows: list[Line] = []
    for at, row in enumerate(made.pairs(107)):
        is_longer = (at % 2 == 0) == (at % 20 > 1)
        rows.append((made.longer if is_longer else made.shorter)(row) | {"source": sources[at % 2]})
    found: Found = {"chosen_longer_share_by_source": ("warn", None)}
    return DefectFile(7, "longer_is_better_in_one_source", Sheet(rows), found)


def two_prompts() -> DefectFile:
    def changed(row: Row, at: int) -> Row:
        question, answer = row["rejected"].removeprefix("\n\nHuman: ").split("\n\nAssistant: ")
        asked = (
            f"{question} Or not?",
            question.replace(" ", "  ", 1),
            "Hello.\n\nAssistant: Hello.\n\nHuman: " + question,
        )
        return row | {"rejected": made.transcript(asked[at % 3], answer)}

    found: Found = {"prompt_mismatch_fraction": ("fail", 6 / 150)}
    return DefectFile(8, "two_prompts", made.transcripts(8).plant(6, changed, "prompt_mismatch"), found)


def blank() -> DefectFile:
    blanks = ("", "   ", "\n\t", "\u00a0\u3000")
    sheet = made.sheet(9, 160).plant(6, on_one_side(lambda _, at: blanks[at % 4]), "empty_response")
    sheet.plant(2, lambda row, at: row | {"prompt": blanks[at + 1]}, "empty_prompt")
    found: Found = {"empty_fraction": ("fail", 6 / 160), "empty_prompt_fraction": ("warn", 2 / 160)}
    return DefectFile(9, "blank_texts", sheet, found)


def cut_off() -> DefectFile:
    def cut(row: Row, _: int) -> Row:
        return row | {"rejected": " ".join([*row["rejected"].split(" ")[:-2], "and", "because", "the"])}

    found: Found = {"truncated_fraction": ("warn", 28 / 208), "truncated_gap": ("fail", -28 / 104)}
    return DefectFile(10, "cut_answers", made.sheet(10, 104, 4).plant(28, cut), found)


def last_turn() -> DefectFile:
    def changed(row: Row, at: int) -> Row:
        said = {"role": "user", "content": "Thank you."}
        sides = (("chosen",), ("rejected",), ("chosen", "rejected"))[at % 3]
        return row | {side: [*row[side], said] for side in sides}

    found: Found = {"last_turn_fraction": ("fail", 5 / 120)}
    return DefectFile(
        11, "user_has_the_last_word", made.messages(11).plant(5, changed, "last_turn_not_assistant"), found
    )


def role_order() -> DefectFile:
    inserted = (
        [("user", "Well?")],
        [("system", "Be brief.")],
        [("tool", "42")],
        [("assistant", "Let me see.")],
        [("assistant", "Yes."), ("system", "Be brief."), ("user", "Go on.")],
    )

    def changed(row: Row, at: int) -> Row:
        turns = [{"role": role, "content": content} for role, content in inserted[at]]
        return {side: [row[side][0], *turns, row[side][-1]] for side in row}

    found: Found = {"role_order_fraction": ("fail", 5 / 120)}
    return DefectFile(12, "roles_out_of_order", made.messages(12).plant(5, changed, "role_order"), found)


def mojibake() -> DefectFile:
    broken = ("cafÃ© near the harbour", "donâ€™t touch it", "naÃ¯ve idea", "\ufffd\ufffd or so")
    sheet = made.sheet(13).plant(4, on_one_side(lambda text, at: f"{text[:-1]}, {broken[at]}."))
    return DefectFile(13, "broken_encoding", sheet, {"mojibake_fraction": ("warn", 4 / 150)}, suffix=".csv")


def odd_characters() -> DefectFile:
    controls, unseen = ("\x1b[1m", "\x07", "\x85"), ("\u200b", "\u202e", "\ufeff")
    sheet = made.sheet(14).plant(3, on_one_side(lambda text, _: text.replace(" ", "\x00", 1)), "nul_character")
    sheet.plant(3, on_one_side(lambda text, at: text.replace(" ", controls[at], 1)))
    sheet.plant(3, on_one_side(lambda text, at: text.replace(" ", f" {unseen[at]}", 1)))
    found: Found = {
        "nul_fraction": ("fail", 3 / 150),
        "control_fraction": ("fail", 3 / 147),
        "invisible_fraction": ("fail", 3 / 147),
    }
    return DefectFile(14, "odd_characters", sheet, found)
