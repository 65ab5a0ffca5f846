"""All costly checks over one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_checks.naming import shown_names
from data_checks.samples.baselines import baselines
from data_checks.samples.language import LanguageResult, languages
from data_checks.samples.length import length_bias
from data_checks.samples.noise import NoiseResult, label_noise
from data_checks.samples.numbers import NUMBERS
from data_checks.samples.pairs import Pairs, clusters_of, in_stable_order, pairs_of, sources_of
from data_checks.samples.probe import MIN_PAIRS, MIN_PROMPTS, ProbeResult, probe
from data_checks.samples.statistics import FloatArray, credits, logistic_slope, pair_auc
from data_checks.samples.toxicity import ToxicityResult, toxicity

if TYPE_CHECKING:
    from data_checks.config import CheckDataConfig

MIN_ROWS_OF_SOURCE = 50
"""Fewest rows of the sample for a source to have numbers of its own: a share's standard error is then 0.07."""
DECIMALS = 9
"""Numbers are rounded to these: the last bits of a fit depend on how a processor adds."""


@dataclass
class SampleAnalysis:
    """What the sample shows. No text is in it; `dataclasses.asdict` gives JSON."""

    numbers: dict[str, float | int | None]
    """By name, those of `numbers.NUMBERS`; None where it could not be measured."""
    by_source: list[dict[str, Any]]
    """{source, metric, value} for sources with enough rows."""
    skipped: dict[str, str]
    """Number -> why it is None."""
    baselines: dict[str, Any]
    """Null baselines, flat (`baselines.baselines` describes it): what a reward model has to beat."""
    probe: dict[str, Any]
    """What the shortcut probe learnt of each feature; empty where it was skipped."""
    languages: dict[str, float] = field(default_factory=dict)
    """Language -> share of the texts whose language is known, commonest first."""
    suspects: list[str] = field(default_factory=list)
    """Places (file:row) of at most 100 pairs whose label a model of the others doubts most, worst first."""


def analyse(sample: pa.Table, config: CheckDataConfig) -> SampleAnalysis:
    """Run the costly checks: shortcuts, null baselines, length bias, label noise, languages, toxicity.

    Args:
        sample: rows that are used. Columns prompt_text, chosen_text and rejected_text (null for answers judged alone),
            example, file, row, source, group_key, content_hash, for each answer the counts of `pairs.COUNTS` and
            flags; where there are any also cluster_key, split, is_tie and label. The order of rows does not matter.
        config: `languages` is read.

    Returns:
        The same for the same rows, always: folds and samples come from hashes of keys.

    Raises:
        ConfigurationError: `config.languages` has a code that the detector does not know.
    """
    sample = in_stable_order(sample)
    pairs = pairs_of(sample)
    numbers: dict[str, float | int | None] = dict.fromkeys(NUMBERS)
    numbers |= {"sample_rows": sample.num_rows, "sample_pairs": len(pairs)}
    skipped: dict[str, str] = {}

    probed = run_probe(pairs, skipped)
    if len(pairs):
        numbers |= length_bias(pairs)
    noise = label_noise(pairs)
    spoken = languages(sample, config.languages)
    toxic = toxicity(sample, clusters_of(sample))
    numbers |= (probed.numbers if probed else {}) | noise.numbers | spoken.numbers | toxic.numbers
    skipped |= spoken.skipped | toxic.skipped
    for name, value in numbers.items():
        if value is None and name not in skipped:
            skipped[name] = noise.skipped or "" if name.startswith("label_noise") else "the sample has no pairs"
    return SampleAnalysis(
        numbers=rounded(numbers),
        by_source=by_source(sample, pairs, probed, noise, spoken, toxic),
        skipped=skipped,
        baselines=rounded(baselines(pairs, probed)),
        probe=rounded(probed.details) if probed else {},
        languages=rounded(spoken.shares),
        suspects=places_of(sample, noise.suspects),
    )


def places_of(sample: pa.Table, examples: list[int]) -> list[str]:
    """Return file:row of some examples, in their order."""
    columns = (sample[name].to_pylist() for name in ("example", "file", "row"))
    places = {example: f"{file}:{row}" for example, file, row in zip(*columns, strict=True)}
    return [places[example] for example in examples]


def run_probe(pairs: Pairs, skipped: dict[str, str]) -> ProbeResult | None:
    """Return the probe's result, or None with the reason in `skipped`."""
    if len(pairs) >= MIN_PAIRS and pairs.num_clusters >= MIN_PROMPTS:
        return probe(pairs)
    why = (
        f"{len(pairs)} pairs with a preference of {pairs.num_clusters} prompts: {MIN_PAIRS} of {MIN_PROMPTS} are needed"
    )
    skipped |= {name: why for name in NUMBERS if name.startswith("shortcut_")}
    return None


def by_source(
    sample: pa.Table,
    pairs: Pairs,
    probed: ProbeResult | None,
    noise: NoiseResult,
    spoken: LanguageResult,
    toxic: ToxicityResult,
) -> list[dict[str, Any]]:
    """Return numbers of each source with enough rows: of the models that saw all sources, and of length alone."""
    length = pairs.difference("characters")
    of_pairs: dict[str, Callable[[NDArray[np.bool_]], float]] = {
        "length_chosen_longer_share": lambda rows: float(credits(length[rows]).mean()),
        "length_auc": lambda rows: pair_auc(length[rows], pairs.cluster[rows])[0],
        "length_slope_per_100_characters": lambda rows: logistic_slope(length[rows] / 100),
    }
    if probed:
        of_pairs["shortcut_accuracy"] = lambda rows: float(credits(probed.scores[rows]).mean())
    doubtful = noise.doubtful
    if doubtful is not None:
        of_pairs["label_noise_fraction"] = lambda rows: float(doubtful[rows].mean())
    of_rows: dict[str, FloatArray] = {"toxicity_gap": toxic.gaps}
    if spoken.outside is not None:
        of_rows["language_outside_fraction"] = spoken.outside

    table = []
    sources = sources_of(sample)
    for source, shown in shown_names(sorted(set(sources))).items():
        inside = pairs.source == source
        if inside.sum() >= MIN_ROWS_OF_SOURCE:
            table += [entry(shown, name, measure(inside)) for name, measure in of_pairs.items()]
        for name, values in of_rows.items():
            own = values[sources == source]
            own = own[~np.isnan(own)]
            if len(own) >= MIN_ROWS_OF_SOURCE:
                table.append(entry(shown, name, float(own.mean())))
    return table


def entry(source: str, metric: str, value: float) -> dict[str, Any]:
    """Return one row of the long table."""
    return {"source": source, "metric": metric, "value": round(value, DECIMALS)}


def rounded(value: Any) -> Any:
    """Return `value` with every float in it rounded."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, DECIMALS) + 0.0 if isinstance(value, float) else value
