"""A scorer elsewhere, asked over HTTP."""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from training_core.config.verifiers import HttpReward
from training_core.errors import ConfigurationError, EvaluationError, ServerUnreachableError
from training_core.records import Message
from training_core.rewards.base import Cause, RewardContext, RewardFunction, Scores, no_poll
from training_core.rewards.polling import sleep_polled

logger = logging.getLogger(__name__)

RETRIED_STATUSES = (408, 429)
"""Besides 5xx: the server says that the same request may succeed later."""
EXCERPT_CHARACTERS = 200

Sleep = Callable[[float], None]


def pause_seconds(attempt: int, retry_after: str | None, config: HttpReward) -> float:
    """Return how long to wait before retry `attempt` (from 1).

    min(longest, max(first * 2^(attempt - 1), Retry-After)), where Retry-After is seconds or a date.

    >>> config = HttpReward(kind="http", url="http://localhost", backoff_seconds=1.0, max_backoff_seconds=10.0)
    >>> [pause_seconds(attempt, None, config) for attempt in (1, 2, 3, 9)]
    [1.0, 2.0, 4.0, 10.0]
    >>> pause_seconds(1, "7", config), pause_seconds(1, "70", config), pause_seconds(2, "soon", config)
    (7.0, 10.0, 2.0)
    """
    wanted = config.backoff_seconds * 2.0 ** min(attempt - 1, 60)
    return min(max(wanted, seconds_until(retry_after)), config.max_backoff_seconds)


def seconds_until(retry_after: str | None) -> float:
    """Return what a Retry-After header asks for, in seconds; 0 without one, or when it cannot be read."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        moment = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())


def parsed_scores(response: httpx.Response, num_items: int, url: str) -> list[float | None]:
    """Return the scores in a response.

    Raises:
        EvaluationError: it is not `{"scores": [...]}` with one finite number or null an item.
    """
    text = response.text[:EXCERPT_CHARACTERS]
    try:
        content = json.loads(response.text)
    except ValueError:
        raise EvaluationError(f"{url} answered with something that is not JSON: {text!r}") from None
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list):
        raise EvaluationError(f'{url} answered {text!r}; expected {{"scores": [number or null, ...]}}')
    if len(scores) != num_items:
        raise EvaluationError(f"{url} gave {len(scores)} scores for {num_items} answers")
    for score in scores:
        if score is not None and not (type(score) in (int, float) and math.isfinite(score)):
            raise EvaluationError(f"{url} gave the score {score!r}; a score is a finite number, or null for none")
    return [None if score is None else float(score) for score in scores]


def request_content(items: Sequence[dict[str, Any]]) -> bytes:
    """Return the body of a request.

    Raises:
        EvaluationError: a row's `extra` holds what JSON has no word for.
    """
    try:
        return json.dumps({"items": list(items)}, allow_nan=False).encode()
    except ValueError:
        raise EvaluationError(
            "a prompt row's `extra` holds NaN or infinity, which JSON has no word for, so the scorer cannot be asked: "
            "write null or a text there"
        ) from None


class RemoteScorer:
    """Asks one address, again where that may help.

    Args:
        config: address, batches, retries.
        token: bearer token; None for none.
        sleep: waits between tries, for a second at most each time.
    """

    def __init__(self, config: HttpReward, token: str | None, sleep: Sleep = time.sleep) -> None:
        self.config = config
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.sleep = sleep

    def score(self, items: Sequence[dict[str, Any]], poll: Callable[[], None] = no_poll) -> Scores:
        """Return one score an item.

        Args:
            items: one an answer.
            poll: called before each try and every second between tries; a request under way is waited for.

        Raises:
            ServerUnreachableError: no answer after the last retry, and the config says to stop then.
            ConfigurationError: the server refuses the request for what it is (a 3xx or 4xx status).
            EvaluationError: its answer cannot be used.
            What `poll` raises.
        """
        values: list[float | None] = []
        causes: list[Cause | None] = []
        with httpx.Client(timeout=self.config.timeout_seconds, headers=self.headers) as client:
            for start in range(0, len(items), self.config.batch_size):
                batch = items[start : start + self.config.batch_size]
                found = self.ask(client, batch, poll)
                values += [None] * len(batch) if isinstance(found, Cause) else found
                causes += [found if isinstance(found, Cause) else None] * len(batch)
        return Scores(values, causes)

    def ask(
        self, client: httpx.Client, batch: Sequence[dict[str, Any]], poll: Callable[[], None]
    ) -> list[float | None] | Cause:
        url, reason, cause = self.config.url, "", Cause.ERROR
        content = request_content(batch)
        for attempt in range(self.config.max_retries + 1):
            retry_after = None
            poll()
            try:
                response = client.post(url, content=content, headers={"Content-Type": "application/json"})
            except httpx.TimeoutException as error:
                reason, cause = f"no answer in time ({type(error).__name__})", Cause.TIMEOUT
            except httpx.TransportError as error:
                reason, cause = f"no connection ({error})", Cause.ERROR
            else:
                if response.is_success:
                    return parsed_scores(response, len(batch), url)
                reason, cause = f"status {response.status_code}", Cause.ERROR
                self.check_retried(response)
                retry_after = response.headers.get("Retry-After")
            if attempt < self.config.max_retries:
                pause = pause_seconds(attempt + 1, retry_after, self.config)
                logger.warning("%s: %s; try %d in %.1f s", url, reason, attempt + 2, pause)
                sleep_polled(pause, poll, self.sleep)
        if self.config.on_failure == "stop":
            raise ServerUnreachableError(
                f"the scorer at {url} gave no scores after {self.config.max_retries + 1} tries: {reason}. Start it (or "
                "look at its log) and run the same command again"
            )
        logger.warning("%s: %s after %d tries; %d answers without score", url, reason, attempt + 1, len(batch))
        return cause

    def check_retried(self, response: httpx.Response) -> None:
        """Check that a status without scores is one that may pass.

        Raises:
            ConfigurationError: it is not.
        """
        status = response.status_code
        if status in RETRIED_STATUSES or status >= 500:
            return
        advice = f"it says {response.text[:EXCERPT_CHARACTERS]!r}"
        if response.is_redirect:
            advice = f"write the address that it names, {response.headers.get('Location')!r}, as `url`"
        elif status in (401, 403):
            name = self.config.token_variable
            advice = f"check the token in {name}" if name else "name the variable with the token in `token_variable`"
        raise ConfigurationError(f"the scorer at {self.config.url} refuses the request with status {status}: {advice}")


def build_http(config: HttpReward) -> RewardFunction:
    """Return the part that asks `config.url`.

    Raises:
        ConfigurationError: the variable that should hold the token is not set.
    """
    token = None
    if config.token_variable is not None:
        token = os.environ.get(config.token_variable, "").strip()
        if not token:
            raise ConfigurationError(f"token_variable names {config.token_variable}, which is not set in this process")
    scorer = RemoteScorer(config, token)

    def score(prompts: Sequence[Sequence[Message]], answers: Sequence[str], context: RewardContext) -> Scores:
        return scorer.score(
            [
                {"prompt": [message.model_dump(mode="json") for message in prompt], "answer": answer, "extra": extra}
                for prompt, answer, extra in zip(prompts, answers, context.extras, strict=True)
            ],
            context.poll,
        )

    return score
