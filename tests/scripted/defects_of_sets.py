"""Files with the defects 15 to 30 of the catalogue: what texts hold, evaluation prompts, what a set adds up to."""

from __future__ import annotations

import json
from collections.abc import Callable

import defect_rows as made
from clean_rows import Writer
from defect_rows import DefectFile, Found, Row, on_one_side


def control_tokens() -> DefectFile:
    obeyed, lookalikes = ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), ("[INST]", "<extra_id_1>", "<start_of_turn>")
    sheet = made.sheet(15)
    sheet.plant(6, on_one_side(lambda text, at: f"{text} {obeyed[at % 3]}"), "special_tokens_in_content")
    sheet.plant(6, on_one_side(lambda text, at: f"{lookalikes[at % 3]} {text}"))
    found: Found = {"special_token_fraction": ("fail", 6 / 150), "marker_fraction": ("fail", 6 / 144)}
    return DefectFile(15, "control_tokens", sheet, found, tokenizer=True)


def personal() -> DefectFile:
    secrets = (
        "AKIA" + "IOSFODNN7EXAMPLE",
        "postgres://ann:q7Lw2vKx9T@db.intern.net/shop",
        'api_key = "q7Lw2vKx9TzP4mRb8NdY"',
    )
    known = (
        "ann.lee@posteo.de",
        "+44 20 7946 0958",
        "4556 7375 8689 9855",
        "GB82 WEST 1234 5698 7654 32",
        "81.2.69.142",
    )
    sheet = made.sheet(16).plant(3, on_one_side(lambda text, at: f"{text} {secrets[at]}"), "secret")
    sheet.plant(6, on_one_side(lambda text, at: f"{text[:-1]}: {known[at % 5]}."))
    found: Found = {"secret_rows": ("warn", 3), "pii_fraction": ("fail", 6 / 147)}
    return DefectFile(16, "secrets_and_people", sheet, found)


def languages() -> DefectFile:
    sheet = made.sheet(17).plant(45, made.in_another_language)
    found: Found = {"language_mismatch_fraction": ("fail", None), "language_outside_fraction": ("warn", None)}
    return DefectFile(17, "other_languages", sheet, found, options={"languages": ["en"]})


def toxic() -> DefectFile:
    rude = ("You are a stupid idiot and", "Shut up, damn fool,", "What an idiotic moron:", "Go to hell, you loser,")
    sheet = made.sheet(18).plant(
        30, lambda row, at: made.exchanged(row) | {"chosen": f"{rude[at % 4]} {row['rejected'][4:]}"}
    )
    return DefectFile(18, "toxic_is_better", sheet, {"toxicity_gap_lower_bound": ("warn", None)})


def contaminated() -> DefectFile:
    """Evaluation prompts as they are: as prompts, in longer prompts, in answers."""
    asked = made.prompts(119)

    def changed(row: Row, at: int) -> Row:
        if at % 3 == 2:
            return row | {"chosen": f"{row['chosen']} {asked[at]}"}
        return row | {"prompt": (asked[at], f"{row['prompt']} {asked[at]}")[at % 3]}

    sheet = made.sheet(19).plant(6, changed, "prompt_in_evaluation")
    return DefectFile(
        19, "evaluation_prompts_inside", sheet, {"contaminated_fraction": ("warn", 6 / 150)}, evaluation=asked
    )


def contaminated_in_disguise() -> DefectFile:
    """Evaluation prompts that equal strings, or long word sequences within one line, do not show."""
    short = "Who painted this ceiling?"
    dense = "Internationalisation characteristics: disproportionately misunderstood?"
    asked = [short, dense, *made.prompts(120)]
    writer = Writer(220)
    words = [prompt.split(" ") for prompt in asked]
    changes: list[Callable[[Row], Row]] = [
        lambda row: row | {"prompt": "  who painted THIS\nceiling ..."},
        lambda row: row | {"rejected": f"{writer.answer()} {dense.lower()} {writer.answer()}"},
        lambda row: row | {"prompt": "\n> ".join(" ".join(words[2][at : at + 4]) for at in range(0, len(words[2]), 4))},
        lambda row: row | {"prompt": asked[3].upper().replace(" ", "  ").replace("?", " !")},
        lambda row: row | {"chosen": f"{writer.answer(3)} {asked[4]} {writer.answer(3)}"},
        lambda row: row | {"prompt": f"{' '.join(words[5][:16])} the nice lady next door?"},
        lambda row: row | {"prompt": asked[6].replace("which of", "whch of")},
    ]  # fmt: skip
    sheet = made.sheet(20).plant(len(changes), lambda row, at: changes[at](row), "prompt_in_evaluation")
    found: Found = {"contaminated_fraction": ("warn", len(changes) / 150)}
    return DefectFile(20, "evaluation_prompts_in_disguise", sheet, found, evaluation=asked)


def near_duplicates() -> DefectFile:
    """Prompts of one template: more of them than a cluster may have, so that some end up on both sides of the split."""

    def changed(row: Row, at: int) -> Row:
        return row | {"prompt": f"Please write three short and friendly lines to the owner of house number {at + 11}."}

    found: Found = {
        "near_duplicate_prompts_fraction": ("warn", None),
        "near_duplicates_across_splits": ("fail", None),
    }
    halves = {"validation_fraction": 0.5}
    return DefectFile(21, "nearly_the_same_prompts", made.sheet(21).plant(90, changed), found, options=halves)


def same_in_other_words() -> DefectFile:
    sheet = made.sheet(22, 100)
    again = []
    for row, other in zip(made.pairs(22, 150)[100:], sheet.rows, strict=False):
        assert isinstance(other, dict)
        words = other["prompt"][:-1].split(" ")
        again.append(row | {"prompt": " ".join([*words[-3:], *words[3:-3], *words[:3]]) + "?"})
    found: Found = {"semantic_duplicate_fraction": ("warn", None)}
    return DefectFile(22, "same_in_other_words", sheet.append(again), found, options={"semantic_duplicates": True})


def too_long() -> DefectFile:
    sheet = made.sheet(23).plant(31, lambda row, _: row | {"chosen": " ".join([row["chosen"]] * 6)}, "too_long")
    found: Found = {"too_long_fraction": ("fail", 31 / 150), "over_long_gap": ("warn", 31 / 150)}
    options = {"max_total_tokens": 160, "max_quarantined_fraction": 0.25}
    return DefectFile(23, "too_long", sheet, found, options=options, tokenizer=True)


def gold() -> DefectFile:
    truths = ("3/0", "", "\\frac{1}{", "It is 18.\n#### unknown", " \n", "1e999")

    def changed(row: Row, at: int) -> Row:
        return row | {"reward_model": {"style": "rule", "ground_truth": truths[at]}}

    found: Found = {"rl_prompts_gold_rejected_fraction": ("fail", 6 / 150)}
    sheet = made.questions(24).plant(6, changed, "gold_rejected")
    return DefectFile(24, "unreadable_gold", sheet, found, kind="rl_prompts", suffix=".parquet")


def unusable() -> DefectFile:
    def changed(row: Row, at: int) -> Row:
        return row | {"extra_info": row["extra_info"] | {"pass_rate": float(at % 2)}}

    found: Found = {"unusable_prompts_fraction": ("warn", 0.7)}
    return DefectFile(25, "always_or_never_solved", made.questions(25).plant(105, changed), found, kind="rl_prompts")


def broken_lines() -> DefectFile:
    def broken(row: Row, at: int) -> bytes:
        text = json.dumps(row).encode()
        return (text[:-9], text + b"}", b"[" + text + b"]", text[1:-1], b"not a row", text[:-1] + b', "margin": nan}')[
            at % 6
        ]

    def drifted(row: Row, at: int) -> Row:
        return (row | {"chosen": 7}, {"prompt": row["prompt"], "choosen": row["chosen"]})[at]

    sheet = made.sheet(26, 200).plant(6, broken, "malformed_json")
    sheet.plant(1, lambda row, _: json.dumps(row).encode().replace(b" ", b"\xe9", 6), "invalid_unicode")
    sheet.plant(2, drifted, "wrong_type")
    found: Found = {"malformed_fraction": ("fail", 7 / 200), "schema_drift_fraction": ("warn", 2 / 200)}
    return DefectFile(26, "broken_lines", sheet, found)


def unjudged() -> DefectFile:
    sheet = made.feedback(126).plant(6, lambda row, _: row | {"label": None}, "missing_judgement")
    found: Found = {"feedback_missing_judgement_fraction": ("warn", 6 / 150)}
    return DefectFile(26, "unjudged_answers", sheet, found, kind="feedback")


def one_prompt() -> DefectFile:
    sheet = made.sheet(27).plant(25, lambda row, _: row | {"prompt": "What should a visitor know about this harbour?"})
    return DefectFile(27, "one_prompt_too_often", sheet, {"largest_prompt_share": ("warn", 24 / 150)})


def refusals() -> DefectFile:
    said = (
        "I'm sorry, but I can't help with that.",
        "As an AI language model, I cannot answer that: ask {} instead, please.",
    )
    sheet = made.sheet(28).plant(37, lambda row, at: row | {"rejected": said[at % 2].format(("him", "her")[at % 2])})
    return DefectFile(28, "refusals_are_worse", sheet, {"refusal_gap": ("warn", -37 / 150)})


def position() -> DefectFile:
    """The first answer is chosen in seven of ten cases, and by one of five people always."""
    sheet = made.comparisons(29, lambda at: at % 5 == 0 or at // 5 % 10 < 7)
    found: Found = {"position_p_value": ("warn", None), "annotator_position_p_value": ("warn", None)}
    return DefectFile(29, "first_is_better", sheet, found)


def layout() -> DefectFile:
    """Layout tells the label; length does not, since the other answers are as often the longer ones."""

    def changed(row: Row, at: int) -> Row:
        first, second = (side.split(". ") for side in (row["chosen"], row["rejected"]))
        listed = "- **" + "**\n- **".join(first) + "**"
        return row | {"chosen": listed, "rejected": ". ".join(second) + ("", " And that was nearly all of it.")[at % 2]}

    found: Found = {
        "shortcut_auc_lower_bound": ("fail", None),
        "shortcut_accuracy_lower_bound": ("fail", None),
    }
    return DefectFile(30, "lists_are_better", made.sheet(30, 150, 2).plant(120, changed), found)
