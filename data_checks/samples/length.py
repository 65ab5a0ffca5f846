"""Length bias: how far the length of the answers alone tells which one is preferred."""

from __future__ import annotations

from data_checks.samples.pairs import Pairs
from data_checks.samples.statistics import clustered_standard_error, credits, logistic_slope, lower_bound, pair_auc


def length_bias(pairs: Pairs) -> dict[str, float | int | None]:
    """Measure it in characters, over at least one pair.

    `length_accuracy` is that of the better of the rules "the longer one" and "the shorter one" (0.5 to 1, equal lengths
    count half); its lower bound is Wilson's, one-sided with 99 % confidence on either side of 0.5.
    """
    difference = pairs.difference("characters")
    longer = credits(difference)
    share = float(longer.mean())
    accuracy = max(share, 1 - share)
    error = clustered_standard_error(longer, pairs.cluster)
    auc, auc_error = pair_auc(difference, pairs.cluster)
    return {
        "length_accuracy": accuracy,
        "length_accuracy_lower_bound": lower_bound(accuracy, error, pairs.num_clusters, len(pairs)),
        "length_chosen_longer_share": share,
        "length_auc": auc,
        "length_auc_standard_error": auc_error,
        "length_slope_per_100_characters": logistic_slope(difference / 100),
    }
