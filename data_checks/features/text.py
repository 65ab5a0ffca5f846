"""Numbers and flags of every text of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_checks.features.answers import is_refusal, is_truncated, may_be_refusal, may_be_truncated
from data_checks.features.column import Rows, TextColumn
from data_checks.features.encoding import (
    has_controls,
    has_invisible,
    has_mojibake,
    may_have_controls,
    may_have_invisible,
    may_have_mojibake,
)
from data_checks.features.flags import Flag
from data_checks.features.markers import has_marker, may_have_marker
from data_checks.features.personal import (
    has_email,
    has_identity_number,
    has_ip_address,
    has_phone,
    may_have_email,
    may_have_identity_number,
    may_have_ip_address,
    may_have_phone,
)
from data_checks.features.secrets import has_secret, may_have_secret
from data_checks.features.style import style_counts

PARTS = ("prompt", "chosen", "rejected")


class Detector(NamedTuple):
    """How one flag is found: a quick look at all texts that misses none, then a precise one at what is left."""

    flag: Flag
    candidates: Callable[[TextColumn], Rows]
    confirm: Callable[[str], bool]


ANYWHERE = (
    Detector(Flag.MOJIBAKE, may_have_mojibake, has_mojibake),
    Detector(Flag.CONTROL, may_have_controls, has_controls),
    Detector(Flag.INVISIBLE, may_have_invisible, has_invisible),
    Detector(Flag.MARKER, may_have_marker, has_marker),
    Detector(Flag.SECRET, may_have_secret, has_secret),
    Detector(Flag.EMAIL, may_have_email, has_email),
    Detector(Flag.PHONE, may_have_phone, has_phone),
    Detector(Flag.IDENTITY_NUMBER, may_have_identity_number, has_identity_number),
    Detector(Flag.IP_ADDRESS, may_have_ip_address, has_ip_address),
)
IN_ANSWERS = (
    Detector(Flag.REFUSAL, may_be_refusal, is_refusal),
    Detector(Flag.TRUNCATED, may_be_truncated, is_truncated),
)


def text_features(texts: Mapping[str, Sequence[str | None]]) -> dict[str, NDArray[Any]]:
    """Return what is to be known of every text of a chunk without reading it twice.

    Args:
        texts: `prompt`, `chosen` and `rejected`, each with one text a row (the contents of the turns, joined by line
            breaks), None where a row has none.

    Returns:
        Columns of int32, one value a row. For each of the three parts: `PART_characters` (code points) and
        `PART_flags` (bits of `Flag`; REFUSAL and TRUNCATED only in answers). For `chosen` and `rejected` also
        `_words` (pieces between whitespace), `_newlines`, `_bullets` (lines that begin with a bullet or a number),
        `_headers` (lines that begin with #), `_code_blocks` (pairs of fences, an open one counts), `_bold` (pieces in
        **), `_emoji` (a joined sequence counts once) and `_digits` (ASCII). A column with missing texts is a masked
        array, which Arrow reads as nulls; under the mask stands 0.

    Raises:
        ValueError: the parts are not of one length.
    """
    columns = [texts[part] for part in PARTS]
    size = len(columns[0])
    if any(len(column) != size for column in columns):
        raise ValueError(f"parts of {', '.join(str(len(column)) for column in columns)} texts: must be of one length")
    everything = TextColumn([text for column in columns for text in column])
    answers = TextColumn([text for column in columns[1:] for text in column])
    flags = _flags(everything, ANYWHERE)
    flags[size:] |= _flags(answers, IN_ANSWERS)
    features: dict[str, NDArray[Any]] = {}
    missing = _missing(everything)
    numbers = {"flags": flags, "characters": everything.characters()}
    for name, values in numbers.items():
        for index, part in enumerate(PARTS):
            piece = slice(index * size, (index + 1) * size)
            features[f"{part}_{name}"] = _masked(values[piece], missing[piece])
    for name, values in style_counts(answers).items():
        for index, part in enumerate(PARTS[1:]):
            masked = missing[(index + 1) * size : (index + 2) * size]
            features[f"{part}_{name}"] = _masked(values[index * size : (index + 1) * size], masked)
    return features


def _flags(column: TextColumn, detectors: Sequence[Detector]) -> NDArray[np.int32]:
    flags = np.zeros(column.size, np.int32)
    for flag, candidates, confirm in detectors:
        for row in candidates(column).tolist():
            if confirm(column.text(row)):
                flags[row] |= flag
    return flags


def _missing(column: TextColumn) -> NDArray[np.bool_]:
    if not column.array.null_count:
        return np.zeros(column.size, np.bool_)
    return np.asarray(column.array.is_null())


def _masked(values: NDArray[np.int32], missing: NDArray[np.bool_]) -> NDArray[np.int32]:
    if not missing.any():
        return values
    masked: NDArray[np.int32] = np.ma.masked_array(values, mask=missing)  # type: ignore[no-untyped-call]
    return masked
