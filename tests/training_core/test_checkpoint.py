"""Checkpoints, metrics, digests, atomic files and error translation, in this process."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from training_core import errors
from training_core.checkpoint import CheckpointStore
from training_core.errors import ArtifactError, ConfigurationError, DigestMismatchError
from training_core.metrics import MetricSums, MetricsWriter, read_metrics
from training_core.protocol.atomic import write_json, write_text
from training_core.protocol.digests import path_digest, tree_digest, verify_digest, weights_digest
from training_core.registry import Registry
from training_core.seeding import batch_indices, derive_seed


def write_state(text: str):
    return lambda path: (path / "state").write_text(text)


def test_checkpoints_keep_the_newest_and_pass_over_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        store.save(step, write_state(str(step)))
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000002", "step_000003"]
    assert store.latest().step == 3
    (tmp_path / "step_000003" / "state").write_text("X")
    assert store.latest().step == 2
    (tmp_path / "step_000002" / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="none of them is whole"):
        store.latest()


def test_checkpoints_are_ordered_by_number_and_a_copy_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (999_998, 999_999, 1_000_000):
        store.save(step, write_state(str(step)))
    assert store.latest().step == 1_000_000
    shutil.copytree(tmp_path / "step_1000000", tmp_path / "step_1000000 (copy)")
    store.save(1_000_001, write_state("last"))
    names = ["step_1000000", "step_1000000 (copy)", "step_1000001"]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == names
    assert store.latest().step == 1_000_001


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"step": 2}', '{"step": 2, "files": []}', "3", '{"step": 1, "files": {}}']
)
def test_a_manifest_of_another_shape_or_step_is_damage(tmp_path: Path, manifest: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        store.save(step, write_state(str(step)))
    (tmp_path / "step_000002" / "manifest.json").write_text(manifest)
    assert store.latest().step == 1


def steps_in(path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in path.glob("step_*"))


def test_the_best_are_kept_besides_the_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=2)
    kept = []
    for step, score in enumerate([0.5, 0.9, None, 0.7, 0.9, 0.1], start=1):
        assert store.save(step, write_state(str(step)), score).score == score
        kept.append(steps_in(tmp_path))
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 5], [2, 5, 6]]
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    assert (best.step, best.score) == (2, 0.9)
    # A damaged one is not the best any more.
    (tmp_path / "step_000002" / "state").write_text("X")
    assert store.best().step == 5
    with pytest.raises(ValueError, match="finite"):
        store.save(7, write_state("7"), float("nan"))
    assert store.latest().step == 6


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1)
    for step in (1, 2):
        store.save(step, write_state(str(step)))
    assert (store.best(), steps_in(tmp_path)) == (None, [2])


def test_a_pinned_step_survives_one_pruning(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(3, write_state("3"))
    store.save(4, write_state("4"), pinned={3})
    assert steps_in(tmp_path) == [3, 4]
    assert store.latest(lambda step: step % 3 == 0).step == 3
    assert store.latest(lambda step: step % 5 == 0) is None
    store.save(6, write_state("6"))
    assert steps_in(tmp_path) == [6]


def test_later_checkpoints_can_be_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    for step in range(1, 6):
        store.save(step, write_state(str(step)))
    (tmp_path / ".tmp_step_000004" / "left").mkdir(parents=True)
    store.remove_after(3)
    assert sorted(os.listdir(tmp_path)) == ["step_000001", "step_000002", "step_000003"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - free, free))
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, write_state("x" * 3000))  # There is none to compare with.

    def never(path: Path) -> None:
        raise AssertionError("written")

    with pytest.raises(errors.DiskFullError, match=r"10 bytes = 0\.0 MiB are free .* step_000001, takes 3\d\d\d bytes"):
        store.save(2, never)
    assert sorted(os.listdir(tmp_path)) == ["step_000001"]
    free = 4000
    store.save(2, write_state("again"))
    assert store.latest().step == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, code: int) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, write_state("good"))

    def fail(path: Path) -> None:
        (path / "state").write_text("half")
        raise OSError(code, "full", str(path / "state"))

    with pytest.raises(OSError) as caught:
        store.save(2, fail)
    translated = errors.as_tidegate_error(caught.value)
    assert isinstance(translated, errors.DiskFullError)
    assert (store.latest().step, (store.latest().path / "state").read_text()) == (1, "good")
    assert list(tmp_path.glob(".tmp*")) == []


def caused_by(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), True),
        (SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"), False),
        (caused_by(RuntimeError("not saved"), OSError(errno.ENOSPC, "full")), True),
        (caused_by(RuntimeError("not saved"), OSError(errno.EIO, "broken")), False),
        (ValueError("(os error 28)"), False),
    ],
)
def test_a_full_disk_is_seen_behind_a_librarys_error(error: Exception, is_full: bool) -> None:
    translated = errors.as_tidegate_error(error)
    assert isinstance(translated, errors.DiskFullError) if is_full else translated is None


def test_a_full_disk_that_was_dealt_with_is_no_cause() -> None:
    other = RuntimeError("another matter")
    other.__context__ = OSError(errno.ENOSPC, "full")
    assert isinstance(errors.as_tidegate_error(other), errors.DiskFullError)
    other.__suppress_context__ = True  # As `raise ... from None` leaves it.
    assert errors.as_tidegate_error(other) is None


def test_kill_inside_a_save_leaves_the_last_good(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, write_state("good"))
    code = (
        "import os, sys, pathlib; from training_core.checkpoint import CheckpointStore;"
        "write = lambda p: ((p / 'state').write_text('half'), os.kill(os.getpid(), 9));"
        "CheckpointStore(pathlib.Path(sys.argv[1]), 1).save(2, write)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert store.latest().step == 1
    store.save(2, write_state("again"))
    assert sorted(os.listdir(tmp_path)) == ["step_000002"]


def test_metrics_refuse_nan_and_truncate(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        writer.write(step, {"a": step})
    with pytest.raises(ValueError, match="finite"):
        writer.write(4, {"a": float("nan")})
    with writer.path.open("a") as stream:
        stream.write('{"step": 4, "a"')
    assert [r["step"] for r in read_metrics(writer.path)] == [1, 2, 3]
    writer.truncate_after(2)
    assert writer.path.read_text() == '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'


def test_metric_sums_weigh_by_count() -> None:
    sums = MetricSums()
    sums.add("m", 900.0, 900)
    sums.add("m", 0.0, 100)
    sums.add("empty", 0.0, 0)
    assert sums.means() == {"m": 0.9}


def test_digests_see_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"w")
    (tmp_path / "a" / "config.json").write_text("{}")
    one, weights = tree_digest(tmp_path / "a"), weights_digest(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{ }")
    assert tree_digest(tmp_path / "a") != one
    assert weights_digest(tmp_path / "a") == weights
    with pytest.raises(DigestMismatchError, match="expected sha256"):
        verify_digest(tmp_path / "a", one, "model")
    with pytest.raises(ArtifactError, match="does not exist"):
        path_digest(tmp_path / "b")


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "old")
    with pytest.raises(ValueError):
        write_json(tmp_path / "f", {"x": float("nan")})
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_errors_survive_pickling_and_carry_codes() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TidegateError)]
    assert len(classes) > 10
    for cls in classes:
        again = pickle.loads(pickle.dumps(cls("what, where, next")))
        assert (type(again), str(again)) == (cls, "what, where, next")
        assert errors.error_class(cls.__name__) is cls
    assert errors.error_class("EXIT_OK") is errors.TidegateError


def test_registry_refuses_twice_and_hints() -> None:
    registry: Registry[int] = Registry("loss")
    registry.add("grpo", 1)
    with pytest.raises(ValueError, match="registered already"):
        registry.add("grpo", 2)
    with pytest.raises(ConfigurationError, match="Did you mean 'grpo'"):
        registry["grop"]


def test_batches_use_every_item_once_an_epoch() -> None:
    seen = [i for step in range(5) for i in batch_indices(step, 4, 10, seed=1, purpose="order")]
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert derive_seed(1, "a", 12) != derive_seed(1, "a", 1, 2)
