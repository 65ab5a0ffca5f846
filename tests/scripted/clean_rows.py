"""Rows in which nothing is wrong, from a seed: what defects are planted into.

Chosen and rejected answers are drawn alike, so that nothing but chance tells them apart, and no two prompts are alike.
"""

from __future__ import annotations

import random
from typing import Any

OPENINGS = (
    "How do I look after", "Where can we find", "What should I know about", "Who first thought of",
    "Why do people like",
    "When is it time to replace", "Could you compare prices for", "Tell me the history of", "Is it safe to move",
    "Please name three facts about", "What does it cost to repair", "How can a beginner draw",
)  # fmt: skip
KINDS = (
    "copper", "wooden", "ancient", "tiny", "folding", "yellow", "marble", "portable", "woollen", "floating", "hollow",
    "striped", "clockwork", "silver", "crooked", "quiet", "northern", "painted", "rusty", "transparent", "broken",
    "borrowed", "crystal", "electric", "famous", "golden", "heavy", "leather", "modern", "narrow", "oval", "purple",
)  # fmt: skip
THINGS = (
    "kettle", "lighthouse", "violin", "bicycle", "greenhouse", "telescope", "carpet", "sailing boat", "chess set",
    "bread oven", "fountain", "hammock", "umbrella", "piano", "windmill", "camera", "bookshelf", "sledge", "lantern",
    "compass", "wardrobe", "ladder", "orchard", "typewriter", "drawbridge",
)  # fmt: skip
PLACES = (
    "near the harbour", "in a small flat", "after a wet winter", "for a school play", "on the island of Crete",
    "before guests arrive", "in the mountains", "without any tools", "at my uncle's farm", "along the old canal",
    "in a museum", "during a long journey", "behind the bakery", "for two children", "with little money",
)  # fmt: skip
SUBJECTS = (
    "The owner", "Most visitors", "A careful neighbour", "My teacher", "Our gardener", "The manual", "Every shop here",
    "An old friend", "The mayor", "Nearly everyone", "The carpenter", "Her brother",
)  # fmt: skip
VERBS = (
    "recommends", "would choose", "asks for", "still remembers", "measures", "wraps up", "photographs", "writes about",
    "polishes", "counts", "prefers", "keeps",
)  # fmt: skip
OBJECTS = (
    "warm water and a soft cloth", "the second drawer on the left", "a map from the station", "some dry sand",
    "four screws", "the morning train", "plain soap", "an hour of daylight", "the cheaper of the two", "good string",
    "a seat by the window", "notes in the margin", "the larger key", "fresh paint", "one spoon of salt",
)  # fmt: skip
ENDINGS = (
    "",
    " every spring",
    " on most days",
    " when it rains",
    " before lunch",
    " with some patience",
    " at least once",
)


class Writer:
    """Writes prompts and answers; two writers of one seed write the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.asked: set[tuple[str, str]] = set()

    def prompt(self) -> str:
        """Return a question that no earlier one resembles: kind and thing together are asked about once."""
        if len(self.asked) == len(KINDS) * len(THINGS):
            raise ValueError(f"{len(self.asked)} prompts are all there are")
        while True:
            about = self.draw.choice(KINDS), self.draw.choice(THINGS)
            if about not in self.asked:
                self.asked.add(about)
                return f"{self.draw.choice(OPENINGS)} a {' '.join(about)} {self.draw.choice(PLACES)}?"

    def sentence(self) -> str:
        return (
            " ".join(self.draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)) + self.draw.choice(ENDINGS) + "."
        )

    def answer(self, num_sentences: int = 1) -> str:
        return " ".join(self.sentence() for _ in range(num_sentences))

    def pair(self, num_sentences: int = 1) -> dict[str, Any]:
        prompt, chosen, rejected = self.prompt(), self.answer(num_sentences), self.answer(num_sentences)
        while chosen == rejected:
            rejected = self.answer(num_sentences)
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    def pairs(self, number: int, num_sentences: int = 1) -> list[dict[str, Any]]:
        return [self.pair(num_sentences) for _ in range(number)]


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair of texts as two whole conversations, with no prompt of its own."""
    asked = {"role": "user", "content": row["prompt"]}
    return {side: [asked, {"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}


def as_comparison(row: dict[str, Any], choice: int, worker: str) -> dict[str, Any]:
    """Return a pair of texts as a worker's choice between two summaries, in the order in which they were shown."""
    texts = (row["chosen"], row["rejected"]) if choice == 0 else (row["rejected"], row["chosen"])
    return {
        "info": {"post": row["prompt"]},
        "summaries": [{"text": text} for text in texts],
        "choice": choice,
        "worker": worker,
    }


def as_judged(row: dict[str, Any], label: bool) -> dict[str, Any]:
    """Return one answer of a pair of texts with a label."""
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": label}
