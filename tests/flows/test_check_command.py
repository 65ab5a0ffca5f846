"""`tidegate check`: one object, exit codes, two versions, a fixed file, a page without text."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_checks.processes import SMALL_BYTES
from flows.cli import app
from flows.commands.errors import TerminatedError, exit_code_of, signals_unwind

WORDS = ("stone", "cloud", "river", "grass", "paper", "cheese", "window", "ladder", "butter", "garden", "violin")


def pairs(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Clean pairs of different prompts; neither side is longer on average."""
    generator = random.Random(seed)

    def text(count: int) -> str:
        return " ".join(generator.choice(WORDS) + generator.choice(WORDS) for _ in range(count))

    return [
        {
            "prompt": f"What is {text(3)}?",
            "chosen": f"It is {text(generator.randint(3, 9))}.",
            "rejected": f"It is {text(generator.randint(3, 9))}.",
        }
        for _ in range(number)
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = exit_code_of(app, ["check", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_one_object_that_accounts_for_every_row(tmp_path: Path, capsys: Any) -> None:
    rows = [*pairs(150), {"prompt": "a", "chosen": " ", "rejected": "b"}, "{broken"]
    rows += [{**pairs(1, 5)[0], "margin": 0}]
    path = write(tmp_path / "pairs.jsonl", rows)
    code, found, _ = run(capsys, str(path), "--ties", "drop")
    assert code == 0
    assert (found["format"], found["rows"], found["kept"]) == ("pairs", 153, 150)
    assert found["quarantined"] == {"malformed_json": 1, "empty_response": 1}
    assert found["dropped"] == {"tie": 1}
    assert found["rows"] == found["kept"] + sum(found["quarantined"].values()) + sum(found["dropped"].values())
    assert found["verdict"] == "warn"
    assert all(set(check) == {"name", "severity", "value", "threshold", "unit", "verdict"} for check in found["checks"])
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdicts["empty_fraction"] == verdicts["malformed_fraction"] == "warn"
    assert verdicts["too_long_fraction"] == "skipped"
    assert len(found["fingerprint"]) == 64


def test_data_that_is_not_fit_exits_3_with_reasons_on_standard_error(tmp_path: Path, capsys: Any) -> None:
    rows = [*pairs(120), *({"prompt": f"b{i}", "chosen": "", "rejected": "x"} for i in range(30))]
    path = write(tmp_path / "pairs.jsonl", rows)
    code, found, _ = run(capsys, str(path))
    assert (code, found["verdict"]) == (3, "fail")
    assert exit_code_of(app, ["check", str(path)]) == 3
    told = capsys.readouterr()
    assert "verdict: FAIL" in told.out
    assert "30 of 150 rows (20.0%) empty_response, for example pairs.jsonl:121" in told.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing.jsonl"], 2, "does not exist"),
        (["pairs.jsonl", "--format", "nonsense"], 2, "nonsense"),
        (["pairs.jsonl", "--set", "min_pears=3"], 2, "min_pairs"),
        (["pairs.jsonl", "--set", "thresholds.no_such_check.fail=1"], 2, "no_such_check"),
        (["pairs.jsonl", "--ties", "perhaps"], 2, "ties"),
        (["prompts.jsonl", "--ties", "drop"], 2, "--ties"),
        (["empty.jsonl"], 3, "holds no rows"),
        (["odd.jsonl"], 3, "columns found"),
    ],
)
def test_errors(arguments: list[str], code: int, words: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pairs.jsonl", pairs(5))
    write(tmp_path / "prompts.jsonl", [{"prompt": "Where?"}, {"prompt": "When?"}])
    write(tmp_path / "odd.jsonl", [{"text": "a"}])
    (tmp_path / "empty.jsonl").touch()
    found, answer, _ = run(capsys, *arguments)
    assert found == code
    assert words in answer["error"]["message"]


def test_a_fixed_file_passes_with_nothing_left_out(tmp_path: Path, capsys: Any) -> None:
    good = pairs(120)
    rows = [*good, good[3], {"prompt": "a", "chosen": " ", "rejected": "b"}, {**good[7], "chosen": good[7]["rejected"]}]
    path = write(tmp_path / "pairs.jsonl", rows)
    code, found, _ = run(capsys, str(path), "--fix")
    fixed = tmp_path / "pairs.fixed.jsonl"
    assert (code, found["fixed"]) == (0, {"path": str(fixed), "rows": found["kept"]})
    written = [json.loads(line) for line in fixed.read_text().splitlines()]
    texts = [
        (row["prompt"][0]["content"], row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in written
    ]
    assert texts == [(row["prompt"], row["chosen"], row["rejected"]) for row in good]
    _, again, _ = run(capsys, str(fixed))
    assert (again["kept"], again["quarantined"], again["dropped"]) == (120, {}, {})
    code, answer, _ = run(capsys, str(path), "--fix")
    assert code == 2
    assert "would overwrite" in answer["error"]["message"]


def test_two_versions(tmp_path: Path, capsys: Any) -> None:
    old = pairs(130)
    new = [{**old[0], "chosen": "Another answer altogether."}, *old[1:120], *pairs(7, seed=9)]
    paths = [write(tmp_path / "old.jsonl", old), write(tmp_path / "new.jsonl", new[::-1])]
    _, found, _ = run(capsys, str(paths[1]), "--against", str(paths[0]))
    table = found["against"]["tables"]["preferences"]
    assert {name: table[name] for name in ("unchanged", "changed", "added", "removed")} == {
        "unchanged": 119,
        "changed": 1,
        "added": 7,
        "removed": 10,
    }
    assert found["against"]["drift"]["rows"] == {"new": 127, "old": 130, "difference": -3}
    _, same, _ = run(capsys, str(paths[0]), "--against", str(paths[0]))
    assert same["against"]["fingerprint"]["new"] == same["against"]["fingerprint"]["old"]
    assert exit_code_of(app, ["check", str(paths[1]), "--against", str(paths[0])]) == 0
    assert "119 unchanged" in capsys.readouterr().out


def test_the_page_holds_text_only_where_it_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    rows = [{**row, "prompt": row["prompt"] + " zanzibar"} for row in pairs(110)]
    private = {**pairs(1, 8)[0], "prompt": "Write to someone" + "@" + "zanzibar.example please"}
    path = write(tmp_path / "pairs.jsonl", [private, *rows])
    pages = {}
    for name, more in (("plain", []), ("text", ["--show-text"])):
        page = tmp_path / f"{name}.html"
        run(capsys, str(path), "--html", str(page), *more)
        pages[name] = page.read_text(encoding="utf-8")
    assert "zanzibar" not in pages["plain"]
    assert "pairs.jsonl:1<" in pages["plain"].replace("\n", "")
    assert pages["text"].count("zanzibar") > 5
    assert "zanzibar.example" not in pages["text"]


def test_output_is_a_new_folder_with_everything(tmp_path: Path, capsys: Any) -> None:
    path, folder = write(tmp_path / "pairs.jsonl", pairs(110)), tmp_path / "out"
    run(capsys, str(path), "--output", str(folder))
    assert {entry.name for entry in folder.iterdir()} >= {"train_pairs.parquet", "quarantine.parquet", "report"}
    assert {entry.name for entry in (folder / "report").iterdir()} == {
        *("report.json", "report.html", "DATASET_CARD.md", "great_expectations.json")
    }
    code, answer, _ = run(capsys, str(path), "--output", str(folder))
    assert (code, "is there already" in answer["error"]["message"]) == (2, True)


def test_prompts_steps_and_feedback_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    files = {
        "prompts": [{"prompt": row["prompt"]} for row in pairs(20)],
        "stepwise": [{"prompt": r["prompt"], "completions": ["a", "b"], "labels": [True, False]} for r in pairs(20)],
        "feedback": [
            {"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(pairs(120))
        ],
    }
    for name, rows in files.items():
        _, found, _ = run(capsys, str(write(tmp_path / f"{name}.jsonl", rows)))
        assert (found["format"], found["kept"]) == (name, len(rows))


def test_the_command_leaves_no_folder_behind(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(110))
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", "from flows.cli import main; main()", "check", str(path)]
    done = subprocess.run(command, env={"TMPDIR": str(tmp_path / "temporary"), "PATH": ""}, check=False)
    assert done.returncode == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_stopped_command_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM in the middle: exit code 75, no worker process, no folder."""
    path = write(tmp_path / "pairs.jsonl", pairs(1000) * 250)  # Enough for worker processes.
    assert path.stat().st_size > SMALL_BYTES
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", "from flows.cli import main; main()", "check", str(path)]
    environment = {"TMPDIR": str(temporary), "PATH": "", "HOME": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    watched = psutil.Process(process.pid)
    for _ in range(600):
        if any(temporary.glob("tidegate-check-*/new/work/*.features.parquet")):
            break
        time.sleep(0.05)
    workers = watched.children(recursive=True)
    assert workers
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert (process.returncode, "stopped by SIGTERM" in told) == (75, True)
    assert list(temporary.iterdir()) == []
    assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.parametrize("page", ["pairs.jsonl", "folder.html", "nowhere/page.html"])
def test_a_page_overwrites_nothing_but_a_page(page: str, tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(120))
    (tmp_path / "folder.html").mkdir()
    before = path.read_bytes()
    code, answer, _ = run(capsys, str(path), "--html", str(tmp_path / page))
    assert (code, path.read_bytes()) == (2, before)
    assert "--html" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "{here}/missing.jsonl"], "missing.jsonl does not exist"),
        (["--tokenizer", "{here}/nowhere"], "nowhere is no folder"),
        (["--set", "preferences=x"], "--set preferences: the data are FILE"),
        (["--set", "data.min_pears=20"], "min_pears"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(
    arguments: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(120))
    code, answer, _ = run(capsys, str(path), *(argument.format(here=tmp_path) for argument in arguments))
    assert code == 2
    assert message in answer["error"]["message"]


def test_names_of_settings_as_messages_write_them(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs(60))
    assert run(capsys, str(path))[0] == 3
    assert run(capsys, str(path), "--set", "data.min_pairs=20")[0] == 0


def test_a_fixed_file_keeps_people_and_other_columns(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {**row, "annotator": name, "note": f"n{number}"}
        for number, row in enumerate(pairs(60))
        for name in ("ada", "grace", "joan")
    ]
    path = write(tmp_path / "pairs.jsonl", rows)
    _, found, _ = run(capsys, str(path), "--fix")
    assert (found["kept"], found["fixed"]["rows"]) == (180, 180)
    _, again, _ = run(capsys, found["fixed"]["path"])
    assert (again["kept"], again["verdict"]) == (180, found["verdict"])
    first = json.loads((tmp_path / "pairs.fixed.jsonl").read_text().splitlines()[0])
    assert (first["annotator"], first["note"]) == ("ada", "n0")


def stopped(number: signal.Signals, raised: Exception) -> None:
    """Get a signal inside a library that makes an error of its own of it."""
    with signals_unwind():
        try:
            signal.raise_signal(number)
        except BaseException:
            raise raised from None


@pytest.mark.parametrize("raised", [RuntimeError("a library was interrupted"), OSError("Directory not empty")])
def test_what_a_library_makes_of_a_signal_is_still_a_signal(raised: Exception) -> None:
    with pytest.raises(TerminatedError):
        stopped(signal.SIGTERM, raised)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job may have it ignored.
    try:
        with pytest.raises(KeyboardInterrupt):
            stopped(signal.SIGINT, raised)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_each_edited_row_is_one_change(tmp_path: Path, capsys: Any) -> None:
    """Many rows of one prompt with one answer in common: each is matched with one."""
    rows = [{"prompt": "Which of these?", "chosen": f"Number {n}.", "rejected": "None."} for n in range(40)]
    old = write(tmp_path / "old.jsonl", [*pairs(120), *rows])
    new = write(
        tmp_path / "new.jsonl", [*pairs(120), *({**row, "chosen": f"{row['chosen']} Yes."} for row in rows[:-3])]
    )
    _, found, _ = run(capsys, str(new), "--against", str(old))
    table = found["against"]["tables"]["preferences"]
    counts = {name: table[name] for name in ("unchanged", "changed", "added", "removed")}
    assert counts == {"unchanged": 120, "changed": 37, "added": 0, "removed": 3}


def test_a_folder_of_shards_is_one_data_set(tmp_path: Path, capsys: Any) -> None:
    rows = pairs(150)
    shards = tmp_path / "shards" / "data"
    shards.mkdir(parents=True)
    write(shards / "train-00000.jsonl", rows[:80])
    write(shards / "train-00001.jsonl", [*rows[80:], rows[3]])
    (tmp_path / "shards" / "README.md").write_text("Pairs.")
    _, whole, _ = run(capsys, str(write(tmp_path / "whole.jsonl", rows)))
    _, found, _ = run(capsys, str(tmp_path / "shards"), "--fix")
    assert (found["format"], found["rows"], found["kept"]) == ("pairs", 151, 150)
    assert found["quarantined"] == {"duplicate_pair": 1}
    assert found["fixed"] == {"path": str(tmp_path / "shards.fixed.jsonl"), "rows": 150}
    assert run(capsys, found["fixed"]["path"])[1]["fingerprint"] == whole["fingerprint"]
    (shards / "more.csv").write_text("prompt,chosen,rejected\n")
    assert run(capsys, str(tmp_path / "shards"))[0] == 2
