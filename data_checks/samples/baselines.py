"""Null baselines: what a rule that reads nothing gets right. A reward model has to beat the best of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from data_checks.samples.pairs import Pairs
from data_checks.samples.probe import ProbeResult
from data_checks.samples.statistics import FloatArray, clustered_standard_error, credits

BASELINES = ("random", "longest", "shortest", "most_markdown", "shortcut_probe")
"""In the order in which the first of equals is named best."""


def baselines(pairs: Pairs, probe: ProbeResult | None) -> dict[str, Any]:
    """Return the accuracy of each null baseline, on the training and on the validation pairs of the sample.

    Args:
        pairs: the sample's pairs with a preference (ties that were kept are not among them).
        probe: the shortcut probe, None where it could not be fitted.

    Returns:
        A flat object. For SPLIT train and validation: `SPLIT_num_pairs`, `SPLIT_num_prompts`; for each NAME of
        BASELINES `SPLIT_NAME_accuracy` and `SPLIT_NAME_standard_error` (clustered by prompt); `SPLIT_best_name`,
        `SPLIT_best_accuracy`, `SPLIT_best_standard_error`. Null where the split has no pairs or the probe was not
        fitted. Of equal answers each is right by half. `random` is 0.5 by definition, not drawn. On training pairs the
        probe is cross-validated; on validation pairs it was fitted to the training pairs. The best of several measured
        accuracies is too high by up to about a standard error: a reward model that beats it beats each of them.
    """
    length = pairs.difference("characters")
    unknown = np.full(len(pairs), np.nan)
    rules: dict[str, FloatArray] = {
        "random": np.zeros(len(pairs)),
        "longest": length,
        "shortest": -length,
        "most_markdown": pairs.markdown(),
    }
    report: dict[str, Any] = {"unit": "share of pairs in which the chosen answer wins, ties half"}
    for split, inside in (("train", ~pairs.validation), ("validation", pairs.validation)):
        held_out = unknown if probe is None else probe.validation_scores if split == "validation" else probe.scores
        report |= _of_split(split, {**rules, "shortcut_probe": held_out}, inside, pairs)
    return report


def _of_split(split: str, rules: dict[str, FloatArray], inside: np.ndarray, pairs: Pairs) -> dict[str, Any]:
    clusters = pairs.cluster[inside]
    report: dict[str, Any] = {
        f"{split}_num_pairs": len(clusters),
        f"{split}_num_prompts": len(np.unique(clusters)),
        f"{split}_best_name": None,
        f"{split}_best_accuracy": None,
        f"{split}_best_standard_error": None,
    }
    for name in BASELINES:
        scores = rules[name][inside]
        known = len(scores) > 0 and not np.isnan(scores).any()
        accuracy = float(credits(scores).mean()) if known else None
        error = clustered_standard_error(credits(scores), clusters) if known else None
        report[f"{split}_{name}_accuracy"] = accuracy
        report[f"{split}_{name}_standard_error"] = error
        best = report[f"{split}_best_accuracy"]
        if accuracy is not None and (best is None or accuracy > best):
            report[f"{split}_best_name"] = name
            report[f"{split}_best_accuracy"] = accuracy
            report[f"{split}_best_standard_error"] = error
    return report
