"""Personal data that its shape and check digits give away. Nothing here returns or logs what matched."""

from __future__ import annotations

import ipaddress
import re

import numpy as np

from data_checks.features.column import Rows, TextColumn

_EMAIL = re.compile(
    r"(?<![\w.+%@-])\w[\w.+%'-]{0,63}@((?:\w(?:[\w-]{0,61}\w)?\.)+[^\W\d_]{2,24})(?![\w@-])(:\S{0,200}/)?"
)
_LOGIN = re.compile(r"://[^\s/]*\Z")
_FILES = frozenset({"png", "jpg", "jpeg", "gif", "svg", "webp", "pdf", "js", "mjs", "html", "json", "txt", "zip"})

# What follows is written so that RE2 takes it too, and given its boundaries, which RE2 has not, afterwards.
_PLUS = r"\+(\d{1,3}[ .-]?(?:\(\d{1,4}\)[ ./-]?)?\d(?:[ ./-]?\d){3,12})"
_AMERICAN = r"(?:\+?1[ .-]?)?(?:\([2-9]\d\d\)[ .-]?|[2-9]\d\d[.-])[2-9]\d\d[.-]? ?\d{4}"
_CUE = (
    r"(?i:phone|telephone|tel|call|cell|mobile|fax|text|whatsapp|hotline|number)(?i:s)?\b[^\d\n+]{0,24}"
    r"(\(?\d(?:\)?[ .-]?\d){7,12})"
)
_PHONE = f"{_PLUS}|{_AMERICAN}|{_CUE}"
_PLUS_HERE = re.compile(rf"(?<![\w+./]){_PLUS}(?![\w-])", re.ASCII)
_AMERICAN_HERE = re.compile(rf"(?<![\w./-]){_AMERICAN}(?![\w-]|\.\d)", re.ASCII)
_CUE_HERE = re.compile(rf"\b{_CUE}(?![\w-]|[./]\d)", re.ASCII)
_NORTH_AMERICA = re.compile(r"1?[2-9]\d\d[2-9]\d{6}")
_DATE = re.compile(r"(?:19|20)\d\d[\s.-]?[01]\d[\s.-]?[0-3]\d\b|\d\d?[.-]\d\d?[.-](?:19|20)\d\d\b")

_CARD = re.compile(
    r"(?<![\w.-])(?:\d{12,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?![\w-]|\.\d)",
    re.ASCII,
)
_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15})"  # Visa
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|(?:6011|64[4-9]\d|65\d\d)\d{12}"  # Discover
    r"|3(?:0[0-5]|[68]\d|9\d)\d{11}"  # Diners Club
    r"|35(?:2[89]|[3-8]\d)\d{12}"  # JCB
    r"|62\d{14,17}"  # UnionPay
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}"  # Maestro
)
_SOCIAL = re.compile(r"(?<![\w.-])(?!000|666|9)(\d{3})-(?!00)(\d\d)-(?!0000)(\d{4})(?![\w-]|\.\d)", re.ASCII)
_NEVER_ISSUED = frozenset({"078051120", "219099999"})
"""Printed on cards in wallets and in a leaflet: void by the issuer's rules."""

_IBAN = re.compile(r"(?<![A-Za-z0-9])([A-Z]{2})(?=\d\d)", re.ASCII)
_IDENTITY = r"(?:\d[ -]?){11}\d|\d{3}-\d\d-\d{4}|[A-Z]{2}\d\d(?:[ -]?[A-Z0-9]){11}"
"""In RE2 syntax: cards, social security numbers, IBANs and more."""
IBAN_LENGTHS = {
    code: length
    for length, codes in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI",  # codespell:ignore fo
        20: "AT BA EE KZ LT LU XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG YE",
        25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA", 30: "JO KW MU", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for code in codes.split()
}  # fmt: skip
"""Characters of an IBAN by country (SWIFT's IBAN registry)."""

_IPV4 = re.compile(r"(?<![\w.-])(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})(?![\w-]|\.\w)", re.ASCII)
_VERSION_BEFORE = re.compile(
    r"(?i)(?:\b(?:v|ver|version|release|firmware|build|driver|driver version|update|patch|section|sec|chapter|appendix"
    r"|article|clause|oid)[\s.:=#(]{0,3}|[a-z]/|§\s?|[=~^><]=\s?)$"
)
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:])")
_NUMERIC = r"\d\.\d{1,3}\.\d{1,3}\.\d|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2}"
"""In RE2 syntax: both kinds of address and more."""
_RESOLVERS = frozenset({"9.9.9.10", "208.67.222.222", "208.67.220.220", "149.112.112.112"})
"""Resolvers with an address of single digits (8.8.8.8) look like outlines already."""


def may_have_email(column: TextColumn) -> Rows:
    return column.rows_with("@")


def has_email(text: str) -> bool:
    """Return whether an e-mail address stands in a text."""
    for match in _EMAIL.finditer(text):
        is_file = match.group(1).rpartition(".")[2].lower() in _FILES
        is_login = _LOGIN.search(text[max(0, match.start() - 80) : match.start()]) is not None
        if not is_file and not is_login and match.group(2) is None:
            return True
    return False


def may_have_phone(column: TextColumn) -> Rows:
    return column.matching(_PHONE, column.digits_within(8, 24))


def has_phone(text: str) -> bool:
    """Return whether a telephone number stands in a text.

    Shapes: ITU-T E.164 (at most 15 digits, no leading zero), the North American Numbering Plan (area and exchange
    begin with 2 to 9).
    """
    if _AMERICAN_HERE.search(text):
        return True
    for match in _PLUS_HERE.finditer(text):
        digits = re.sub(r"\D", "", match.group(1))
        if 8 <= len(digits) <= 15 and digits[0] != "0" and (digits[0] != "1" or _NORTH_AMERICA.fullmatch(digits)):
            return True
    return any(_is_number_after_cue(match.group(1)) for match in _CUE_HERE.finditer(text))


def _is_number_after_cue(number: str) -> bool:
    digits = re.sub(r"\D", "", number)
    if _DATE.match(number) or len(set(digits)) < 3:
        return False
    return digits[0] == "0" or (len(digits) in (10, 11) and _NORTH_AMERICA.fullmatch(digits) is not None)


def may_have_identity_number(column: TextColumn) -> Rows:
    return column.matching(_IDENTITY, column.digits_within(9, 24))


def has_identity_number(text: str) -> bool:
    """Return whether a payment card's number, an IBAN or a US social security number stands in a text.

    Sources: ISO/IEC 7812 (Luhn's check digit; issuers' ranges), ISO 13616 (IBAN), the Social Security Administration
    (areas 000, 666 and 9xx, group 00 and serial 0000 do not exist).
    """
    return (
        any(_is_card(re.sub(r"\D", "", match.group())) for match in _CARD.finditer(text))
        or any("".join(match.groups()) not in _NEVER_ISSUED for match in _SOCIAL.finditer(text))
        or any(_is_iban(text, match) for match in _IBAN.finditer(text))
    )


def _is_card(digits: str) -> bool:
    return _ISSUERS.fullmatch(digits) is not None and luhn(digits)


def luhn(digits: str) -> bool:
    """Return whether the last digit is Luhn's check digit of the others.

    >>> luhn("79927398713"), luhn("79927398710")
    (True, False)
    """
    doubled = [2 * int(digit) for digit in digits[-2::-2]]
    total = sum(int(digit) for digit in digits[-1::-2]) + sum(value - 9 if value > 9 else value for value in doubled)
    return total % 10 == 0


def _is_iban(text: str, match: re.Match[str]) -> bool:
    length = IBAN_LENGTHS.get(match.group(1), 0)
    found, place = "", match.start()
    while len(found) < length and place < len(text):
        character = text[place]
        if character.isascii() and (character.isdigit() or character.isupper()):
            found += character
        elif character not in " -" or len(found) % 4:
            return False
        place += 1
    if not length or len(found) < length or text[place : place + 1].isalnum():
        return False
    number = "".join(str(int(character, 36)) for character in found[4:] + found[:4])
    return int(number) % 97 == 1


def may_have_ip_address(column: TextColumn) -> Rows:
    dots = np.flatnonzero(column.bytes == ord("."))
    colons = np.flatnonzero(column.bytes == ord(":"))
    # Three dots of an IPv4 address stand within 9 bytes; two colons of an IPv6 address within 6.
    quads = dots[2:][dots[2:] - dots[:-2] <= 8]
    groups = colons[1:][colons[1:] - colons[:-1] <= 5]
    return column.matching(_NUMERIC, np.union1d(column.rows_at(quads), column.rows_at(groups)))


def has_ip_address(text: str) -> bool:
    """Return whether a public IP address stands in a text (ranges: IANA's special-purpose registries)."""
    for match in _IPV4.finditer(text):
        parts = match.groups()
        is_outline = all(len(part) == 1 for part in parts) or any(part[0] == "0" and part != "0" for part in parts)
        if is_outline or match.group() in _RESOLVERS or max(map(int, parts)) > 255:
            continue
        before = text[max(0, match.start() - 20) : match.start()]
        if not _VERSION_BEFORE.search(before) and _is_public(match.group()):
            return True
    return any(_is_public(match.group().rstrip(":")) for match in _IPV6.finditer(text))


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global and not found.is_multicast
