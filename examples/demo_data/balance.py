"""Which answers may enter a pair, which pairs balance each other, and a probe that says whether they do.

A reward model learns whatever separates chosen from rejected. If chosen answers are longer, it learns to like length.
So pairs are taken two at a time: a pair enters only together with a *mirror*, another pair whose difference in every
trivial feature is (nearly) the opposite. What is left to learn is the one thing that is not mirrored: the gold measure.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

# Things a public example should not talk about. Pairs that contain one are left out.
UNSUITABLE = re.compile(
    r"\b(kill\w*|murder\w*|suicid\w*|sex\w*|drugs?|damn\w*|hell|nazi\w*|racis\w*|rape\w*|porn\w*|terroris\w*|corpse\w*"
    r"|shit\w*|fuck\w*|bitch\w*|ass|nude\w*|naked|slave\w*|hitler|genocid\w*|satan\w*)\b",
    re.IGNORECASE,
)
# An answer about the assistant, or an apology, is no answer about the topic.
OFF_TOPIC = re.compile(
    r"\b(sorry|as an ai|language model|smollm\w*|assist you|hugging face|unable to)\b", re.IGNORECASE
)
TRACES = re.compile(r"[@<>|\\{}\[\]#*_~^]|https?:|www\.|\d{4,}")

FEATURES = (
    "characters",
    "words",
    "sentences",
    "commas",
    "exclamation_marks",
    "question_marks",
    "double_quotes",
    "capitals",
    "newlines",
    "starts_with_i",
    "starts_with_article",
)
# How far a pair and its mirror may be apart, in each feature's own unit. Zero: they must cancel exactly.
MIRROR_TOLERANCE = np.array([8.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the first preferred by the gold measure."""

    prompt_id: str
    prompt: str
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float


def is_usable(answer: str) -> bool:
    """One finished, plain, printable-ASCII line of 4 to 45 words that says something about the topic."""
    return (
        answer.isascii()
        and answer.isprintable()
        and answer[-1:] in (".", "!", "?", '"')
        and answer.count('"') % 2 == 0
        and 4 <= len(answer.split()) <= 45
        and not UNSUITABLE.search(answer)
        and not OFF_TOPIC.search(answer)
        and not TRACES.search(answer)
    )


def trivial_features(answer: str) -> np.ndarray:
    """What can be seen in an answer without understanding it, in the order of `FEATURES`."""
    return np.array(
        [
            len(answer),
            len(answer.split()),
            len(re.findall(r"[.!?]+(?:\s|\"|$)", answer)),
            answer.count(","),
            answer.count("!"),
            answer.count("?"),
            answer.count('"'),
            sum(map(str.isupper, answer)),
            answer.count("\n"),
            bool(re.match(r"I\b", answer)),
            bool(re.match(r"(A|An|The)\b", answer)),
        ],
        dtype=float,
    )


def differences(pairs: list[Pair]) -> np.ndarray:
    """Trivial features of chosen minus rejected, one row a pair."""
    return np.array([trivial_features(pair.chosen) - trivial_features(pair.rejected) for pair in pairs])


def opening(answer: str) -> str:
    """The first two words, lower case."""
    return " ".join(answer.lower().split()[:2])


def select_balanced(
    candidates: list[Pair], count: int, per_prompt: int, per_opening: int, rng: random.Random
) -> list[Pair]:
    """Draw `count` pairs, each with its mirror, using every answer once and every prompt at most `per_prompt` times.

    At most `per_opening` chosen and `per_opening` rejected answers begin with the same two words, so that no opening
    phrase carries the label.
    """
    order = list(range(len(candidates)))
    rng.shuffle(order)
    pool = [candidates[index] for index in order]
    deltas = differences(pool)
    weights = 1.0 / np.maximum(MIRROR_TOLERANCE, 1.0)
    free = np.ones(len(pool), dtype=bool)
    prompts: Counter[str] = Counter()
    openings: Counter[tuple[str, str]] = Counter()
    members: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, pair in enumerate(pool):
        members[pair.prompt_id, pair.chosen].append(index)
        members[pair.prompt_id, pair.rejected].append(index)

    def keys(pair: Pair) -> list[tuple[str, str]]:
        return [("chosen", opening(pair.chosen)), ("rejected", opening(pair.rejected))]

    def fits(pair: Pair) -> bool:
        return prompts[pair.prompt_id] < per_prompt and all(openings[key] < per_opening for key in keys(pair))

    def take(index: int) -> Pair:
        pair = pool[index]
        prompts[pair.prompt_id] += 1
        openings.update(keys(pair))
        for answer in (pair.chosen, pair.rejected):
            free[members[pair.prompt_id, answer]] = False
        return pair

    selected: list[Pair] = []
    for index, pair in enumerate(pool):
        if len(selected) >= count:
            break
        if not free[index] or not fits(pair):
            continue
        # A mirror from another prompt: this prompt's other answers stay free for a second pair.
        distance = np.abs(deltas + deltas[index])
        near = np.flatnonzero(free & (distance <= MIRROR_TOLERANCE).all(axis=1))
        near = [other for other in near if pool[other].prompt_id != pair.prompt_id and fits(pool[other])]
        if near:
            closest = min(near, key=lambda other: (float((distance[other] * weights).sum()), other))
            selected += [take(index), take(closest)]
    if len(selected) < count:
        raise SystemExit(f"only {len(selected)} balanced pairs out of {len(pool)} candidates; sample more answers")
    rng.shuffle(selected)
    return selected


def fit_probe(rows: np.ndarray) -> np.ndarray:
    """Weights of a logistic regression for "the first answer is the chosen one", without intercept.

    Without intercept the order of the sides teaches nothing: swapping them flips the features and the label alike.
    """

    def loss(weight: np.ndarray) -> float:
        return float(np.logaddexp(0.0, -rows @ weight).mean() + 0.001 * weight @ weight)

    return minimize(loss, np.zeros(rows.shape[1])).x


def share_right(margins: np.ndarray) -> float:
    """Share of positive margins; a tie counts half."""
    return float(((margins > 0) + 0.5 * (margins == 0)).mean())


def scaled_differences(pairs: list[Pair]) -> np.ndarray:
    """Differences in units of their standard deviation; a constant feature stays zero."""
    rows = differences(pairs)
    return rows / np.maximum(rows.std(axis=0), 1e-9)


def fitted_accuracy(pairs: list[Pair]) -> float:
    """Accuracy of the probe on the very pairs it was fitted to: an upper bound for what the features can tell."""
    rows = scaled_differences(pairs)
    return share_right(rows @ fit_probe(rows))


def probe_accuracy(pairs: list[Pair], folds: int, rng: random.Random) -> float:
    """Cross-validated accuracy of a logistic regression that sees trivial features only. Chance is 0.5.

    Pairs of one prompt stay in one fold. On mirrored pairs it comes out a little below 0.5: what is left over in four
    folds is the opposite of what is left over in the fifth.
    """
    rows = scaled_differences(pairs)
    prompt_ids = sorted({pair.prompt_id for pair in pairs})
    rng.shuffle(prompt_ids)
    fold_of_prompt = {prompt_id: number % folds for number, prompt_id in enumerate(prompt_ids)}
    fold = np.array([fold_of_prompt[pair.prompt_id] for pair in pairs])
    margins = np.zeros(len(pairs))
    for held_out in range(folds):
        margins[fold == held_out] = rows[fold == held_out] @ fit_probe(rows[fold != held_out])
    return share_right(margins)
