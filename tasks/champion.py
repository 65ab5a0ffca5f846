"""What a plan and a run ask the registry: who is champion, and is a registered version still there."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from tasks.mlflow_store import StoreLocation, connect, locate_store, mlflow_errors, store_exists
from tasks.promotion import (
    CHAMPION,
    GATE_TAG,
    PROMOTED_FROM_TAG,
    WEIGHTS_TAG,
    download_model,
    find_alias,
    find_version_number,
    model_folder,
    version_source,
    version_weights,
)
from training_core.errors import NotPromotableError
from training_core.protocol.digests import weights_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

TEMPORARY = ".champion-"
"""How the names of downloads that are not whole yet begin."""


def current_champion(
    config: Any, root: Path, download_to: Path, candidate_sha256: str | None = None, *, download: bool = True
) -> dict[str, Any] | None:
    """Return the champion that a candidate has to beat: `{version, weights_sha256, gate_sha256, path}`, or None.

    Args:
        config: a pipeline config: `registry.model_name` and `tracking` are read.
        root: the pipeline's root.
        download_to: folder for the champion's files, one folder for each digest; a whole earlier download is used.
        candidate_sha256: weights of the candidate when they are known. A champion with these very weights is this
            run's own earlier success: the one that it was judged against is returned in its place, so that the same
            command again finds the same inputs. If somebody deleted that one, there is no champion to beat.
        download: False to write nothing anywhere, not even a new store; `path` is then None for a champion that was
            not downloaded before.

    Raises:
        ServerUnreachableError: the registry does not answer.
        NotPromotableError: the champion's files do not have the digest that was registered.
    """
    location = locate_store(config.tracking, Path(root))
    if not download and not store_exists(location):
        return None
    client = connect(location, read_only=not download)
    name = config.registry.model_name
    with mlflow_errors(location, f"read the champion of {name!r}"):
        version = _rival(client, name, candidate_sha256)
        if version is None:
            return None
        digest = version.tags.get(WEIGHTS_TAG)
        if digest is None and download:  # Registered by other means.
            digest = version_weights(client, location, version, Path(download_to))
    path = None
    if digest is not None:
        path = _files(client, location, version, Path(download_to) / digest[:16], digest, download)
    found = {"version": str(version.version), "weights_sha256": digest, "gate_sha256": version.tags.get(GATE_TAG)}
    return {**found, "path": None if path is None else str(path)}


def _rival(client: MlflowClient, name: str, candidate_sha256: str | None) -> ModelVersion | None:
    """Return the champion, or, while that is the candidate itself, the one that it was judged against."""
    version = find_alias(client, name, CHAMPION)
    seen: set[str] = set()
    while version is not None and candidate_sha256 is not None and version.version not in seen:
        if version.tags.get(WEIGHTS_TAG) != candidate_sha256:
            break
        seen.add(version.version)
        before = version.tags.get(PROMOTED_FROM_TAG)
        successor, version = version, find_version_number(client, name, before) if before else None
        if before and version is None:
            logger.warning(
                "version %s of %s, which version %s was judged against, was deleted: there is no champion to beat",
                *(before, name, successor.version),
            )
    return version


def verify_registration(config: Any, root: Path, registration: dict[str, Any], *, read_only: bool = False) -> bool:
    """Return whether the registry still has the version that `registration` (registration.json) names.

    False means: run the stage `register` again. Aliases are not looked at: a champion may have been replaced since.

    Args:
        read_only: write nothing anywhere; a store that nobody has made yet has no version.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    location = locate_store(config.tracking, Path(root))
    if read_only and not store_exists(location):
        return False
    client = connect(location, read_only=read_only)
    with mlflow_errors(location, "look at a registered version"):
        version = find_version_number(client, registration["model_name"], str(registration["version"]))
    return (
        version is not None
        and version.status == "READY"
        and version.tags.get(WEIGHTS_TAG) == registration["weights_sha256"]
        and version.tags.get(GATE_TAG) == registration.get("gate_sha256")
    )


def _holds(folder: Path, digest: str) -> bool:
    if not folder.is_dir():
        return False
    with contextlib.suppress(Exception):  # Whatever is wrong with an earlier download, a new one mends it.
        return weights_digest(model_folder(folder)) == digest
    return False


def _files(
    client: MlflowClient, location: StoreLocation, version: ModelVersion, folder: Path, digest: str, download: bool
) -> Path | None:
    """Return the model's folder below `folder`: an earlier whole download, or a new one; None without `download`."""
    if not _holds(folder, digest):
        if not download:
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder.parent / "lock")):  # Another run may read what a second download would replace.
            if not _holds(folder, digest):
                _download(client, location, version, folder, digest)
    return model_folder(folder)


def _download(client: MlflowClient, location: StoreLocation, version: ModelVersion, folder: Path, digest: str) -> None:
    """Download into `folder`, whatever was there. The caller holds the lock, so what else is temporary is left over."""
    for left_over in folder.parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        stored = download_model(client, location, version_source(client, version), temporary)
        found = weights_digest(model_folder(stored))
        if found != digest:
            raise NotPromotableError(
                f"the champion, version {version.version} of {version.name!r}, was registered with weights "
                f"{digest[:16]}…, but the store hands out "
                f"{found[:16]}…. Point the alias {CHAMPION!r} at a version that is whole, then run again"
            )
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(stored, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
