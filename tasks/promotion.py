"""Model versions and their aliases: finding them, and moving `champion` only when nobody else moved it.

MLflow sets an alias without looking at what it pointed to. Here it moves under the store's lock, after a comparison
with the champion that the gate judged, and is read back. Any state that a crash leaves is one that the same call
completes.

The lock is a file below the root. Pipelines of different roots that share one server are not kept apart by it: for
them the champion is compared once more right before it moves and read back at the end, which leaves a gap of one
request. Two of them within that gap would both succeed, and the later one would be champion.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.mlflow_store import StoreLocation, mlflow_errors, store_lock
from training_core.errors import ArtifactError, NotPromotableError
from training_core.protocol.digests import weights_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
WEIGHTS_TAG = "tidegate.weights_sha256"
GATE_TAG = "tidegate.gate_sha256"
PROMOTED_FROM_TAG = "tidegate.promoted_from"
"""Version that was champion before this one; empty = there was none."""
DEMOTED_BY_TAG = "tidegate.demoted_by"


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """Return the version that `alias` points to, or None."""
    from mlflow.exceptions import MlflowException

    try:
        number = client.get_registered_model(name).aliases.get(alias)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return None if number is None else client.get_model_version(name, str(number))


def find_version_number(client: MlflowClient, name: str, number: str) -> ModelVersion | None:
    """Return a version by its number, or None when there is none of it (any more)."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def find_version(client: MlflowClient, name: str, weights_sha256: str, gate_sha256: str) -> ModelVersion | None:
    """Return the version that holds these weights on this gate's word, or None; the newest of several."""
    candidates = [
        version
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get(WEIGHTS_TAG) == weights_sha256 and version.tags.get(GATE_TAG) == gate_sha256
    ]
    return max(candidates, key=lambda version: int(version.version), default=None)


def model_folder(stored: Path) -> Path:
    """Return the Hugging Face folder inside a downloaded MLflow model.

    Raises:
        ArtifactError: there are no safetensors weights.
    """
    for folder in (stored / "model", stored):
        if any(folder.glob("*.safetensors")):
            return folder
    raise ArtifactError(f"the registered model at {stored} holds no *.safetensors weights; Tidegate compares no others")


def download_model(client: MlflowClient, location: StoreLocation, source: str, destination: Path) -> Path:
    """Download the MLflow model at `source` ("models:/m-...", or a version's download URI) below `destination`.

    Model URIs are resolved here: MLflow's own functions look some of them up in a process-wide store.
    """
    import mlflow

    with mlflow_errors(location, f"download {source}"):
        destination.mkdir(parents=True, exist_ok=True)
        if source.startswith("models:/m-"):
            source = client.get_logged_model(source.removeprefix("models:/")).artifact_location
        path = mlflow.artifacts.download_artifacts(
            artifact_uri=source, dst_path=str(destination), tracking_uri=location.uri, registry_uri=location.uri
        )
    return Path(path)


def version_source(client: MlflowClient, version: ModelVersion) -> str:
    """Return where the files of a version lie, as `download_model` takes it."""
    return str(client.get_model_version_download_uri(version.name, str(version.version)))


def stored_weights_digest(client: MlflowClient, location: StoreLocation, source: str, scratch: Path) -> str:
    """Return the digest of the weights that the store hands out for `source`; nothing is left in `scratch`."""
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="stored-", dir=scratch))
    try:
        return weights_digest(model_folder(download_model(client, location, source, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def version_weights(client: MlflowClient, location: StoreLocation, version: ModelVersion, scratch: Path) -> str:
    """Return the weights digest of a version: its tag, or, of one registered by other means, computed."""
    if tag := version.tags.get(WEIGHTS_TAG):
        return str(tag)
    return stored_weights_digest(client, location, version_source(client, version), scratch)


def check_champion_unmoved(
    client: MlflowClient,
    location: StoreLocation,
    name: str,
    *,
    candidate_sha256: str,
    judged_sha256: str | None,
    scratch: Path,
) -> ModelVersion | None:
    """Return the current champion if it is the one that the gate judged, or holds the candidate's own weights.

    The candidate's own weights are an earlier success of the same policy, perhaps on another verdict (a changed
    significance level): it was judged against the champion before, and replacing it moves no weights.

    Raises:
        NotPromotableError: another model became champion since.
    """
    current = find_alias(client, name, CHAMPION)
    if current is not None and current.tags.get(WEIGHTS_TAG) == candidate_sha256:
        return current
    found = version_weights(client, location, current, scratch) if current is not None else None
    if found != judged_sha256:
        now = f"version {current.version} ({found[:16]}…)" if current is not None and found else "no version"
        judged = f"weights {judged_sha256[:16]}…" if judged_sha256 else "no champion"
        raise NotPromotableError(
            f"the champion of {name!r} moved: the gate judged against {judged}, the registry's champion is now {now}. "
            "Nothing was promoted. Run the same command again: it evaluates against the champion of now"
        )
    return current


def promote(
    client: MlflowClient,
    location: StoreLocation,
    version: ModelVersion,
    *,
    judged_sha256: str | None,
    scratch: Path,
) -> list[str]:
    """Point `challenger` and then `champion` at `version`; keep the old champion as `previous`. Return its aliases.

    Args:
        judged_sha256: weights of the champion that the gate compared with; None = there was none.

    Raises:
        NotPromotableError: another model became champion since, or the store did not keep what it was told.
    """
    name, number = version.name, str(version.version)
    with store_lock(location), mlflow_errors(location, f"move the aliases of {name!r}"):
        _point(client, name, CHALLENGER, number)
        current = check_champion_unmoved(
            client,
            location,
            name,
            candidate_sha256=version.tags[WEIGHTS_TAG],
            judged_sha256=judged_sha256,
            scratch=scratch,
        )
        if current is None or str(current.version) != number:
            # The tag first: whoever sees the new champion can tell which one it was judged against.
            old = str(current.version) if current is not None else ""
            client.set_model_version_tag(name, number, PROMOTED_FROM_TAG, old)
            # One with the same weights (another verdict) is nothing to go back to: the one before it stays `previous`.
            if current is not None and current.tags.get(WEIGHTS_TAG) != version.tags[WEIGHTS_TAG]:
                _point(client, name, PREVIOUS, old)
                client.set_model_version_tag(name, old, DEMOTED_BY_TAG, number)
            _check_alias(client, name, CHAMPION, old or None)
            _point(client, name, CHAMPION, number)
            logger.info("version %s of %s is champion (before: %s)", number, name, old or "none")
        aliases = _check_alias(client, name, CHAMPION, number)
    return sorted(alias for alias, pointed in aliases.items() if str(pointed) == number)


def _point(client: MlflowClient, name: str, alias: str, number: str) -> None:
    """Set an alias and read it back."""
    client.set_registered_model_alias(name, alias, number)
    _check_alias(client, name, alias, number)


def _check_alias(client: MlflowClient, name: str, alias: str, number: str | None) -> dict[str, str]:
    """Return all aliases of the model if `alias` points to version `number` (None: to none).

    Raises:
        NotPromotableError: it points elsewhere.
    """
    aliases: dict[str, str] = client.get_registered_model(name).aliases
    found = aliases.get(alias)
    if (None if found is None else str(found)) != number:
        raise NotPromotableError(
            f"alias {alias!r} of {name!r} should point to {f'version {number}' if number else 'no version'}, but reads "
            f"{found or 'none'}: someone else moved it at the same moment. Run the same command again"
        )
    return aliases
