"""Make the demo's data: prompts, preference pairs and a probe for shortcuts.

    python examples/demo_data/generate.py --model PATH_TO_SMOLLM2 --out examples/demo_data --seed 20

The task: say one short sentence about an everyday thing, and say it cheerfully. The gold measure is VADER's compound
sentiment, a word list with rules; the reward model sees pairs only, never the list. What the script does:

1. puts every topic of `topics.py` into every template: training prompts and held-out prompts, no topic in both;
2. samples answers to the training prompts from the SFT model with vLLM, and keeps those that finished, are plain text
   and name the topic;
3. pairs a more cheerful with a less cheerful answer to the same prompt, balanced by `balance.py` so that length,
   punctuation and openings do not give the label away;
4. writes `pairs.jsonl`, `train_prompts.jsonl` and `eval_prompts.jsonl`, and prints the probe's accuracy.

Every sample and every draw is seeded. Tokens may still differ where the arithmetic does: another machine, another vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
from dataclasses import asdict
from pathlib import Path

from balance import Pair, differences, fitted_accuracy, is_usable, opening, probe_accuracy, select_balanced
from topics import EVAL_TOPICS, TRAIN_TOPICS
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

TEMPLATES = (
    "Give your opinion of {} in one short sentence.",
    "What do you think of {}? Reply with one short sentence.",
    "Share a thought about {} in a few words.",
)
SMALL_WORDS = frozenset(
    ["a", "an", "and", "at", "by", "first", "for", "from", "in", "is", "last", "my", "near", "of", "old", "on", "out"]
).union(["over", "that", "the", "through", "to", "under", "up", "who", "with", "without"])

ANSWERS_PER_PROMPT = 14
MAX_NEW_TOKENS = 64
# Below 1: the model's weights come from a 4-bit file, and samples at 1.0 are wild.
TEMPERATURE = 0.75
MIN_SCORE_GAP = 0.5
NUM_PAIRS = 400
MAX_PAIRS_PER_PROMPT = 3
MAX_SAME_OPENING = 12
MAX_PROBE_ACCURACY = 0.58


def build_prompts(split: str, topics: tuple[str, ...]) -> list[dict[str, str]]:
    """Every topic in every template, numbered in that order."""
    texts = [template.format(topic) for topic in topics for template in TEMPLATES]
    return [{"prompt_id": f"{split}-{number:04d}", "prompt": text} for number, text in enumerate(texts)]


def content_words(text: str) -> set[str]:
    """The words of a topic that carry meaning."""
    return set(re.findall(r"[a-z']+", text.lower())) - SMALL_WORDS


def names_topic(answer: str, topic: str) -> bool:
    """Whether the answer has a word that begins like one of the topic's words ("swim", "swimming")."""
    starts = tuple(word[:5] for word in content_words(topic))
    return any(word.startswith(starts) for word in re.findall(r"[a-z']+", answer.lower()))


def check_disjoint() -> None:
    """No word that carries meaning may stand in a training topic and in a held-out topic."""
    train, held_out = (
        set().union(*(content_words(topic) for topic in topics)) for topics in (TRAIN_TOPICS, EVAL_TOPICS)
    )
    if shared := sorted(train & held_out):
        raise SystemExit(f"topics share words between training and held-out: {', '.join(shared)}")


def request_seed(seed: int, prompt_id: str, number: int) -> int:
    """A seed of its own for every answer, so that an answer does not depend on the order of requests."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt_id}/{number}".encode()).digest()[:4], "big") >> 1


def sample_answers(model: Path, prompts: list[dict[str, str]], seed: int) -> list[list[str]]:
    """Distinct usable answers for each prompt, in the order they were sampled."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams  # imported late: its settings are read from the environment at import

    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=128,
        # A seeded request whose prompt is cut in two fails on CPU, so no prompt may be cut.
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
    )
    requests = [(row, number) for row in prompts for number in range(ANSWERS_PER_PROMPT)]
    outputs = llm.chat(
        [[{"role": "user", "content": row["prompt"]}] for row, _ in requests],
        [
            SamplingParams(
                temperature=TEMPERATURE, max_tokens=MAX_NEW_TOKENS, seed=request_seed(seed, row["prompt_id"], number)
            )
            for row, number in requests
        ],
        use_tqdm=False,
    )
    answers: dict[str, list[str]] = {row["prompt_id"]: [] for row in prompts}
    topic_of = dict(zip(answers, (topic for topic in TRAIN_TOPICS for _ in TEMPLATES), strict=True))
    truncated = 0
    for (row, _), output in zip(requests, outputs, strict=True):
        completion = output.outputs[0]
        truncated += completion.finish_reason == "length"
        text, earlier = completion.text.strip(), answers[row["prompt_id"]]
        finished = completion.finish_reason == "stop"
        if finished and is_usable(text) and names_topic(text, topic_of[row["prompt_id"]]) and text not in earlier:
            earlier.append(text)
    print(f"sampled {len(requests)} answers, {truncated / len(requests):.1%} cut at {MAX_NEW_TOKENS} tokens")
    return list(answers.values())


def candidate_pairs(prompts: list[dict[str, str]], answers: list[list[str]]) -> list[Pair]:
    """Every two answers to one prompt whose gold scores are at least `MIN_SCORE_GAP` apart."""
    gold = SentimentIntensityAnalyzer()
    candidates = []
    for row, texts in zip(prompts, answers, strict=True):
        scored = sorted(((gold.polarity_scores(text)["compound"], text) for text in texts), reverse=True)
        candidates += [
            Pair(row["prompt_id"], row["prompt"], chosen, rejected, high, low)
            for (high, chosen), (low, rejected) in itertools.combinations(scored, 2)
            if high - low >= MIN_SCORE_GAP
        ]
    return candidates


def write_rows(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def report(pairs: list[Pair], candidates: list[Pair], seed: int) -> float:
    """Print counts and how much trivial features tell about the label; return the probe's higher accuracy."""
    accuracy = probe_accuracy(pairs, 5, random.Random(seed))
    delta = differences(pairs)
    longer = float(((delta[:, 0] > 0) + 0.5 * (delta[:, 0] == 0)).mean())
    openings = {opening(pair.chosen) for pair in pairs} | {opening(pair.rejected) for pair in pairs}
    surplus = max(
        abs(sum((opening(pair.chosen) == start) - (opening(pair.rejected) == start) for pair in pairs))
        for start in openings
    )
    gap = sum(pair.chosen_score - pair.rejected_score for pair in pairs) / len(pairs)
    print(f"pairs: {len(pairs)} on {len({pair.prompt_id for pair in pairs})} prompts, mean gold gap {gap:.2f}")
    print(f"chosen longer: {longer:.3f}; largest surplus of one two-word opening: {surplus} answers")
    print(
        f"shortcut probe on all {len(candidates)} candidates: {probe_accuracy(candidates, 5, random.Random(seed)):.3f}"
    )
    fitted = fitted_accuracy(pairs)
    print(f"shortcut probe: {accuracy:.3f} in 5-fold cross-validation, {fitted:.3f} on what it was fitted to")
    return max(accuracy, fitted)


def main() -> None:
    """Parse the command line, generate, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct (safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--seed", type=int, default=20, help="seed of the samples and of the selection (default: 20)")
    args = parser.parse_args()

    check_disjoint()
    train, held_out = build_prompts("train", TRAIN_TOPICS), build_prompts("eval", EVAL_TOPICS)
    candidates = candidate_pairs(train, sample_answers(args.model, train, args.seed))
    pairs = select_balanced(candidates, NUM_PAIRS, MAX_PAIRS_PER_PROMPT, MAX_SAME_OPENING, random.Random(args.seed))
    if report(pairs, candidates, args.seed) > MAX_PROBE_ACCURACY:
        raise SystemExit("trivial features give the label away; nothing written")

    args.out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(pair) for pair in pairs]
    write_rows(args.out / "pairs.jsonl", [{k: v for k, v in row.items() if k != "prompt_id"} for row in rows])
    write_rows(args.out / "train_prompts.jsonl", train)
    write_rows(args.out / "eval_prompts.jsonl", held_out)
    print(f"wrote {len(pairs)} pairs, {len(train)} training prompts, {len(held_out)} held-out prompts to {args.out}")


if __name__ == "__main__":
    main()
