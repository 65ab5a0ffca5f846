"""Fetch a checkpoint from the Hugging Face hub: safetensors, configs and tokenizer files of one commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from training_core.errors import ConfigurationError, ServerUnreachableError

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Pickled weights are never fetched."""


def fetch_from_hub(repository: str, revision: str) -> Path:
    """Return the local folder of a repository at one commit.

    Raises:
        ConfigurationError: offline mode, or no such repository, commit or permission.
        ServerUnreachableError: the hub does not answer.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"checkpoint.source: hub:{repository} needs the network, but HF_HUB_OFFLINE is set. Unset it, or name a "
            "local folder or .gguf file as checkpoint.source"
        )
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(WANTED)))
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise unreachable(repository, error) from error
        raise ConfigurationError(
            f"checkpoint.source: hub:{repository} at checkpoint.revision {revision} was not found, or is private: "
            f"check both, and set HF_TOKEN if it needs a token ({first_line(error)})"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise unreachable(repository, error) from error


def unreachable(repository: str, error: Exception) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"checkpoint.source: hub:{repository} cannot be fetched now: {first_line(error)}. Run the same command again "
        "later, or name a local folder"
    )


def first_line(error: Exception) -> str:
    """Return what a library says, without its paragraphs of advice."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
