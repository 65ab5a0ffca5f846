"""The scorer elsewhere, against a real server on this machine."""

from __future__ import annotations

import datetime
import email.utils
import ipaddress
import pickle
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from local_scorer import LocalScorer, Reply, by_length, local_scorer, scores
from pydantic import ValidationError

from training_core.config.verifiers import HttpReward
from training_core.errors import EXIT_TEMPORARY, ConfigurationError, EvaluationError, ServerUnreachableError
from training_core.records import Message, StopReason
from training_core.registries import REWARD_RULES
from training_core.rewards.base import Cause, RewardContext, Scores
from training_core.rewards.remote import RemoteScorer, seconds_until

ITEMS = [{"prompt": [], "answer": "a" * length, "extra": {}} for length in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[LocalScorer]:
    with local_scorer() as scorer:
        yield scorer


def config(url: str, **knobs: Any) -> HttpReward:
    return HttpReward.model_validate({"kind": "http", "url": url, "max_retries": 2, "backoff_seconds": 0.5, **knobs})


def ask(url: str, *, pauses: list[float] | None = None, **knobs: Any) -> Scores:
    return RemoteScorer(config(url, **knobs), None, (pauses if pauses is not None else []).append).score(ITEMS)


def failing_once(status: int, headers: dict[str, str] | None = None) -> Any:
    replies = iter([(status, headers or {}, b"busy")])
    return lambda items: next(replies, None) or by_length(items)


def test_what_is_sent_and_what_comes_back(server: LocalScorer) -> None:
    prompt = [Message(role="system", content="Be brief."), Message(role="user", content="Röd?")]
    about = RewardContext([1, 1], [StopReason.EOS] * 2, [{"reference": "ja"}, {}], max_new_tokens=4)
    rule = REWARD_RULES["http"](config(server.url))
    assert rule([prompt, prompt[1:]], ["ja", "nej"], about) == [2.0, 3.0]
    assert server.requests == [
        [
            {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Röd?"}],
                "answer": "ja",
                "extra": {"reference": "ja"},
            },
            {"prompt": [{"role": "user", "content": "Röd?"}], "answer": "nej", "extra": {}},
        ]
    ]
    assert "Authorization" not in server.headers[0]


def test_what_json_has_no_word_for_is_not_sent(server: LocalScorer) -> None:
    item = {"prompt": [], "answer": "a", "extra": {"rating": float("nan")}}
    with pytest.raises(EvaluationError, match="NaN or infinity"):
        RemoteScorer(config(server.url), None).score([item])
    assert server.requests == []


def test_answers_go_in_batches(server: LocalScorer) -> None:
    assert ask(server.url, batch_size=2) == [1.0, 2.0, 3.0]
    assert [len(items) for items in server.requests] == [2, 1]


def test_null_is_missing(server: LocalScorer) -> None:
    server.reply = lambda items: scores([None, 0, -1.5])
    found = ask(server.url)
    assert found == [None, 0.0, -1.5]
    assert found.causes == [None] * 3


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_failure_is_tried_again(server: LocalScorer, status: int) -> None:
    pauses: list[float] = []
    server.reply = failing_once(status)
    assert ask(server.url, pauses=pauses) == [1.0, 2.0, 3.0]
    assert pauses == [0.5]
    assert len(server.requests) == 2


@pytest.mark.parametrize(("asked", "kept"), [("3", 3.0), ("500", 60.0), ("0", 0.5)])
def test_retry_after_is_kept_within_the_bound(server: LocalScorer, asked: str, kept: float) -> None:
    pauses: list[float] = []
    server.reply = failing_once(429, {"Retry-After": asked})
    ask(server.url, pauses=pauses)
    assert sum(pauses) == kept
    assert max(pauses) <= 1.0  # A stop request is seen within a second.


def test_retry_after_may_be_a_date() -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 25 < seconds_until(email.utils.format_datetime(later, usegmt=True)) <= 30
    assert seconds_until("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def refused_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_no_server_stops_the_stage_for_now() -> None:
    pauses: list[float] = []
    with pytest.raises(ServerUnreachableError, match="after 3 tries: no connection") as caught:
        ask(refused_address(), pauses=pauses)
    assert pauses == [0.5, 1.0]
    assert pickle.loads(pickle.dumps(caught.value)).exit_code == EXIT_TEMPORARY


def test_no_server_may_mean_missing_scores(server: LocalScorer) -> None:
    found = ask(refused_address(), on_failure="missing")
    assert found == [None] * 3
    assert found.causes == [Cause.ERROR] * 3
    # Only the request that failed is without scores.
    server.reply = lambda items: (500, {}, b"") if len(items) == 2 else by_length(items)
    assert ask(server.url, on_failure="missing", batch_size=2) == [None, None, 3.0]


def test_a_slow_server_is_a_time_out(server: LocalScorer) -> None:
    def slow(items: list[dict[str, Any]]) -> Reply:
        time.sleep(0.6)
        return by_length(items)

    server.reply = slow
    found = ask(server.url, on_failure="missing", timeout_seconds=0.1, max_retries=1)
    assert found.causes == [Cause.TIMEOUT] * 3
    with pytest.raises(ServerUnreachableError, match="no answer in time"):
        ask(server.url, timeout_seconds=0.1, max_retries=0)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (scores([1.0]), "1 scores for 3 answers"),
        (scores([1.0, "2", 3.0]), "the score '2'"),
        (scores([1.0, True, 3.0]), "the score True"),
        (scores([1.0, float("nan"), 3.0]), "the score nan"),
        ((200, {}, b'{"scores": [1e999, 1, 1]}'), "the score inf"),
        ((200, {}, b'{"result": []}'), "expected"),
        ((200, {}, b"[1, 2, 3]"), "expected"),
        ((200, {}, b"<html>"), "not JSON: '<html>'"),
    ],
)
def test_an_answer_that_is_no_answer_is_an_error(server: LocalScorer, reply: Reply, words: str) -> None:
    server.reply = lambda items: reply
    with pytest.raises(EvaluationError, match=words):
        ask(server.url, on_failure="missing")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((400, {}, b"no field items"), "status 400: it says 'no field items'"),
        ((401, {}, b""), "token_variable"),
        ((404, {}, b"nothing here"), "status 404"),
        ((301, {"Location": "http://127.0.0.1/other"}, b""), "'http://127.0.0.1/other', as `url`"),
    ],
)
def test_a_refused_request_is_the_users_to_mend(server: LocalScorer, reply: Reply, words: str) -> None:
    server.reply = lambda items: reply
    with pytest.raises(ConfigurationError, match=words):
        ask(server.url, on_failure="missing")
    assert len(server.requests) == 1


def test_the_token_comes_from_the_environment(server: LocalScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    about = RewardContext([1], [StopReason.EOS], [{}], max_new_tokens=4)
    with_token = config(server.url, token_variable="SCORER_TOKEN_OF_A_TEST")
    with pytest.raises(ConfigurationError, match="SCORER_TOKEN_OF_A_TEST, which is not set"):
        REWARD_RULES["http"](with_token)
    monkeypatch.setenv("SCORER_TOKEN_OF_A_TEST", "abc")
    REWARD_RULES["http"](with_token)([[]], ["x"], about)
    assert server.headers[0]["Authorization"] == "Bearer abc"
    server.reply = lambda items: (403, {}, b"")
    with pytest.raises(ConfigurationError, match="check the token in SCORER_TOKEN_OF_A_TEST") as caught:
        REWARD_RULES["http"](with_token)([[]], ["x"], about)
    assert "abc" not in str(caught.value)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return files with a certificate for 127.0.0.1 that no authority signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return folder / "certificate.pem", folder / "key.pem"


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with local_scorer(tls=tls) as server:
        with pytest.raises(ServerUnreachableError, match=r"(?i)certificate"):
            ask(server.url, max_retries=0)
        assert server.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ask(server.url, max_retries=0) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"url": "scorer.example/score"}, "no address"),
        ({"url": "ftp://scorer.example"}, "no address"),
        ({"url": "https://user:secret@scorer.example"}, "no user or password"),
        ({"url": "http://scorer.example", "token_variable": "T"}, "unencrypted to scorer.example"),
        ({"url": "https://scorer.example", "token_variable": "a token"}, "pattern"),
    ],
)
def test_bad_configs_are_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        HttpReward.model_validate({"kind": "http", **knobs})
    HttpReward.model_validate({"kind": "http", "url": "http://localhost:8000/", "token_variable": "T"})
