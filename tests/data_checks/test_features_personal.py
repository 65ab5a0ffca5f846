"""Addresses and numbers of people, by shape and check digits."""

import pytest

from data_checks.features.column import TextColumn
from data_checks.features.personal import (
    IBAN_LENGTHS,
    has_email,
    has_identity_number,
    has_ip_address,
    has_phone,
    luhn,
    may_have_email,
    may_have_identity_number,
    may_have_ip_address,
    may_have_phone,
)

EMAIL = [
    "jo@example.com", "Mail: first.last+tag@sub.domain.co.uk.", "<a_b-c@x-y.org>", "o'hara@web.de", "josé@correo.es",
    "a@b.museum,c", "mailto:me@site.io", "email:jo@site.io", "jo@münchen.de",
]  # fmt: skip
NO_EMAIL = [
    "@user @some.one", "icon@2x.png", "lodash@4.17.21", "git@github.com:owner/repo.git", "a @ b.com", "x@y",
    "@user@instance.social", "ftp://user:word@ftp.example.com/file", "f@1.2", "matrix @ vector.T", "me@ example.com",
]  # fmt: skip
PHONE = [
    "(202) 456-1111", "202-456-1111", "202.456.1111", "+1 202 456 1111", "+1-202-456-1111", "1-800-356-9377",
    "+44 20 7946 0958", "+49 (0) 30 901820", "+33 6 12 34 56 78", "+4930901820", "+86 138 0013 8000",
    "+55 (11) 91234-5678",
    "call 0800 123 4567", "Tel: 020 7946 0958", "my phone number is 2024561111", "phone: 202 456 1111",
]  # fmt: skip
NO_PHONE = [
    "2024561111", "on 2021-05-20 12", "2020-2021-2022", "version 3.11.2024.1", "978-0-306-40615-7",
    "ISBN 9780306406157",
    "123-456-7890", "id 202-456-11112", "10.0.19041.1234", "1,202,456,1111", "+1 + 2 = 3", "3 +12345678901234567",
    "C++11 +100", "call 911", "text 12345", "number 20240115", "phone in 12/05/2024", "numbers: 1 2 3 4 5 6 7 8 9",
    "0.2024561111", "+1 102 456 1111", "call me on 15.03.2024 or later", "call 05.03.2024",
    "text 01-15-2024", "+4412345678901234", "+44 12345", "x-202-456-1111", "$555-1234",
    "number 1111111111", "202 456 1111 apples",
]  # fmt: skip
IDENTITY = [
    "4111 1111 1111 1111", "4111111111111111", "4111-1111-1111-1111", "5555555555554444", "3782 822463 10005",
    "378282246310005", "6011111111111117", "30569309025904", "3530111333300000", "2223003122003222", "4222222222222",
    "my card is 5105 1051 0510 5100.", "536-22-8726", "SSN: 123-45-6789", "GB82 WEST 1234 5698 7654 32",
    "DE89370400440532013000", "FR14 2004 1010 0505 0001 3M02 606", "MT84MALT011000012345MTLCAST001S", "NO9386011117947",
    "IBAN GB82WEST12345698765432, THANKS", "GB82 WEST 1234 5698 7654 32 THEN",
]  # fmt: skip
NO_IDENTITY = [
    "4111 1111 1111 1112", "1234567812345670", "4111 11111111 1111", "0.4111111111111111", "41111111111111111",
    "4111111111111111.5", "x4111111111111111", "000-12-3456", "666-12-3456", "912-12-3456", "536-00-8726",
    "536-22-0000",
    "078-05-1120", "219-09-9999", "536-22-87261", "1536-22-8726", "GB82 WEST 1234 5698 7654 33",
    "DE8937040044053201300",
    "XX89370400440532013000", "DE89370400440532013000X", "1700000000000", "20240115123000",
    "2024-01-15 12:30:00.000000",
]  # fmt: skip
ADDRESS = [
    "93.184.216.34", "http://93.184.216.34/", "from 81.2.69.142:8080.", "(185.60.216.35)",
    "2606:2800:220:1:248:1893:25c8:1946",
    "[2a00:1450:4001:81b::200e]", "host 93.184.216.34, port 80",
]  # fmt: skip
NO_ADDRESS = [
    "192.168.1.1", "10.0.0.1", "127.0.0.1", "172.16.31.5", "169.254.1.1", "192.0.2.1", "198.51.100.7", "203.0.113.9",
    "0.0.0.0", "255.255.255.0", "224.0.0.251", "8.8.8.8", "208.67.222.222", "1.2.3.4", "version 12.0.10.34",
    "v81.2.69.142",
    "Chrome/91.0.4472.124", "OpenSSL/11.10.12.14", "1.3.6.1.4.1.311", "section 12.10.11.13", "300.1.1.20",
    "93.184.216.034",
    "pkg-12.10.11.13", "12.10.11.13-beta", "libfoo.12.10.11.13", "fe80::1", "::1", "2001:db8::1", "12:30:45",
    "std::cout",
    "a::b::c", "pip install x==12.10.11.13", "64:ff9b",
]  # fmt: skip
CASES = [
    (has_email, may_have_email, EMAIL, NO_EMAIL),
    (has_phone, may_have_phone, PHONE, NO_PHONE),
    (has_identity_number, may_have_identity_number, IDENTITY, NO_IDENTITY),
    (has_ip_address, may_have_ip_address, ADDRESS, NO_ADDRESS),
]


@pytest.mark.parametrize(
    ("confirm", "candidates", "text"),
    [(confirm, candidates, text) for confirm, candidates, found, _ in CASES for text in found],
)
def test_personal_data_is_found(confirm, candidates, text):
    for framed in (text, f"Well, {text}", f"{text}\nthanks"):
        assert confirm(framed)
        assert candidates(TextColumn(["x", framed, "y"])).tolist() == [1]


@pytest.mark.parametrize(("confirm", "text"), [(confirm, text) for confirm, _, _, clean in CASES for text in clean])
def test_what_is_no_personal_data(confirm, text):
    assert not confirm(text)
    assert not confirm(f"Well, {text} and so on")


def test_one_kind_of_number_is_not_another():
    for text in IDENTITY:
        assert not has_phone(text), text
        assert not has_ip_address(text)
    for text in PHONE + ADDRESS:
        assert not has_identity_number(text), text


def test_luhn():
    assert luhn("4111111111111111")
    assert not any(luhn(f"411111111111111{digit}") for digit in "023456789")


def test_iban_lengths_are_within_the_standard():
    assert len(IBAN_LENGTHS) > 85
    assert all(15 <= length <= 34 and len(code) == 2 for code, length in IBAN_LENGTHS.items())
