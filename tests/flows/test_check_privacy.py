"""`tidegate check` shows nothing of a row: in no form of its answer, whatever is wrong with a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from clean_rows import Writer
from planted import PUBLIC, STEMS, content_of, found_in, leaks, planted, write_rows
from planted_files import in_words, write_files

from flows.cli import app
from flows.commands.errors import exit_code_of

Check = Callable[..., tuple[int, bytes]]
PRIVATE = tuple(kind for kind in STEMS if kind not in PUBLIC)
HOLD_ROWS = (
    *("*_pairs.parquet", "*_feedback.parquet", "*_prompts.parquet", "stepwise.parquet"),  # The rows that are kept.
    *("quarantine.parquet", "dropped.parquet"),  # Those that are not, as they stand.
)
"""Files of `--output` whose purpose is to hold rows."""
REFUSED = (
    *("unknown.jsonl", "no_json.jsonl", "mixed.jsonl", "text.json", "list.json", "wrapped.json", "cut.jsonl.gz"),
    *("headless.csv", "headed.csv", "unclosed.csv", "damaged.parquet", "unreadable.parquet"),
)
"""Files that cannot be read, or not as one thing: an error, and no report."""
CHECKED = (
    *("pairs.jsonl", "comparisons.jsonl", "feedback.jsonl", "prompts.jsonl", "stepwise.jsonl", "ratings.jsonl"),
    *("ambiguous.jsonl", "table.csv", "good.parquet"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("planted") / "data")


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    """Run the command in this process: (exit code, all that it printed)."""

    def run(*arguments: str | Path) -> tuple[int, bytes]:
        capfd.readouterr()
        code = exit_code_of(app, ["check", *map(str, arguments)])
        told = capfd.readouterr()
        return code, (told.out + told.err).encode("utf-8", "backslashreplace")

    return run


def test_every_file_is_looked_at(files: dict[str, Path]) -> None:
    assert set(files) == {*REFUSED, *CHECKED}
    for name in CHECKED:
        assert found_in(content_of(files[name])), name


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, files: dict[str, Path], check: Check, tmp_path: Path) -> None:
    for more in ((), ("--json",), ("--format", "nonsense"), ("--ties", "drop"), ("--html", tmp_path / "page.html")):
        code, told = check(files[name], *more)
        assert code in (2, 3), told
        assert found_in(told) == [], more
    assert leaks(tmp_path) == {}


@pytest.mark.parametrize("name", CHECKED)
def test_a_report_in_every_form(name: str, files: dict[str, Path], check: Check, tmp_path: Path) -> None:
    """Table, page and folder, then one object; what holds rows by design is known by name."""
    page, folder = tmp_path / "page.html", tmp_path / "output"
    code, told = check(files[name], "--all", "--html", page, "--output", folder)
    assert code == (0 if name == "good.parquet" else 3), told
    assert b"verdict: " in told
    assert found_in(told) == []
    assert found_in(page.read_bytes()) == []
    assert leaks(folder, HOLD_ROWS) == {}
    assert {path.name for path in folder.rglob("*")} >= {"report.json", "report.html", "great_expectations.json"}
    assert any(name.endswith(".parquet") for name in leaks(folder)), "the search finds nothing where rows are"
    again, as_json = check(files[name], "--json")
    assert (again, b'"verdict"' in as_json) == (code, True)
    assert found_in(as_json) == []


def test_another_version_a_fixed_file_and_data_docs(files: dict[str, Path], check: Check, tmp_path: Path) -> None:
    lines = files["pairs.jsonl"].read_bytes().splitlines()
    new = write_rows(tmp_path / "new.jsonl", lines[5:-5])
    docs = tmp_path / "docs"
    code, told = check(new, "--against", files["pairs.jsonl"], "--fix", "--data-docs", docs)
    assert code == 3
    assert b"against the older version" in told
    assert b"rows written to" in told
    assert found_in(told) == []
    assert leaks(docs) == {}
    assert sum(path.suffix == ".html" for path in docs.rglob("*")) > 2
    # The file is the data: what is kept is in it as it was, and what is a secret is not kept.
    fixed = (tmp_path / "new.fixed.jsonl").read_bytes()
    assert {told.partition(":")[0] for told in found_in(fixed)} >= {"email", "phone", "word"}
    code, told = check(new, "--against", files["feedback.jsonl"], "--json")
    assert found_in(told) == []


def test_texts_that_are_asked_for_are_shown_without_secrets_and_personal_data(check: Check, tmp_path: Path) -> None:
    """Of a row with several answers each pair is judged by its own texts."""
    writer = Writer(21)
    rows = [{**writer.pair(), "prompt": in_words(planted(kind, n))} for n in range(2) for kind in STEMS]
    write_rows(tmp_path / "pairs.jsonl", [*rows, *writer.pairs(5)])
    for place in range(3):  # The private answer is the best, the middle or the worst of three.
        ranked = []
        for kind in PRIVATE:
            answers = [writer.answer() for _ in range(3)]
            answers[place] = in_words(planted(kind, place))
            listed = [{"answer": answer, "rank": rank} for rank, answer in enumerate(answers, start=1)]
            ranked.append({"prompt": writer.prompt(), "answers": listed})
        write_rows(tmp_path / f"ranked_{place}.jsonl", ranked)
    pages = {}
    for path in sorted(tmp_path.glob("*.jsonl")):
        page = path.with_suffix(".html")
        code, told = check(path, "--html", page, "--show-text", "--set", "secrets=keep", "--set", "min_pairs=2")
        assert code in (0, 3), told
        assert found_in(told) == []
        pages[path.stem] = page.read_bytes()
    assert {name: found_in(page, PRIVATE) for name, page in pages.items()} == {name: [] for name in pages}
    assert found_in(pages["pairs"]), "plain words of a kept row are shown where that is wanted"
    assert all(page.count(b"<pre") for page in pages.values()), "the page shows texts"
