"""Which names that stand in data may be shown: of columns, of keys, of sources.

Names are words of the data's maker, and now and then they are no names: a CSV file without a header has its first row
there, an object that is looked up by mail address has the addresses. So what does not look like a name, and what holds
a key, a password or personal data, is counted and not shown.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

MAX_NAMES = 20
"""Most names that a message lists."""
MAX_LOOKED_AT = 200
"""Most names that are looked at for a list: an object may have any number of keys."""
MAX_NAME_LENGTH = 40
MAX_NAME_WORDS = 3
KEPT_BACK = "(a name of "
SENTENCE_ENDS = (".", "!", "?", ";", ",", "…")


def name_columns(columns: Iterable[str]) -> str:
    """Return the names of columns or keys for a message, those that may be shown first; a longer list ends in `…`.

    >>> name_columns(["text", "a column"]), name_columns([])
    ('a column, text', 'none')
    >>> name_columns(["id", "What may I call you today?"])
    'id, (a name of 26 characters)'
    """
    named = sorted(columns)
    shown = sorted((shown_name(name) for name in named[:MAX_LOOKED_AT]), key=lambda text: text.startswith(KEPT_BACK))
    return ", ".join([*shown[:MAX_NAMES], *(["…"] if len(named) > MAX_NAMES else [])]) or "none"


def shown_names(names: Iterable[str]) -> dict[str, str]:
    """Return what to show for each of several names, told apart where they are not shown themselves.

    >>> list(shown_names(["web", "Who are you, then?", "Where is it, then?"]).values())
    ['web', '(a name of 18 characters)', '(a name of 18 characters) 2']
    """
    shown: dict[str, str] = {}
    times: dict[str, int] = {}
    for name in dict.fromkeys(names):
        text = shown_name(name)
        times[text] = times.get(text, 0) + 1
        shown[name] = text if times[text] == 1 else f"{text} {times[text]}"
    return shown


@functools.lru_cache(maxsize=4096)
def shown_name(name: str) -> str:
    """Return a name as it may be shown: itself, or how long it is."""
    return name if is_name(name) else f"{KEPT_BACK}{len(name)} characters)"


def is_name(text: str) -> bool:
    """Return whether a text is a name that may be shown: at most 40 characters and three words, and nothing private.

    >>> [is_name(text) for text in ("chosen-rating", "Stack Exchange (2024)", "What is that?", "me" + "@" + "here.org")]
    [True, True, False, False]
    """
    return (
        len(text) <= MAX_NAME_LENGTH
        and text.isprintable()
        and len(text.split(" ")) <= MAX_NAME_WORDS
        and not text.endswith(SENTENCE_ENDS)
        and not is_private(text)
    )


def is_private(text: str) -> bool:
    """Return whether a text holds a key, a password or personal data, as far as its shape tells."""
    # Not needed where no name is shown, and not light.
    from data_checks.features import personal, secrets

    finders = (
        secrets.has_secret, personal.has_email, personal.has_phone, personal.has_identity_number,
        personal.has_ip_address,
    )  # fmt: skip
    return any(finds(text) for finds in finders)
