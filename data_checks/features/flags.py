"""What may stand in a text, as bits of one number, and a table that says what each bit means and why it matters."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple


class Flag(IntFlag):
    """What was seen in a text. The values are stored in files: they never change."""

    MOJIBAKE = 1
    CONTROL = 2
    INVISIBLE = 4
    MARKER = 8
    SECRET = 16
    EMAIL = 32
    PHONE = 64
    IDENTITY_NUMBER = 128
    REFUSAL = 256
    TRUNCATED = 512
    IP_ADDRESS = 1024


class Pattern(NamedTuple):
    """One line of the table for the docs."""

    name: str
    what: str
    why: str


PATTERNS = (
    Pattern(
        "mojibake",
        "UTF-8 that was decoded as Windows-1252, Latin-1, Windows-1251 or (quotation marks) Mac Roman; U+FFFD. A "
        "sequence in a western encoding counts only where it decodes and ftfy's table of unlikely neighbours agrees",
        "the model learns to write the broken characters; the text was damaged before it came here",
    ),
    Pattern(
        "control",
        "control characters: U+0000-001F except tab, line feed and carriage return, U+007F, U+0080-009F outside "
        "mojibake",
        "they break terminals, XML reports and logs, and no answer needs them",
    ),
    Pattern(
        "invisible",
        "zero-width characters, byte order marks, bidirectional overrides and isolates, tag characters. Not: joiners "
        "inside emoji and in scripts that write with them, direction marks beside right-to-left letters, flags",
        "what the model reads is not what a reviewer sees; they also carry hidden instructions",
    ),
    Pattern(
        "marker",
        "text that looks like a control token of some chat template: <|name|>, [INST], <<SYS>>, <start_of_turn>, "
        "<extra_id_0>, <bos>, <s> and </s> unless struck-through HTML. Which ones your tokenizer obeys is a check of "
        "its own",
        "a tokenizer that parses it in content ends a turn in the middle of a message",
    ),
    Pattern(
        "secret",
        "keys of AWS, GitHub, GitLab, Hugging Face, OpenAI, Anthropic, Slack, Google, Stripe (live), SendGrid, npm "
        "and PyPI; private keys in PEM; JSON web tokens; passwords in addresses; values assigned to a name such as "
        "password or api_key that look random. Not: placeholders, and values of low entropy. AWS's documented example "
        "key counts, as addresses at example.com do: the shape is all that can be judged",
        "a model repeats what it was trained on",
    ),
    Pattern(
        "email",
        "an address with a domain; addresses at example.com count as well. Not: git remotes, logins in URLs, names of "
        "files such as icon@2x.png",
        "personal data",
    ),
    Pattern(
        "phone",
        "numbers in international form (+, a country code, 8 to 15 digits), in the form of North America with its "
        "rules for area and exchange, or after a word such as phone or call with a leading 0 or those rules. "
        "Not: dates, versions, plain numbers",
        "personal data",
    ),
    Pattern(
        "identity_number",
        "payment cards (issuer's range, length, Luhn's check digit), IBAN (country's length, modulo 97), social "
        "security numbers of the USA (with hyphens, in areas that exist)",
        "personal data of the costly kind",
    ),
    Pattern(
        "refusal",
        "English words in the first 200 characters of an answer that decline, or say that an AI speaks",
        "where one side refuses more often, the reward learns refusing or answering, not quality",
    ),
    Pattern(
        "truncated",
        "an answer whose code fence is not closed; or of at least 20 words that ends after a comma, in a word that "
        "opens a phrase (and, the, of), in an empty list item, or without any mark at the end of a long paragraph",
        "the generator hit its limit; where one side does so more often, the reward learns length",
    ),
    Pattern(
        "ip_address",
        "public addresses, IPv4 and IPv6. Not: private, reserved and documentation ranges, versions, public resolvers",
        "personal data in the law of the EU",
    ),
)
"""In the order of the bits of `Flag`."""


def describe(flags: int) -> list[str]:
    """Return the names of the bits that are set, as `PATTERNS` names them.

    >>> describe(Flag.EMAIL | Flag.SECRET), describe(0)
    (['secret', 'email'], [])
    """
    return [str(flag.name).lower() for flag in Flag if flags & flag]
