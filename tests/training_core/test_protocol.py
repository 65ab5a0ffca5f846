"""The stage protocol: digests, locks, checkpoints, child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from training_core.errors import ArtifactError, StageLockedError
from training_core.metrics import MetricsWriter, read_metrics
from training_core.protocol.atomic import read_json, write_json
from training_core.protocol.child import StageEntry, run_stage_here
from training_core.protocol.digests import path_digest
from training_core.protocol.directory import StageDirectory
from training_core.protocol.lock import directory_lock, is_locked
from training_core.records import Artifact, StageSpec

STAGE_CODE = '''
"""A scripted stage: what it does stands in its config."""
import os, sys, time
from training_core.records import StageOutcome

def run(context):
    what = context.spec.config["do"]
    if what == "write":
        context.new_output("answer.txt").write_text(context.input_path("text").read_text().upper())
        context.metrics.write(1, {"a/b": 1.0})
        return StageOutcome(outputs={"answer.txt": "outputs/answer.txt"}, summary={"n": 1})
    if what == "disk_full":
        raise OSError(28, "No space left on device", "somewhere")
    if what == "bug":
        raise RuntimeError("a bug")
    if what == "sleep":
        print("sleeping", flush=True)
        time.sleep(60)
    if what.startswith("catch"):
        # As libraries do that take any trouble for a bad row.
        try:
            print("sleeping", flush=True)
            time.sleep(60)
        except (Exception if what == "catch_exception" else BaseException):
            if what == "catch_and_fail":
                raise ValueError("a bad row")
        context.new_output("rows").write_text("one is bad")
        return StageOutcome(outputs={"rows": "outputs/rows"})
    if what == "loop":
        store = context.checkpoints()
        last = store.latest()
        step = last.step if last else 0
        context.metrics.truncate_after(step)
        with context.stop.deferred():
            while step < context.spec.config["steps"]:
                step += 1
                time.sleep(0.05)
                context.metrics.write(step, {"value": step * 0.5})
                context.progress(step, context.spec.config["steps"])
                if context.stop.requested or step % 2 == 0:
                    store.save(step, lambda path: (path / "state").write_text(str(step)))
                if context.stop.requested:
                    context.stop.raise_preempted(f"saved step {step}")
        context.new_output("state").write_text(str(step))
        return StageOutcome(outputs={"state": "outputs/state"})
'''
MAIN_CODE = """
import sys
from training_core.protocol.child import StageEntry, main
sys.exit(main(sys.argv[1:], {"scripted": StageEntry("scripted_stage", 1)}))
"""


@pytest.fixture
def stage_home(tmp_path: Path) -> Path:
    (tmp_path / "scripted_stage.py").write_text(STAGE_CODE)
    (tmp_path / "scripted_main.py").write_text(MAIN_CODE)
    return tmp_path


def make_spec(config: dict, inputs: dict[str, Path] | None = None) -> StageSpec:
    artifacts = {k: Artifact(path=str(p), sha256=path_digest(p)) for k, p in (inputs or {}).items()}
    return StageSpec(stage="scripted", stage_version=1, config=config, inputs=artifacts, seed=3)


def start(home: Path, spec: StageSpec, **kwargs) -> tuple[subprocess.Popen, StageDirectory]:
    directory = StageDirectory.of_spec(home, spec)
    directory.prepare(spec)
    command = [sys.executable, str(home / "scripted_main.py"), str(directory.spec_path)]
    environment = {**os.environ, "PYTHONPATH": str(home), **kwargs.pop("env", {})}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **kwargs)
    return process, directory


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_spec_hash_depends_on_content_not_on_place(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x")
    b.write_text("x")
    assert make_spec({"k": 1}, {"t": a}).spec_hash == make_spec({"k": 1}, {"t": b}).spec_hash
    b.write_text("y")
    assert make_spec({"k": 1}, {"t": a}).spec_hash != make_spec({"k": 1}, {"t": b}).spec_hash
    assert make_spec({"k": 1}).spec_hash != make_spec({"k": 2}).spec_hash


def test_spec_round_trip_keeps_the_hash(tmp_path: Path) -> None:
    spec = make_spec({"learning_rate": 1e-6, "list": [1, 2.5, None, "ä"]})
    spec.save(tmp_path / "spec.json")
    assert StageSpec.load(tmp_path / "spec.json").spec_hash == spec.spec_hash


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stage": 1}'])
def test_a_damaged_spec_is_written_anew(tmp_path: Path, content: str) -> None:
    spec = make_spec({"k": 1})
    directory = StageDirectory.of_spec(tmp_path, spec)
    directory.prepare(spec)
    directory.spec_path.write_text(content)
    directory.prepare(spec)
    assert StageSpec.load(directory.spec_path) == spec


def test_stage_writes_result_last_and_is_reused(stage_home: Path) -> None:
    text = stage_home / "in.txt"
    text.write_text("hello")
    spec = make_spec({"do": "write"}, {"text": text})
    process, directory = start(stage_home, spec)
    assert process.wait(30) == 0, process.stderr.read()
    result = directory.result()
    assert (directory.path / result.outputs["answer.txt"].path).read_text() == "HELLO"
    assert result.spec_hash == spec.spec_hash
    assert result.peak_rss_bytes > 1 << 20
    before = directory.result_path.read_bytes()
    process, _ = start(stage_home, spec)
    assert process.wait(30) == 0
    assert directory.result_path.read_bytes() == before
    directory.verify_outputs(result)
    (directory.path / "outputs" / "answer.txt").write_text("changed")
    with pytest.raises(ArtifactError, match="changed after the stage wrote it"):
        directory.verify_outputs(result)
    (directory.path / "outputs" / "answer.txt").unlink()
    with pytest.raises(ArtifactError, match=f"is missing. Delete the directory {directory.path} to compute it again"):
        directory.verify_outputs(result)


@pytest.mark.parametrize(("what", "code", "name"), [("disk_full", 75, "DiskFullError"), ("bug", 70, "RuntimeError")])
def test_failures_become_exit_codes(stage_home: Path, what: str, code: int, name: str) -> None:
    process, directory = start(stage_home, make_spec({"do": what}))
    assert process.wait(30) == code
    error = read_json(directory.error_path)
    assert (error["type"], error["exit_code"]) == (name, code)
    assert directory.result() is None


def test_changed_input_is_refused(stage_home: Path) -> None:
    text = stage_home / "in.txt"
    text.write_text("hello")
    spec = make_spec({"do": "write"}, {"text": text})
    text.write_text("jello")
    process, directory = start(stage_home, spec)
    assert process.wait(30) == 3
    assert read_json(directory.error_path)["type"] == "DigestMismatchError"


def test_wrong_version_and_no_spec_are_usage_errors(stage_home: Path) -> None:
    spec = make_spec({"do": "write"}).model_copy(update={"stage_version": 2})
    process, _ = start(stage_home, spec)
    assert process.wait(30) == 2
    command = [sys.executable, str(stage_home / "scripted_main.py"), str(stage_home / "none.json")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(stage_home)}, check=False).returncode == 2


@pytest.mark.parametrize("what", ["sleep", "catch_exception", "catch_everything", "catch_and_fail"])
def test_sigterm_outside_a_loop_stops_at_once(stage_home: Path, what: str) -> None:
    process, directory = start(stage_home, make_spec({"do": what}))
    assert process.stdout.readline() == b"sleeping\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert read_json(directory.error_path)["type"] == "PreemptedError"
    assert directory.result() is None


def test_sigterm_during_the_report_of_a_failure_keeps_the_exit_code(stage_home: Path) -> None:
    patch = """
import os, signal
from training_core.protocol import child
report = child.report_failure
child.report_failure = lambda *a: (os.kill(os.getpid(), signal.SIGTERM), report(*a))[1]
"""
    (stage_home / "scripted_main.py").write_text(patch + MAIN_CODE)
    process, directory = start(stage_home, make_spec({"do": "bug"}))
    assert process.wait(30) == 70
    assert read_json(directory.error_path)["type"] == "RuntimeError"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_continued_equals_never_stopped(stage_home: Path, how: signal.Signals) -> None:
    spec = make_spec({"do": "loop", "steps": 12})
    whole, whole_directory = start(stage_home, spec.model_copy(update={"seed": 4}))
    process, directory = start(stage_home, spec)
    wait_for(lambda: len(read_metrics(directory.metrics_path)) >= 5)
    process.send_signal(how)
    assert process.wait(10) == (75 if how == signal.SIGTERM else -signal.SIGKILL)
    process, _ = start(stage_home, spec)
    assert process.wait(30) == 0, process.stderr.read()
    assert whole.wait(30) == 0
    assert directory.metrics_path.read_bytes() == whole_directory.metrics_path.read_bytes()
    assert directory.result().outputs == whole_directory.result().outputs
    assert directory.result().attempts == 2
    assert not directory.checkpoints_path.exists()


def test_child_dies_with_its_parent(stage_home: Path) -> None:
    read_end, write_end = os.pipe()
    process, directory = start(
        stage_home,
        make_spec({"do": "sleep"}),
        env={"TIDEGATE_PARENT_PIPE": str(read_end), "TIDEGATE_GRACE_SECONDS": "1"},
        pass_fds=(read_end,),
        start_new_session=True,
    )
    os.close(read_end)
    assert process.stdout.readline() == b"sleeping\n"
    os.close(write_end)
    assert process.wait(10) == 75
    assert directory.result() is None


def test_two_processes_never_share_a_directory(stage_home: Path) -> None:
    spec = make_spec({"do": "loop", "steps": 100})
    first, directory = start(stage_home, spec)
    wait_for(lambda: directory.metrics_path.exists())
    assert is_locked(directory.path)
    second, _ = start(stage_home, spec)
    assert second.wait(30) == 75
    message = second.stderr.read().decode()
    assert str(first.pid) in message
    assert "StageLockedError" in message
    assert not directory.error_path.exists()  # It would be the first one's, who has none.
    first.kill()
    first.wait(10)
    assert not is_locked(directory.path)
    with directory_lock(directory.path):  # A dead owner is taken over.
        pass


def test_owner_on_another_host_counts_while_it_beats(tmp_path: Path) -> None:
    write_json(tmp_path / "lock.json", {"pid": 1, "host": "elsewhere", "heartbeat": time.time()})
    with pytest.raises(StageLockedError, match="process 1 on elsewhere"), directory_lock(tmp_path):
        pass
    assert read_json(tmp_path / "lock.json")["pid"] == 1
    assert is_locked(tmp_path)
    write_json(tmp_path / "lock.json", {"pid": 1, "host": "elsewhere", "heartbeat": time.time() - 1000})
    with directory_lock(tmp_path):
        assert read_json(tmp_path / "lock.json")["pid"] == os.getpid()


def test_a_lock_that_is_only_probed_is_waited_for(tmp_path: Path) -> None:
    probe = FileLock(str(tmp_path / "lock"), thread_local=False)
    probe.acquire()
    threading.Timer(0.2, probe.release).start()
    with directory_lock(tmp_path):
        assert not probe.is_locked


def test_outputs_and_metrics_reach_the_disk_before_what_relies_on_them(
    stage_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    monkeypatch.syspath_prepend(str(stage_home))
    (stage_home / "in.txt").write_text("hello")
    spec = make_spec({"do": "write"}, {"text": stage_home / "in.txt"})
    directory = StageDirectory.of_spec(stage_home, spec)
    directory.prepare(spec)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run_stage_here(spec, directory, {"scripted": StageEntry("scripted_stage", 1)})
    finally:
        signal.signal(signal.SIGTERM, handler)
    places = [
        synced.index(path.stat().st_ino) for path in (directory.outputs_path / "answer.txt", directory.result_path)
    ]
    assert places == sorted(places)
    assert directory.outputs_path.stat().st_ino in synced
    MetricsWriter(directory.metrics_path).truncate_after(0)
    assert directory.metrics_path.stat().st_ino in synced


def test_run_stage_here_refuses_unknown_input(stage_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(stage_home))
    spec = make_spec({"do": "write"})
    directory = StageDirectory.of_spec(stage_home, spec)
    directory.prepare(spec)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ArtifactError, match="needs input 'text'"):
            run_stage_here(spec, directory, {"scripted": StageEntry("scripted_stage", 1)})
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_log_is_json_lines(stage_home: Path) -> None:
    text = stage_home / "in.txt"
    text.write_text("x")
    process, directory = start(stage_home, make_spec({"do": "write"}, {"text": text}))
    assert process.wait(30) == 0
    rows = [json.loads(line) for line in directory.log_path.read_text().splitlines()]
    assert any("is complete" in row["message"] for row in rows)


def test_a_directory_that_may_only_be_read_is_judged_by_its_heartbeat(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from training_core.protocol import lock

    class Unwritable(lock.FileLock):
        def acquire(self, *_arguments: object, **_named: object) -> None:
            raise PermissionError(13, "Permission denied", str(tmp_path / "lock"))

    with lock.directory_lock(tmp_path):
        monkeypatch.setattr(lock, "FileLock", Unwritable)
        assert lock.is_locked(tmp_path)
        monkeypatch.setattr(lock, "STALE_AFTER_SECONDS", 0.0)
        assert not lock.is_locked(tmp_path)
