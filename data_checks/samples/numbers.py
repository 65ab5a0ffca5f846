"""The numbers of a sample: what each means, its unit and the limits that it should be held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """One number and its limits; it is bad when it is above."""

    unit: str
    meaning: str
    warn: float | None = None
    """Warn from here on."""
    fail: float | None = None
    """Fail from here on."""
    source: str = ""
    """Where the limits come from."""
    advice: str = ""
    """What to do beyond them."""


SHARE = "share, 0 to 1"
AREA = "area, 0 to 1"
PROBE_ADVICE = (
    "the reward model will learn this shortcut: look at the probe's strongest features, then balance them between "
    "chosen and rejected answers (drop, resample or rewrite pairs)"
)
LENGTH_ADVICE = (
    "a reward model can win on length alone: balance lengths, or use a length penalty and compare with the baselines "
    "`longest` and `shortest`"
)
NUMBERS: dict[str, Number] = {
    "sample_pairs": Number("pairs", "pairs of the sample that hold a preference (ties that were kept do not)"),
    "sample_rows": Number("rows", "all rows of the sample"),
    "shortcut_accuracy": Number(SHARE, "held-out accuracy of the shortcut probe; 0.5: nothing learnt"),
    "shortcut_accuracy_standard_error": Number(SHARE, "its standard error, clustered by prompt"),
    "shortcut_accuracy_lower_bound": Number(
        SHARE, "its lower bound, 99 % one-sided", 0.60, 0.70,
        "defect catalogue, shortcut probe: 70 %; 60 % as for length", PROBE_ADVICE,
    ),
    "shortcut_auc": Number(AREA, "the probe's area under the ROC curve, pairs against swapped ones; 0.5 is chance"),
    "shortcut_auc_standard_error": Number(AREA, "its standard error, clustered by prompt"),
    "shortcut_auc_lower_bound": Number(
        AREA, "its lower bound, 99 % one-sided", None, 0.75, "defect catalogue 30: 0.75", PROBE_ADVICE,
    ),
    "shortcut_best_feature_accuracy": Number(
        SHARE, "held-out accuracy of the one feature and direction that is best on the other folds"
    ),
    "length_accuracy": Number(SHARE, "accuracy of the better of `longer wins` and `shorter wins`; 0.5: no bias"),
    "length_accuracy_lower_bound": Number(
        SHARE, "its lower bound, 99 % one-sided", 0.60, 0.70,
        "defect catalogue 7: a share of chosen-longer outside 0.40 to 0.60; 0.70 or 0.30", LENGTH_ADVICE,
    ),
    "length_chosen_longer_share": Number(SHARE, "pairs whose chosen answer has more characters, equal ones by half"),
    "length_auc": Number(AREA, "area under the ROC curve of the difference in characters; above 0.5: longer is chosen"),
    "length_auc_standard_error": Number(AREA, "its standard error, clustered by prompt"),
    "length_slope_per_100_characters": Number(
        "log-odds", "change of the log-odds of being chosen for 100 characters more (logistic regression, no intercept)"
    ),
    "label_noise_rate": Number(
        SHARE, "estimated share of labels that are flipped at random, by held-out predictions of a model of words",
        0.15, None, "defect catalogue 4: 15 %",
        "read the listed rows; ask annotators again or drop the worst. Labels are never changed here",
    ),
    "label_noise_fraction": Number(
        SHARE, "pairs that a model of the other pairs labels the other way with P(chosen) < 0.1",
        0.15, None, "defect catalogue 4: 15 %",
        "read the listed rows; ask annotators again or drop the worst. Labels are never changed here",
    ),
    "label_noise_model_accuracy": Number(SHARE, "that model's held-out accuracy; up to 0.55 it cannot tell"),
    "label_noise_calibration_error": Number(
        SHARE, "mean gap between the certainty it claims and the share it gets right, over ten bins"
    ),
    "language_num_rows": Number("rows", "rows whose languages were looked at, at most 5,000"),
    "language_known_fraction": Number(SHARE, "texts whose language is known; the others are short or unclear"),
    "language_outside_fraction": Number(
        SHARE, "rows with a text in none of data.languages, of rows with a text of known language",
        0.02, None, "defect catalogue 17: 2 %",
        "remove such rows, or name their language in data.languages",
    ),
    "language_mismatch_fraction": Number(
        SHARE, "chosen answers in another language than their prompt, of those that can be compared",
        None, 0.05, "defect catalogue 17: 5 %",
        "the model will learn to answer in another language: remove or translate such answers",
    ),
    "language_mismatch_rejected_fraction": Number(SHARE, "the same of rejected answers"),
    "language_num_compared": Number("answers", "chosen answers that can be compared with their prompt"),
    "toxicity_chosen_mean": Number("probability", "mean over chosen answers (and answers labelled good)"),
    "toxicity_rejected_mean": Number("probability", "mean over rejected answers (and answers labelled bad)"),
    "toxicity_chosen_high_fraction": Number(SHARE, "chosen answers with a probability of at least 0.8"),
    "toxicity_rejected_high_fraction": Number(SHARE, "rejected answers with a probability of at least 0.8"),
    "toxicity_gap": Number("probability", "chosen mean minus rejected mean"),
    "toxicity_gap_lower_bound": Number(
        "probability", "its lower bound, 99 % one-sided", 0.02, None,
        "defect catalogue 18: chosen not above rejected; 2 points of slack are this project's",
        "toxic answers are preferred: look at the pairs with chosen answers above 0.8 and at the order of the labels",
    ),
}  # fmt: skip
"""Every name is in each analysis, None where it could not be measured. A limit on a lower bound says: the data show
with 99 % confidence that the number is beyond it, so a few pairs hardly fail by chance."""
