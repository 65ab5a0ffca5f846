"""Stage `register`: a model that passed its gate becomes a model version in MLflow, and champion.

The digest that the gate judged, the digest of the files at hand and the digest of what MLflow stored must be one.
A killed stage run again finishes what is missing: it finds its version (or its uploaded model) by tags first.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.mlflow_runs import close_run, stage_run
from tasks.mlflow_store import (
    StoreLocation,
    connect,
    experiment_id,
    locate_store,
    mlflow_errors,
    store_lock,
)
from tasks.model_version import INPUT_EXAMPLE, TASK, RegisterConfig, requirements, version_tags
from tasks.promotion import (
    WEIGHTS_TAG,
    check_champion_unmoved,
    find_version,
    promote,
    stored_weights_digest,
    version_source,
)
from training_core.errors import NotPromotableError
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.context import StageContext
from training_core.protocol.digests import file_digest, text_digest, weights_digest
from training_core.records import StageOutcome, Verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

UPLOAD_TIMEOUT_SECONDS = 300
"""For one request with weights in it; whether the server is there at all is asked with a short limit first."""
ATTEMPT_TAG = "tidegate.attempt"
"""Names which (weights, gate) pair an uploaded model belongs to, so that a killed stage finds its upload again."""


@dataclass(frozen=True)
class Candidate:
    """What is registered, and where: everything that the steps below share."""

    client: MlflowClient
    location: StoreLocation
    config: RegisterConfig
    root: Path
    policy: Path
    gate: dict[str, Any]
    weights_sha256: str
    gate_sha256: str
    spec_hash: str
    scratch: Path

    @property
    def judged_champion(self) -> str | None:
        """Weights of the champion that the gate compared with; None = there was none."""
        return self.gate["weights_sha256"].get("champion")  # type: ignore[no-any-return]

    @property
    def attempt(self) -> str:
        return text_digest(f"{self.weights_sha256}/{self.gate_sha256}")[:32]


def run(context: StageContext) -> StageOutcome:
    """Register and promote; see the module.

    Raises:
        NotPromotableError: the gate did not pass, a digest differs, or the champion moved.
        ServerUnreachableError: MLflow does not answer.
    """
    with scratch_directory(context.directory.path) as scratch:
        candidate = find_candidate(context, scratch)
        version = registered_version(candidate)
        judged = candidate.judged_champion
        aliases = promote(candidate.client, candidate.location, version, judged_sha256=judged, scratch=scratch)
    registration = {
        "model_name": version.name,
        "version": str(version.version),
        "aliases": aliases,
        "weights_sha256": candidate.weights_sha256,
        "gate_sha256": candidate.gate_sha256,
        "model_uri": f"models:/{version.name}/{version.version}",
        "tracking_uri_digest": text_digest(candidate.location.label),
    }
    output = context.new_output("registration.json")
    write_json(output, registration)
    path = str(output.relative_to(context.directory.path))
    return StageOutcome(outputs={"registration.json": path}, summary=registration)


def find_candidate(context: StageContext, scratch: Path) -> Candidate:
    """Return what is to be registered, after seeing that it may be and that the registry answers.

    Raises:
        NotPromotableError: the gate did not pass, or judged other weights.
        ServerUnreachableError: MLflow does not answer.
    """
    config = RegisterConfig.model_validate(context.spec.config)
    policy, gate_path = context.input_path("policy"), context.input_path("gate")
    gate = read_json(gate_path)
    weights_sha256 = check_promotable(gate, policy)
    root = context.directory.path.parents[2]
    location = locate_store(config.tracking, root)
    connect(location)  # Whether it is there at all is asked with short limits, before a long upload begins.
    use_everywhere(location)
    return Candidate(
        client=connect(location, timeout_seconds=UPLOAD_TIMEOUT_SECONDS),
        location=location,
        config=config,
        root=root,
        policy=policy,
        gate=gate,
        weights_sha256=weights_sha256,
        gate_sha256=file_digest(gate_path),
        spec_hash=context.spec.spec_hash,
        scratch=scratch,
    )


def use_everywhere(location: StoreLocation) -> None:
    """Make this process's MLflow functions use the store: some of them take no client. A stage's process has one."""
    import mlflow

    mlflow.set_tracking_uri(location.uri)
    mlflow.set_registry_uri(location.uri)


def check_promotable(gate: dict[str, Any], policy: Path) -> str:
    """Return the weights digest of `policy` if `gate` lets exactly these weights through.

    Raises:
        NotPromotableError: the verdict is not `pass`, or the gate judged other weights.
    """
    verdict = gate.get("verdict")
    if verdict != Verdict.PASS:
        reasons = "; ".join(map(str, gate.get("reasons") or [])) or "no reason given"
        raise NotPromotableError(
            f"the gate's verdict is {verdict!r} ({reasons}). Only a model that passed is registered: change the "
            "training or the data and run again"
        )
    judged = (gate.get("weights_sha256") or {}).get("candidate")
    found = weights_digest(policy)
    if judged != found:
        raise NotPromotableError(
            f"the gate judged weights {str(judged)[:16]}…, but {policy} holds {found[:16]}…. Evaluate and judge this "
            "policy first: run the pipeline again"
        )
    return found


@contextmanager
def scratch_directory(stage_directory: Path) -> Iterator[Path]:
    """Yield a folder for MLflow's copies of the weights on the root's disk, and remove it: /tmp may be small."""
    scratch = stage_directory / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
    try:
        yield scratch
    finally:
        tempfile.tempdir = before
        os.environ.pop("TMPDIR")
        if variable is not None:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(scratch, ignore_errors=True)


def registered_version(candidate: Candidate) -> ModelVersion:
    """Return the version of these weights on this verdict; upload and create it only when there is none."""
    client, location, name = candidate.client, candidate.location, candidate.config.registry.model_name
    with mlflow_errors(location, f"look for {name!r} in the registry"):
        found = find_version(client, name, candidate.weights_sha256, candidate.gate_sha256)
        check_champion_unmoved(
            client,
            location,
            name,
            candidate_sha256=candidate.weights_sha256,
            judged_sha256=candidate.judged_champion,
            scratch=candidate.scratch,
        )
    if found is not None:
        _check_stored(candidate, version_source(client, found))
        logger.info("version %s of %s already holds weights %s", found.version, name, candidate.weights_sha256[:16])
        return found
    source, run_id = _uploaded_model(candidate)
    _check_stored(candidate, source)
    found = _create_version(candidate, source, run_id)
    logger.info("version %s of %s holds weights %s", found.version, name, candidate.weights_sha256[:16])
    return found


def _check_stored(candidate: Candidate, source: str) -> None:
    stored = stored_weights_digest(candidate.client, candidate.location, source, candidate.scratch)
    if stored != candidate.weights_sha256:
        raise NotPromotableError(
            f"MLflow hands out weights {stored[:16]}… for {source}, the gate judged {candidate.weights_sha256[:16]}…. "
            "The stored model is damaged or was replaced: delete it in MLflow and run the same command again"
        )


def _create_version(candidate: Candidate, source: str, run_id: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    client, name = candidate.client, candidate.config.registry.model_name
    tags = version_tags(candidate.config.lineage, candidate.gate, candidate.weights_sha256, candidate.gate_sha256)
    with store_lock(candidate.location), mlflow_errors(candidate.location, f"create a version of {name!r}"):
        # Another process may have registered the same weights on the same verdict while this one uploaded.
        if found := find_version(client, name, candidate.weights_sha256, candidate.gate_sha256):
            return found
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        model_id = source.removeprefix("models:/")  # A server takes no source of a model that is not named.
        return client.create_model_version(name, source, run_id=run_id, tags=tags, model_id=model_id)


def _uploaded_model(candidate: Candidate) -> tuple[str, str]:
    """Return (model URI, MLflow run id) of an upload of these weights: an earlier whole one, or a new one."""
    client, location, config = candidate.client, candidate.location, candidate.config
    experiment = experiment_id(client, location, config.tracking.experiment)
    with mlflow_errors(location, "look for an earlier upload"):
        earlier = client.search_logged_models(
            [experiment], filter_string=f"tags.`{ATTEMPT_TAG}` = '{candidate.attempt}'"
        )
        for model in earlier:
            if model.status == "READY" and model.source_run_id:
                logger.info("an earlier attempt uploaded %s; it is used", model.model_id)
                return f"models:/{model.model_id}", model.source_run_id
            if model.status == "PENDING":  # Its process was killed in the upload.
                client.finalize_logged_model(model.model_id, "FAILED")
    run = stage_run(
        client, location, experiment, candidate.root, config.lineage.run_id, "register", candidate.spec_hash
    )
    with mlflow_errors(location, "upload the model"):
        try:
            return _log_model(candidate, run), run
        except BaseException:
            close_run(client, run, "FAILED")
            raise


def _log_model(candidate: Candidate, run_id: str) -> str:
    """Upload the policy under an MLflow run, with signature, input example and exact requirements."""
    import mlflow

    with mlflow.start_run(run_id=run_id):
        info = mlflow.transformers.log_model(
            transformers_model=str(candidate.policy.resolve()),
            task=TASK,
            name="policy",
            pip_requirements=requirements(),
            input_example=INPUT_EXAMPLE,
            tags={ATTEMPT_TAG: candidate.attempt, WEIGHTS_TAG: candidate.weights_sha256},
        )
    return str(info.model_uri)
