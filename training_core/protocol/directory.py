"""The directory of one stage run and its files."""

from __future__ import annotations

from pathlib import Path

from training_core.errors import ArtifactError
from training_core.protocol.atomic import read_json
from training_core.protocol.digests import path_digest
from training_core.records import StageResult, StageSpec


class StageDirectory:
    """`<root>/stages/<stage>/<spec hash>/`; see docs/stages.md for what each file holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec_path = path / "spec.json"
        self.result_path = path / "result.json"
        self.error_path = path / "error.json"
        self.environment_path = path / "environment.json"
        self.metrics_path = path / "metrics.jsonl"
        self.timings_path = path / "timings.jsonl"
        self.progress_path = path / "progress.json"
        self.log_path = path / "log.jsonl"
        self.output_log_path = path / "output.log"
        self.checkpoints_path = path / "checkpoints"
        self.outputs_path = path / "outputs"

    @classmethod
    def of_spec(cls, root: Path, spec: StageSpec) -> StageDirectory:
        return cls(root / "stages" / spec.stage / spec.spec_hash)

    def prepare(self, spec: StageSpec) -> None:
        """Create the directory and write spec.json; input paths and execution may differ from an earlier attempt."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            before = StageSpec.load(self.spec_path)
        except (OSError, ValueError):  # None yet, or damaged: the directory's name says which one belongs here.
            before = None
        if before != spec:
            spec.save(self.spec_path)

    def result(self) -> StageResult | None:
        """Return the result of a complete stage, or None. Outputs are not verified here.

        Raises:
            ArtifactError: result.json is no result.
        """
        if not self.result_path.exists():
            return None
        try:
            return StageResult.model_validate(read_json(self.result_path))
        except ValueError as error:
            raise ArtifactError(
                f"{self.result_path} is damaged ({type(error).__name__}). Delete the directory {self.path} and run the "
                "same command again to compute the stage anew"
            ) from None

    def has_started(self) -> bool:
        return self.checkpoints_path.exists() and any(self.checkpoints_path.glob("step_*"))

    def verify_outputs(self, result: StageResult) -> None:
        """Check that every output still has its digest.

        Raises:
            ArtifactError: an output is missing or changed.
        """
        for name, artifact in result.outputs.items():
            path = self.path / artifact.path
            if not path.exists():
                what = "is missing"
            elif path_digest(path) != artifact.sha256:
                what = "changed after the stage wrote it"
            else:
                continue
            raise ArtifactError(
                f"output {name!r} of stage {result.stage} at {path} {what}. Delete the directory {self.path} to "
                "compute it again, or restore the output"
            )
