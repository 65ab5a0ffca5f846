"""Keys and passwords are told from placeholders, words and code. Keys are put together here: none is written down."""

import base64
import json
import random

import pytest

from data_checks.features.column import TextColumn
from data_checks.features.secrets import RULES, entropy, has_secret, may_have_secret

_RNG = random.Random(11)
DIGITS, LOWER = "0123456789", "abcdefghijklmnopqrstuvwxyz"
BASE32, BASE62 = LOWER.upper() + "234567", LOWER + LOWER.upper() + DIGITS


def rnd(size, alphabet=BASE62):
    """Return random characters that hold a digit wherever the alphabet has some."""
    while True:
        value = "".join(_RNG.choices(alphabet, k=size))
        if any(c.isdigit() for c in value) or not any(c.isdigit() for c in alphabet):
            return value


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def pem(kind, body=None, line_break="\n"):
    lines = [body or rnd(64) for _ in range(3)]
    return line_break.join([f"-----BEGIN {kind}PRIVATE" + " KEY-----", *lines, f"-----END {kind}PRIVATE KEY-----"])


HEADER, PAYLOAD = part({"alg": "HS256", "typ": "JWT"}), part({"sub": "42", "name": "n"})
POSITIVE = {
    "aws": "AKIA" + rnd(16, BASE32),
    "aws_temporary": "ASIA" + rnd(16, BASE32),
    "aws_documented": "AKIA" + "IOSFODNN7" + "EXAMPLE",
    "aws_secret": "aws_secret_access_key = '" + rnd(38) + "/+" + "'",
    "pem": pem("RSA "),
    "pem_plain": pem(""),
    "pem_escaped": pem("EC ", line_break="\\n"),
    "pem_encrypted": pem("RSA ").replace("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,00\n\n", 1),
    "openssh": pem("OPENSSH "),
    "github": "ghp_" + rnd(36),
    "github_oauth": "gho_" + rnd(36),
    "github_fine": "github_pat_" + rnd(22) + "_" + rnd(59),
    "gitlab": "glpat-" + rnd(20),
    "hugging_face": "hf_" + "".join(_RNG.choices(LOWER + LOWER.upper(), k=34)),
    "openai": "sk-" + rnd(48),
    "openai_project": "sk-proj-" + rnd(60) + "_-" + rnd(40),
    "deepseek": "sk-" + rnd(32, "0123456789abcdef"),
    "anthropic": "sk-ant-api03-" + rnd(90),
    "slack": "xoxb-" + rnd(12, DIGITS) + "-" + rnd(12, DIGITS) + "-" + rnd(24),
    "slack_hook": "https://hooks.slack.com/services/T" + rnd(9) + "/B" + rnd(9) + "/" + rnd(24),
    "google": "AIza" + rnd(35),
    "stripe": "sk_live_" + rnd(24),
    "npm": "npm_" + rnd(36),
    "sendgrid": "SG." + rnd(22) + "." + rnd(43),
    "pypi": "pypi-AgEIcHlwaS5vcmc" + rnd(70),
    "jwt": f"{HEADER}.{PAYLOAD}." + rnd(43),
    "address": "postgres://app:" + rnd(14) + "@db.internal:5432/app",
    "assigned": 'password = "' + "tR9!" + rnd(8) + '"',
    "assigned_json": '{"api_key": "' + rnd(32) + '"}',
    "assigned_camel": "const accessToken = '" + rnd(40, "0123456789abcdef") + "';",
    "assigned_arrow": ":client_secret => '" + rnd(24) + "'",
    "environment": "export OPENAI_API_KEY=" + rnd(40),
    "environment_colon": "  secret_key: " + rnd(40),
}
NEGATIVE = {
    "aws_word": "AKIA is a prefix; ASIA IS A CONTINENT",
    "aws_x": "AKIA" + "X" * 16,
    "aws_lower": "AKIA" + "abcdefgh" * 2,
    "aws_longer": "AKIA" + rnd(24, BASE32),
    "pem_header": "It begins with -----BEGIN PRIVATE" + " KEY----- and ends with -----END PRIVATE KEY-----",
    "pem_public": pem("").replace("PRIVATE", "PUBLIC"),
    "pem_x": pem("RSA ", "x" * 64),
    "certificate": "-----BEGIN CERTIFICATE-----\n" + rnd(64) + "\n-----END CERTIFICATE-----",
    "github_x": "ghp_" + "x" * 36,
    "github_short": "ghp_" + rnd(12),
    "github_your": "github_pat_your_token_goes_here_and_it_has_to_be_rather_long_1234",
    "hf_identifier": "hf_transformers_model_loader_with_a_long_name = 1",
    "hf_x": "hf_" + "x" * 34,
    "sk_x": "sk-" + "xxxx" * 12,
    "sk_your": "sk-proj-your-api-key-goes-here-0123456789-abcdefghij",
    "sk_css": "sk-circle-fade-dot sk-chase-dot-before-animation-name",
    "sk_in_word": "risk-" + rnd(40),
    "slack_not_real": "xoxb-not-a-real-token-at-all",
    "stripe_test": "sk_test_" + rnd(24),
    "jwt_no_header": "eyJ" + "!" * 10 + ".eyJhYmMi." + rnd(20),
    "jwt_no_json": "eyJ" + "abcd" * 4 + ".eyJ" + "abcd" * 4 + "." + rnd(20),
    "jwt_tutorial": f"{HEADER}.{part({'sub': '1234567890', 'name': 'John Doe'})}." + rnd(43),
    "jwt_cut": f"{HEADER}.{PAYLOAD}",
    "address_placeholder": "postgres://user:password" + "@localhost/db and mysql://root:secret123" + "@db",
    "address_plain": "https://example.org:8080/@someone and mailto:a@b.example",
    "placeholder": 'api_key = "your_api_key"',
    "placeholder_angle": 'token = "<token>"',
    "placeholder_braces": 'password: "${DB_PASSWORD_2024_Prod}"',
    "placeholder_stars": 'password = "************"',
    "placeholder_word": 'password = "changeme123"',
    "word": 'password = "correct horse"',
    "common_word": 'secret: "sunshine"',
    "code": 'token = os.environ["SERVICE_TOKEN_V2"]',
    "name_in_code": 'token_type = "access_code_v2_bearer"',
    "step": 'token = "step-one-1"',
    "camel": "secret: 'myFirstValue'",
    "url": 'token_url = "https://auth.example.org/oauth2/v2/x9"',
    "tokenizer": 'tokenizer = "bert-base-uncased-L12-H768-A12"',
    "prose": "The secret: it is simple. My password is long, so the token = value.",
    "date": 'token: "2024-01-15T10:30:00"',
    "sha": "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "uuid": "id 550e8400-e29b-41d4-a716-446655440000",
    "low_entropy": 'api_key = "aaaaaaaabbbbbbbb1111"',
    "environment_reference": "API_KEY=$(cat /run/keys/api-2024-long)",
    "environment_call": "secret_key = generate_value_from_seed(20240101)",
}


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("frame", ["{}", "Here it is: {}\nuse it", "`{}`"], ids=["alone", "in a sentence", "in code"])
def test_secrets(name, frame):
    if name.startswith("environment") and frame != "{}":
        frame = "Set this:\n{}\nthen run."
    text = frame.format(POSITIVE[name])
    assert has_secret(text)
    assert may_have_secret(TextColumn([text])).tolist() == [0]


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_is_no_secret(name):
    assert not has_secret(NEGATIVE[name])


def test_every_rule_has_a_key_and_what_only_looks_like_one():
    assert {rule for rule in RULES if rule in POSITIVE} == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_finds_its_own_key(name):
    rule = RULES[name]
    assert any(rule.accept(match.group(1)) for match in rule.pattern.finditer(POSITIVE[name]))


def test_entropy_is_that_of_shannon():
    assert entropy("") == 0
    assert entropy("aabb") == 1
    assert entropy("abcdefgh") == 3
