"""A data set of the Hugging Face hub, named instead of a file; only where the network may be used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data_checks.files import SUFFIXES
from training_core.errors import ConfigurationError, ServerUnreachableError

if TYPE_CHECKING:
    import pyarrow as pa

HUB_ID = re.compile(
    r"(?P<scheme>hf:/{1,2})?(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<split>\w[\w.\-]*))?", re.ASCII
)
"""`hf://org/name`, `org/name` or either with `:split`. A Path has only one slash behind `hf:`."""
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
ON = ("1", "ON", "YES", "TRUE")
DOWNLOAD = "Download one of its files (Parquet, JSONL) where there is a network, and name that"


def is_hub_id(text: str) -> bool:
    """Return whether `text` can name a data set of the hub. A path that exists should be preferred to `org/name`.

    >>> [is_hub_id(text) for text in ("org/name", "hf://org/name:train", "data/pairs.jsonl", "/data/pairs", "name")]
    [True, True, False, False, False]
    """
    match = HUB_ID.fullmatch(text)
    return match is not None and (match["scheme"] is not None or not text.endswith(SUFFIXES))


def check_hub_id(text: str, label: str) -> None:
    """Check that the hub may be asked for a data set.

    Raises:
        ConfigurationError: the environment forbids it.
    """
    switched_off = next((name for name in OFFLINE_VARIABLES if os.environ.get(name, "").upper() in ON), None)
    if switched_off:
        raise ConfigurationError(
            f"{label} does not exist here, and as a data set of the Hugging Face hub it cannot be fetched: "
            f"{switched_off} is set. Unset it where there is a network, or name a file. {DOWNLOAD}"
        )


def hub_batches(text: str, label: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data set of the hub, which `datasets` keeps on disk in its cache.

    Args:
        text: `org/name`, `hf://org/name`, or either with `:split`.
        label: what to call it in messages.

    Raises:
        ConfigurationError: the environment forbids it, there is no such data set, or it has several splits and none is
            named.
        ServerUnreachableError: the hub does not answer.
    """
    check_hub_id(text, label)
    import datasets
    import httpx

    match = HUB_ID.fullmatch(text)
    assert match is not None
    identifier, split = match["id"], match["split"]
    splits: list[str] = []
    try:
        splits = datasets.get_dataset_split_names(identifier)
        if split is None and len(splits) == 1:
            split = splits[0]
        if split not in splits:
            chosen = "has several splits" if split is None else f"has no split {split!r}"
            raise ConfigurationError(f"{label} {chosen}. Name one: " + ", ".join(f"{identifier}:{s}" for s in splits))
        table = datasets.load_dataset(identifier, split=split).data.table
    except ConfigurationError:
        raise
    except (ConnectionError, TimeoutError, httpx.TransportError) as error:
        raise ServerUnreachableError(f"{label}: the hub does not answer ({type(error).__name__})") from None
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError):
        raise ConfigurationError(
            f"{label}: there is no data set {identifier} on the hub, or it is private. Check the name, or log in with "
            "`hf auth login`"
        ) from None
    except ValueError as error:
        # Once rows are read, what a parser says may quote them.
        why = type(error).__name__ if splits else str(error)[:300]
        raise ConfigurationError(f"{label}: the data set cannot be loaded ({why}). {DOWNLOAD}") from None
    yield from table.to_batches()
