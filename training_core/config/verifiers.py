"""Rewards without a model that check an answer: numbers, mathematics, code, a scorer elsewhere."""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from training_core.config.reward_parts import MatchReward, RewardPartConfig

MEBIBYTE = 1024**2


class NumericMatchReward(MatchReward):
    """1 when the answer's number equals the reference within a tolerance, 0 when it does not or there is no number.

    Read as numbers: signs, thousands separators (`1,234.5`), percent, fractions (`3/4`, `\\frac{3}{4}`), scientific
    notation (`1.5e-3`, `1.5 \\times 10^{-3}`), a currency sign in front. The reference may be a number or a text, which
    is read in the same way. A row without a reference, or whose reference holds no number, has no score.
    """

    kind: Literal["numeric_match"]
    """Chooses this rule: a number equal to the row's reference."""
    marker: str | None = Field(default=None, min_length=1)
    """Where the number stands: the first one after the last place of this text, for example `####`; for `\\boxed` the
    last one within the braces of the last `\\boxed{...}`. An answer without the marker scores 0. Default: the last
    number of the answer."""
    absolute_tolerance: float = Field(default=0.0, ge=0.0)
    """Largest difference that counts as equal, in the reference's unit. Default: 0."""
    relative_tolerance: float = Field(default=1e-9, ge=0.0, lt=1.0)
    """Largest difference that counts as equal, as a share of the reference's absolute value; the larger of the two
    tolerances holds. Default: 1e-9, so that whole numbers must be equal (as `math.isclose` has it)."""
    percent: Literal["hundredth", "ignore"] = "hundredth"
    """What `%` means after a number. `hundredth`: 50% equals 0.5. `ignore`: 50% equals 50."""


class MathVerifyReward(MatchReward):
    """1 when math-verify finds the answer equal to the reference (LaTeX or plain expressions), else 0.

    It runs in processes of its own, because the library's own time-outs need a main thread. An answer in which it finds
    no expression scores 0. No score: no reference, a reference that it cannot read, a comparison that failed or took
    too long (its process is ended and replaced); `reward/<name>_error_fraction` and `_timeout_fraction` count the last
    two.
    """

    kind: Literal["math_verify"]
    """Chooses this rule: equality as math-verify finds it."""
    reference_form: Literal["expression", "text"] = "expression"
    """What the reference is, and what `extract_pattern` takes from an answer. `expression`: one expression, LaTeX or
    plain (`2x`, `\\frac{1}{2}`). `text`: words in which `$...$` or `\\boxed{...}` marks the expression; without marks
    only a number is found in it. (An answer of which nothing is taken is always read as text.)"""
    timeout_seconds: float = Field(default=10.0, gt=0.0)
    """Wall-clock limit on reading and comparing one answer. Default: 10, twice the library's own for one comparison."""
    num_workers: int = Field(default=2, ge=1)
    """Processes that compare at the same time."""
    max_memory_bytes: int = Field(default=2048 * MEBIBYTE, ge=256 * MEBIBYTE)
    """Address space of one process; a comparison that needs more is an error."""


class CodeTestsReward(RewardPartConfig):
    """The share of the row's tests that the answer's Python code passes in a sandbox.

    The row's `extra` holds the tests: a list, or one test. A test is a mapping with `stdin` (default: nothing) and
    `expected_stdout`, or a text of Python that runs after the answer's code in the same module and passes when it ends
    without an exception (`assert add(1, 2) == 3`). Each test runs in a process of its own. White space at line ends and
    empty lines at the end of the output do not count; a program must end with exit status 0.

    Failed, which scores 0: an exception, wrong output, a crash, too much memory, output, or too many processes. No
    score: the row has no tests; a test ran out of time, which says nothing of right or wrong (the remaining tests are
    left out; `reward/<name>_timeout_fraction`); the sandbox failed (`reward/<name>_error_fraction`).

    The sandbox is a Linux process in its own session, with user, mount, process, network and IPC namespaces: no
    network, a file system that is read-only except for an empty working directory in memory, no other processes, an
    empty environment. It holds honest mistakes and a policy's tricks, not an attacker who knows the kernel's faults.
    The code can read what this user can read.

    Prefer tests with `expected_stdout`: what it says never reaches the code. A test in Python runs beside the answer in
    one process, so code that sets out to can fool it: it can find the test's text, define objects that equal
    everything, or say what the process says once a test has passed. Only ending early is held back.
    """

    kind: Literal["code_tests"]
    """Chooses this rule: tests of code."""
    tests_key: str = "tests"
    """Key of the tests in the prompt row's `extra`."""
    code: Literal["fenced", "fenced_or_whole", "whole"] = "fenced_or_whole"
    """What is run. `fenced`: the last fenced block (three backticks) marked as Python, else the last one; without one
    the answer scores 0. `fenced_or_whole`: without one, the whole answer. `whole`: the answer as it is."""
    score: Literal["share", "all_or_nothing"] = "share"
    """`share`: passed tests by tests. `all_or_nothing`: 1 when all pass, else 0."""
    timeout_seconds: float = Field(default=10.0, gt=0.0)
    """Wall-clock limit on one test."""
    max_cpu_seconds: int = Field(default=5, ge=1)
    """Processor time of one process of a test. Less dependent on the load of the machine than `timeout_seconds`."""
    max_memory_bytes: int = Field(default=512 * MEBIBYTE, ge=64 * MEBIBYTE)
    """Address space of one process, and resident memory of all processes of a test together."""
    max_disk_bytes: int = Field(default=16 * MEBIBYTE, ge=4096)
    """Size of the working directory and of one file."""
    max_output_bytes: int = Field(default=MEBIBYTE, ge=1)
    """What a test may write to standard output. One that writes more fails."""
    max_processes: int = Field(default=16, ge=1)
    """Processes of a test at the same time. One that has more fails."""
    max_open_files: int = Field(default=64, ge=16)
    """File descriptors of one process."""
    num_workers: int = Field(default=2, ge=1)
    """Answers whose tests run at the same time."""
    packages: bool = False
    """Let the code import the packages that are installed beside the training core (NumPy for example). Default: the
    standard library only, which also starts faster."""
    network: Literal["require_isolation", "allow"] = "require_isolation"
    """What to do where the kernel refuses namespaces, as inside most containers. `require_isolation`: refuse to start.
    `allow`: go on with limits alone: the answers' code then reaches the network and can change all that this user can
    (for root: all that user 65534 can, who must be able to read Python). Where the kernel grants them, both isolate."""


class HttpReward(RewardPartConfig):
    """A scorer elsewhere.

    POST `{"items": [{"prompt": messages, "answer": text, "extra": {...}}]}` -> `{"scores": [...]}` with one number an
    item, or null where it has none. A request may arrive more than once, so scoring must be free of side effects.
    """

    kind: Literal["http"]
    """Chooses this reward: a scorer behind an HTTP address."""
    url: str
    """Address that takes the POST. Certificates are always verified; SSL_CERT_FILE names an authority of your own."""
    token_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the bearer token; the token itself never stands in a config."""
    batch_size: int = Field(default=64, ge=1)
    """Most answers in one request."""
    timeout_seconds: float = Field(default=60.0, gt=0.0)
    """Limit on connecting, and on each pause while sending or receiving."""
    max_retries: int = Field(default=5, ge=0)
    """Tries of a request after the first one, on connection errors, time-outs, and statuses 408, 429 and 5xx."""
    backoff_seconds: float = Field(default=1.0, ge=0.0)
    """Pause before the first retry; each further one is twice as long. `Retry-After` is kept where it is longer."""
    max_backoff_seconds: float = Field(default=60.0, ge=0.0)
    """Longest pause before a retry, `Retry-After` included."""
    on_failure: Literal["stop", "missing"] = "stop"
    """After the last retry. `stop`: the stage ends and can be continued later (exit status 75). `missing`: the
    request's answers have no score and count in `reward/<name>_error_fraction` (or `_timeout_fraction`)."""

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address: write https://host/path")
        if parts.username or parts.password:
            raise ValueError("no user or password in the address: put a token in an environment variable and name it")
        return url

    @model_validator(mode="after")
    def _no_token_in_clear(self) -> HttpReward:
        parts = urlsplit(self.url)
        if self.token_variable and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            raise ValueError(f"a token would travel unencrypted to {parts.hostname}: write https, or no token_variable")
        return self


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
