"""What `tidegate` refuses: exit codes, messages, and one JSON object whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_stages.chain import run

from training_core.errors import ConfigurationError

CONFIG = "pipeline.yaml"
UNWRITABLE = "/proc/tidegate"
"""Where not even the super-user can make a folder."""


def write_odd_configs(folder: Path) -> None:
    (folder / "binary.yaml").write_bytes(bytes(range(128, 256)))
    (folder / "control.yaml").write_text("name: a\0b\n")
    (folder / "empty.yaml").write_text("")
    (folder / "deep.yaml").write_text("name: " + "[" * 5000)
    (folder / "text.yaml").write_text("hello\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "model"], "model"),
        (["plan", "binary.yaml"], "binary.yaml"),
        (["plan", "control.yaml"], "control.yaml"),
        (["plan", "empty.yaml"], "empty.yaml"),
        (["plan", "deep.yaml"], "deep.yaml: brackets or indentation are nested too deeply"),
        (["plan", "text.yaml"], "text.yaml:1"),
        (["plan", "x" * 300], "x" * 300),
        (["plan", CONFIG, "--root", ""], "root is empty"),
        (["plan", CONFIG, "--root", "x" * 300], "cannot be used: [Errno 36] File name too long"),
        (["plan", CONFIG, "--root", "~no-such-user/x"], "cannot be used"),
        (["plan", CONFIG, "--root", "pipeline.yaml/x"], "pipeline.yaml is a file"),
        (["plan", CONFIG, "--root", "link"], "link is a broken link"),
        (["run", CONFIG, "--root", UNWRITABLE], f"root {UNWRITABLE} cannot be written"),
        (["show", ""], "the name of the run is empty"),
        (["show", "  "], "the name of the run is empty"),
        (["report", ""], "the name of the run is empty"),
        (["show", "nobody"], "no run 'nobody'"),
        (["show", "--root", "typo"], "root {here}/typo does not exist"),
        (["report", "--root", "typo"], "root {here}/typo does not exist"),
        (["ui", "--root", "typo"], "root {here}/typo does not exist"),
        (["ui", "--root", ""], "root is empty"),
        (["list", "--root", "~no-such-user"], "cannot be used"),
        (["ui", "--mlflow-port", "99999"], "Invalid value for '--mlflow-port'"),
        (["ui", "--mlflow-port", "0"], "Invalid value for '--mlflow-port'"),
        (["ui", "--prefect-port", "-1"], "Invalid value for '--prefect-port'"),
        (["ui", "--prefect-port", "http"], "Invalid value for '--prefect-port'"),
        (["ui", "--prefect-port", "5000"], "--mlflow-port and --prefect-port are both 5000"),
        (["report", "-o", "model"], "--output model is a folder. Name a file, for example model/report.html"),
        (["report", "-o", ""], "is a folder"),
        (["report", "-o", "nowhere/report.html"], "nowhere, which is no folder"),
        (["report", "-o", "pipeline.yaml/report.html"], "pipeline.yaml, which is no folder"),
        (["report", "-o", "/proc/report.html"], "cannot be written in /proc"),
        (["report", "-o", "/dev/null"], "is no plain file"),
        (["report", "-o", "x" * 300 + ".html"], "File name too long"),
        (["report", "-o", CONFIG], "--output pipeline.yaml must end in .html or .htm"),
        (["plan", CONFIG, "--root", "a\udcff"], "is not UTF-8 text"),
        (["plan", CONFIG, "--set", "name=a\udcff"], "is not UTF-8 text"),
        (["show", "--root", "a\udcff"], "is not UTF-8 text"),
        (
            ["plan", CONFIG, "--set", "checkpoint.source=hub:a/b"],
            "--set checkpoint.source: checkpoint.source 'hub:a/b'",
        ),
        (["plan", CONFIG, "--set", "checkpoint.source=hub:a/b"], "40 hex digits; none is given"),
        (["plan", CONFIG, "--set", "data.preferences=[]"], "data.preferences: []: must have at least one entry"),
    ],
)
def test_a_usage_error_is_exit_2_and_makes_nothing(scripted, here, monkeypatch, arguments, text) -> None:  # type: ignore[no-untyped-def]
    import tasks.report

    monkeypatch.setattr(tasks.report, "render", lambda page: "page")  # Scripted stages leave no tables to show.
    monkeypatch.setattr(tasks.report, "_data_section", lambda stage: None)
    write_odd_configs(scripted.path)
    (scripted.path / "link").symlink_to("nowhere-at-all")
    (scripted.root / "runs" / "r").mkdir(parents=True)
    (scripted.root / "runs" / "r" / "run.json").write_text(json.dumps({"run_id": "r", "config": {}, "inputs": {}}))
    before = sorted(scripted.path.rglob("*"))
    code, _, errors = here(*arguments)
    assert code == 2, errors
    assert text.replace("{here}", str(scripted.path)) in errors
    assert "internal error" not in errors
    assert sorted(scripted.path.rglob("*")) == before
    # The same, for a machine.
    if arguments[0] not in ("ui", "report"):
        code, output, _ = here(*arguments, "--json")
        error = json.loads(output)["error"]
        assert (code, error["type"], error["exit_code"]) == (2, "ConfigurationError", 2)
        assert text.replace("{here}", str(scripted.path)) in error["message"]


def test_a_root_in_the_home_folder_is_the_same_for_all_commands(scripted, here, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from flows.config import load_pipeline, resolve_root

    monkeypatch.setenv("HOME", str(scripted.path))
    wanted = scripted.path / "elsewhere"
    assert load_pipeline([scripted.config], root="~/elsewhere").root == str(wanted)
    assert resolve_root("~/elsewhere") == wanted
    monkeypatch.setenv("TIDEGATE_ROOT", "")  # What a script leaves behind for a variable that it does not know.
    assert resolve_root(None) == scripted.path / ".tidegate"
    assert load_pipeline([scripted.config]).root == ".tidegate"
    with pytest.raises(ConfigurationError, match="root is empty"):
        load_pipeline([scripted.config], ["root=''"])


def test_a_list_over_a_root_that_is_not_there_is_empty(scripted, here) -> None:  # type: ignore[no-untyped-def]
    code, output, _ = here("list")
    assert code == 0
    assert output.startswith("no runs: root ")
    assert json.loads(here("list", "--json")[1]) == {"runs": []}
    scripted.root.mkdir()
    assert here("list")[1].startswith("no runs under")
    assert "no runs under" in here("show")[2]


DAMAGE = {
    "cut": '{"run_id": "',
    "binary": "\x00\x01",
    "list": "[]",
    "other run": '{"run_id": "someone", "config": {}, "inputs": {}}',
    "gate": '{"run_id": "damaged", "config": {}, "inputs": {}, "gate": {"guards": "none"}}',
    "model": '{"run_id": "damaged", "config": {}, "inputs": {}, "model": {}}',
    "time": '{"run_id": "damaged", "config": {}, "inputs": {}, "updated": 1e30}',
    "no number": '{"run_id": "damaged", "config": {}, "inputs": {}, "updated": NaN}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", [*DAMAGE, "folder"])
def test_a_damaged_run_hides_no_other(scripted, here, kind: str) -> None:  # type: ignore[no-untyped-def]
    whole = run(scripted)
    damaged = scripted.root / "runs" / "damaged" / "run.json"
    damaged.parent.mkdir()
    if kind == "folder":
        damaged.mkdir()
    else:
        damaged.write_text(DAMAGE[kind])
    os.utime(scripted.root / "runs" / whole.run_id / "run.json", (1, 1))

    code, output, errors = here("list")
    assert code == 0, errors
    assert [line.split()[:2] for line in output.splitlines()[1:3]] == [
        ["damaged", "Damaged"],
        [whole.run_id, "Completed"],
    ]
    assert f"damaged: {damaged} is damaged" in output
    rows = json.loads(here("list", "--json")[1])["runs"]
    assert [(row["run_id"], row["state"]) for row in rows] == [("damaged", "Damaged"), (whole.run_id, "Completed")]
    assert str(damaged) in rows[0]["error"]
    assert rows[0]["directory"] == str(damaged.parent)
    assert rows[1]["error"] is None

    assert here("show", whole.run_id)[0] == 0
    for name in ("damaged", "latest"):
        code, output, errors = here("show", name, "--json")
        assert (code, json.loads(output)["error"]["type"]) == (4, "ArtifactError")
        assert str(damaged) in errors
        assert "Delete it" in errors


def test_a_run_that_others_may_not_read_says_so(scripted, here, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.runs

    def read_json(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    whole = run(scripted)
    monkeypatch.setattr(tasks.runs, "read_json", read_json)
    code, _, errors = here("show", whole.run_id)
    assert code == 4
    assert "run.json cannot be read: Permission denied" in errors
    assert "Delete it" not in errors


def test_files_that_may_not_be_written_are_no_bug(capsys) -> None:  # type: ignore[no-untyped-def]
    from flows.commands.errors import failed

    answer = failed(PermissionError(13, "Permission denied", "/somewhere/lock"), {"run_id": None})
    assert answer.exit_code == 2
    assert answer.value is not None
    assert answer.value["run_id"] is None
    assert answer.value["error"]["type"] == "ConfigurationError"
    assert "/somewhere/lock: Permission denied" in capsys.readouterr().err
    assert failed(PermissionError(1, "not your process")).exit_code == 70  # No file: somebody has to look at it.


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [(KeyboardInterrupt(), 130, "Interrupted"), (RuntimeError("surprise"), 70, "RuntimeError")],
)
def test_with_json_there_is_one_object_however_a_command_ends(here, monkeypatch, error, code, kind) -> None:  # type: ignore[no-untyped-def]
    import flows.commands.show

    def fail(*_arguments: Any) -> None:
        raise error

    monkeypatch.setattr(flows.commands.show, "load_runs", fail)
    found, output, _ = here("list", "--json")
    assert found == code
    found = json.loads(output)["error"]
    assert found.keys() == {"type", "message", "exit_code"}
    assert (found["type"], found["exit_code"]) == (kind, code)
    assert here("list")[1] == ""


def test_what_libraries_print_stays_out_of_the_object(workspace) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import os, flows.commands.show as show; from flows.cli import main\n"
        "show.load_runs = lambda root: (print('chatter'), os.system('echo more'), [])[2]\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "list", "--json"], env=workspace.environment, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {"runs": []}
    assert "chatter" in done.stderr
    assert "more" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "--json"], env=workspace.environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["message"] == "Missing argument 'CONFIG...'."


@pytest.mark.parametrize("command", ["run", "ui"])
def test_a_full_disk_is_found_before_a_server_starts(scripted, here, monkeypatch, command: str) -> None:  # type: ignore[no-untyped-def]
    import flows.commands.run
    import flows.commands.ui
    import tasks.roots

    def start(*_arguments: Any, **_named: Any) -> None:
        pytest.fail("a server was started")

    for module in (flows.commands.run, flows.commands.ui):
        monkeypatch.setattr(module, "prefect_server", start)
    monkeypatch.setattr(flows.commands.ui, "running_server", start)
    monkeypatch.setattr(tasks.roots, "free_bytes", lambda path: tasks.roots.MIN_FREE_BYTES - 1)
    scripted.root.mkdir()
    code, output, errors = here(*(["run", CONFIG, "--json"] if command == "run" else ["ui"]))
    assert code == 75
    assert f"no space left for root {scripted.root}" in errors
    assert list(scripted.root.iterdir()) == []
    if command == "run":
        view = json.loads(output)
        assert (view["state"], view["stages"], view["error"]["type"]) == ("Failed", [], "DiskFullError")


def test_what_a_full_server_makes_of_a_run_is_told_as_a_full_disk(scripted, here, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import contextlib

    import flows.commands.run
    import flows.post_training
    from training_core.errors import DiskFullError

    class FullServer:
        def wait_until_ready(self) -> None:
            """It came up."""

        def met_full_disk(self) -> bool:
            return True

        def failure(self, what: str) -> DiskFullError:
            return DiskFullError(f"the server {what}: no space left")

    def answer_with_500(config: Any) -> None:
        raise RuntimeError("500 Internal Server Error")

    monkeypatch.setattr(flows.commands.run, "use_home", lambda root: None)
    monkeypatch.setattr(flows.commands.run, "prefect_server", lambda root: contextlib.nullcontext(FullServer()))
    monkeypatch.setattr(flows.post_training, "post_training", answer_with_500)
    code, _, errors = here("run", CONFIG)
    assert code == 75
    assert "the server cannot write: no space left" in errors
    monkeypatch.setattr(FullServer, "met_full_disk", lambda self: False)
    assert here("run", CONFIG)[0] == 70


def test_a_report_on_a_full_disk_names_the_place(scripted, here, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import tasks.report

    def fill(*_arguments: Any, **_named: Any) -> None:
        raise OSError(28, "No space left on device")

    whole = run(scripted)
    monkeypatch.setattr(tasks.report, "write_report", fill)
    code, _, errors = here("report", whole.run_id)
    assert code == 75
    assert f"free at {scripted.root / 'runs' / whole.run_id}" in errors
