"""Broken encodings, control characters and characters that nobody sees."""

from __future__ import annotations

import re
import unicodedata

import numpy as np

from data_checks.features.column import Rows, TextColumn


def _images(encoding: str) -> dict[str, int]:
    """Return the characters as which the bytes 0x80 to 0xFF appear when read in a one-byte encoding."""
    images = {}
    for value in range(0x80, 0x100):
        images[chr(value)] = value  # Latin-1, and bytes that Windows-1252 leaves open.
    for value in range(0x80, 0x100):
        try:
            images[bytes([value]).decode(encoding)] = value
        except UnicodeDecodeError:
            continue
    return images


_WINDOWS_1252 = _images("cp1252")
_WINDOWS_1251 = {bytes([value]).decode("cp1251"): value for value in range(0x80, 0x100) if value != 0x98}


def _following(images: dict[str, int]) -> str:
    """Return a character class of the images of UTF-8's continuation bytes."""
    return "[" + "".join(sorted(re.escape(c) for c, value in images.items() if value < 0xC0)) + "]"


_NEXT, _NEXT_1251 = _following(_WINDOWS_1252), _following(_WINDOWS_1251)
_SEQUENCE = f"[Â-ÖØ-ß]{_NEXT}|(?:×{_NEXT}){{2,}}|[à-ï]{_NEXT}{{2}}|[ð-ô]{_NEXT}{{3}}"
"""UTF-8 for one character, read as Windows-1252 or Latin-1; × begins Hebrew letters, of which words have several."""
_CYRILLIC = f"(?:[РС]{_NEXT_1251}){{3}}"
"""UTF-8 for three Cyrillic letters, read as Windows-1251."""
_CERTAIN = f"\ufffd|{_CYRILLIC}|‚Ä[ìîïôúù]|[a-z.,;:!?)]Â |[a-z]Ã "
"""The last two: a no-break space behind the lead was later made a common one."""

_SEQUENCE_HERE, _CERTAIN_HERE = re.compile(_SEQUENCE), re.compile(_CERTAIN)
_CLOSING = frozenset("”’»›…–—")
_C1 = re.compile("[\x80-\x9f]")
_C0 = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

_INVISIBLE = "\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e01ef"
_INVISIBLE_HERE = re.compile(f"[{_INVISIBLE}]")
_JOINERS, _DIRECTIONS = "\u200c\u200d", "\u200e\u200f"
_WRITES_WITH_JOINERS = re.compile(
    "[\u0600-\u07ff\u0840-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u18af\u1b00-\u1b7f\ua840-\ua8ff\ufb50-\ufdff\ufe70-\ufefc"
    "\U00011000-\U00011fff]"
)
"""Arabic and its neighbours, the scripts of India and Southeast Asia, Mongolian."""
_TAG_SEQUENCE = re.compile("\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f")
"""Flags of regions, such as Scotland's."""
_IDEOGRAPH_VARIANT = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff][\U000e0100-\U000e01ef]")


def may_have_mojibake(column: TextColumn) -> Rows:
    return column.matching(f"{_SEQUENCE}|{_CERTAIN}", column.not_ascii)


def has_mojibake(text: str) -> bool:
    """Return whether a text holds UTF-8 that was read in another encoding, or U+FFFD.

    A sequence must decode as UTF-8 and be unlikely as text (`ftfy.badness`, on the sequence and its neighbours): in
    French or German quotation marks follow accented letters too.
    """
    return _CERTAIN_HERE.search(text) is not None or any(map(_is_broken, _SEQUENCE_HERE.finditer(text)))


def _is_broken(match: re.Match[str]) -> bool:
    """Return whether a sequence is UTF-8 read as Windows-1252 or Latin-1."""
    from ftfy.badness import is_bad

    text, (start, end) = match.string, match.span()
    near = text[max(0, start - 3) : end + 3]
    return _decodes(match.group()) and is_bad(near) and not _ends_capitals(text, start, end)


def _decodes(sequence: str) -> bool:
    try:
        bytes(_WINDOWS_1252[character] for character in sequence).decode()
    except UnicodeDecodeError:
        return False
    return True


def _ends_capitals(text: str, start: int, end: int) -> bool:
    """Tell a word in capitals before a quotation mark or dash, as in “AMANHÔ, from a broken sequence."""
    before = text[max(0, start - 2) : start]
    return end - start == 2 and text[end - 1] in _CLOSING and len(before) == 2 and before.isupper() and before.isalpha()


def may_have_controls(column: TextColumn) -> Rows:
    return np.union1d(column.controls, column.matching(r"[\x{80}-\x{9f}]", column.not_ascii))


def has_controls(text: str) -> bool:
    """Return whether a text holds a control character; those that belong to mojibake are counted there."""
    if _C0.search(text):
        return True
    rest = _SEQUENCE_HERE.sub(lambda match: "" if _is_broken(match) else match.group(), text)
    return _C1.search(rest) is not None


def may_have_invisible(column: TextColumn) -> Rows:
    return column.matching(f"[{_INVISIBLE}]", column.not_ascii)


def has_invisible(text: str) -> bool:
    """Return whether a text holds a character that is not seen and has no use where it stands."""
    rest = _IDEOGRAPH_VARIANT.sub("", _TAG_SEQUENCE.sub("", text))
    if any(character in rest for character in _DIRECTIONS) and _has_right_to_left(rest):
        rest = rest.translate(dict.fromkeys(map(ord, _DIRECTIONS)))
    return any(not _is_useful(rest, match.start()) for match in _INVISIBLE_HERE.finditer(rest))


def _has_right_to_left(text: str) -> bool:
    return any(unicodedata.bidirectional(c) in ("R", "AL") for c in text if c not in _DIRECTIONS)


def _is_useful(text: str, place: int) -> bool:
    character = text[place]
    if character in _JOINERS:
        before = text[max(0, place - 8) : place].rstrip(_JOINERS + "\ufe0f")[-1:]
        after = text[place + 1 : place + 2]
        joins_pictures = character == "\u200d" and _is_picture(before) and _is_picture(after)
        return joins_pictures or _WRITES_WITH_JOINERS.match(before) is not None
    # Mongolian's own separator of vowels stands between its letters.
    return character == "\u180e" and "\u1800" <= text[place - 1 : place] <= "\u18aa"


def _is_picture(character: str) -> bool:
    """Return whether a character is a symbol; skin tones are (modifier) symbols too."""
    return character != "" and unicodedata.category(character) in ("So", "Sk")
