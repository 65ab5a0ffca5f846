"""`tidegate check`: what is in a data file, what would be trained on, what not, and why."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.commands.errors import signals_unwind
from flows.commands.output import Answer
from training_core.errors import EXIT_DATA, EXIT_OK, ConfigurationError
from training_core.protocol.atomic import atomic_path, write_text

SEED = 0
"""Of the split: what becomes of rows does not depend on it."""
MIN_SECONDS_BETWEEN_LINES = 2.0
NUM_SAMPLES = 20
ALL_KINDS: tuple[Literal["pairs", "feedback", "prompts", "stepwise"], ...] = (
    "pairs",
    "feedback",
    "prompts",
    "stepwise",
)


@dataclass(frozen=True)
class CheckOptions:
    """What the command line says."""

    file: str
    format: str = "auto"
    ties: str | None = None
    label: str | None = None
    score: str | None = None
    rating_threshold: float | None = None
    settings: Sequence[str] = ()
    tokenizer: Path | None = None
    against: str | None = None
    fix: bool = False
    html: Path | None = None
    output: Path | None = None
    show_text: bool = False
    every_check: bool = False
    data_docs: Path | None = None


def check_file(options: CheckOptions, *, as_json: bool) -> Answer:
    """Check one file; print what was found. The exit code is 0 or 3."""
    from data_checks.processes import begin_early

    begin_early([Path(options.file)])
    from data_checks.unforeseen import without_row_text  # Imported while the early processes start.

    progress = None if as_json or not sys.stderr.isatty() else Progress()
    fixed = _fixed_path(options) if options.fix else None
    plan_page(options)
    if options.against is not None:
        plan_check(options.against, options)  # A version that cannot be read should not be found out after the other.
    with signals_unwind(), without_row_text(), scratch_folder() as folder:
        outcome = _check(options.file, options, folder / "new", options.output, progress)
        answer = as_object(outcome)
        if options.against is not None:
            old = _check(options.against, options, folder / "old", None, progress)
            answer["against"] = _compare(outcome, old, folder / "comparison")
        if progress is not None:
            progress.clear()
        if fixed is not None:
            answer["fixed"] = write_fixed(outcome, fixed)
        if options.html is not None:
            _write_page(outcome, options)
        if options.data_docs is not None:
            _write_data_docs(outcome, options.data_docs)
    code = EXIT_DATA if answer["verdict"] in ("fail", "error") else EXIT_OK
    if not as_json:
        _print(outcome, answer, options)
    return Answer(answer, code)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder, and remove it whatever happens, also while something still writes to it."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-check-"))
    try:
        yield folder
    finally:
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def plan_page(options: CheckOptions) -> None:
    """Refuse a page that would overwrite anything but an older page.

    Raises:
        ConfigurationError: `--html` names a folder, no file, or a file that is no page.
    """
    page = options.html
    if page is None:
        return
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--html {page}: a page's name ends in .html, so that no other file is overwritten")
    if page.exists() and not page.is_file():
        raise ConfigurationError(f"--html {page} is there and is no file. Name a page to write")
    if not page.resolve().parent.is_dir():
        raise ConfigurationError(f"--html {page}: the folder {page.parent} does not exist")


class Progress:
    """Says on standard error, now and then and on one line, how far a long check is."""

    def __init__(self) -> None:
        self._next = time.monotonic() + MIN_SECONDS_BETWEEN_LINES
        self._shown = False

    def __call__(self, done: int, total: int, phase: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + MIN_SECONDS_BETWEEN_LINES
        self._shown = True
        number = f" {done:,}" + (f" of {total:,}" if total else "") + " blocks" if done else ""
        print(f"\r{phase}{number} …\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _check(
    file: str,
    options: CheckOptions,
    folder: Path,
    output: Path | None,
    progress: Callable[[int, int, str], None] | None,
) -> Any:
    """Return the outcome of checking one file."""
    from data_checks.check import check
    from data_checks.presentation import write_report
    from data_checks.runner import no_progress

    files, config = plan_check(file, options)
    tables = output or (folder / "tables" if options.fix or options.show_text else None)
    if tables is not None:
        _make_folder(tables, "--output")
    outcome = check(
        files,
        config,
        options.tokenizer,
        seed=SEED,
        work_folder=folder / "work",
        output_folder=tables,
        progress=progress or no_progress,
    )
    if output is not None:
        write_report(outcome, output / "report")
    return outcome


def _make_folder(path: Path, option: str) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(f"{option} {path} is there already. Name a folder that does not exist or is empty")
    path.mkdir(parents=True, exist_ok=True)


def plan_check(file: str, options: CheckOptions) -> tuple[Any, Any]:
    """Return the input files and the config of a check of one file, its kind told from its columns.

    Raises:
        ConfigurationError: the file is missing or of no kind that is read, or a setting is wrong.
        DataError: its format is unknown or ambiguous.
    """
    from data_checks.config import FileCheckConfig
    from data_checks.detection import identify
    from data_checks.files import parts_of
    from data_checks.runner import InputFiles
    from training_core.config.loader import load_layer, validate_layer

    named = {
        name: value
        for name in ("ties", "label", "score", "rating_threshold")
        if (value := getattr(options, name)) is not None
    }
    if not file:
        raise ConfigurationError("FILE is empty: name a data file")
    if options.tokenizer is not None and not options.tokenizer.is_dir():
        raise ConfigurationError(
            f"--tokenizer {options.tokenizer} is no folder: name that of a checkpoint, or of a tokenizer alone"
        )
    parts = parts_of(Path(file))
    path = parts[0]
    evidence = identify(path.name, path, file, ALL_KINDS, options.format, named)
    kind = evidence.kind
    layer = load_layer([], [setting.removeprefix("data.") for setting in options.settings])
    if named_files := sorted({"preferences", "feedback", "rl_prompts", "eval_prompts"} & layer.values.keys()):
        raise ConfigurationError(
            f"--set {named_files[0]}: the data are FILE; write the options of a file as --format, --ties and so on"
        )
    entries = [{"path": str(part), "format": options.format, **named} for part in parts]
    if kind == "pairs":
        layer.values["preferences"] = entries
        files = InputFiles(preferences=parts)
    elif kind == "feedback":
        layer.values["feedback"] = entries
        files = InputFiles(feedback=parts)
    elif kind == "stepwise":
        files = InputFiles(stepwise=parts)
    elif len(parts) > 1:
        raise ConfigurationError(f"{file} is a folder of {len(parts)} files of prompts: name one file, or join them")
    else:
        layer.values |= {"rl_prompts": str(path), "rl_prompts_format": options.format}
        files = InputFiles(rl_prompts=path)
    if kind not in ("pairs", "feedback") and named:
        raise ConfigurationError(
            f"{file}: --{next(iter(named)).replace('_', '-')} means nothing for format {evidence.format}: leave it out"
        )
    return files, validate_layer(FileCheckConfig, layer)


def as_object(outcome: Any) -> dict[str, Any]:
    """Return what `--json` prints of a check."""
    report = outcome.report
    formats = list(dict.fromkeys(evidence["format"] for evidence in report["formats"]))
    checks = [
        {name: check[name] for name in ("name", "severity", "value", "threshold", "unit", "verdict")}
        for check in report["checks"]
    ]
    return {
        "format": formats[0] if len(formats) == 1 else formats,
        "rows": report["rows"],
        "examples": report["examples"],
        "kept": report["kept"],
        "quarantined": report["quarantined"],
        "dropped": report["dropped"],
        "verdict": report["verdict"],
        "checks": checks,
        "fingerprint": report["fingerprint"],
    }


def _fixed_path(options: CheckOptions) -> Path:
    """Return where the rows that are kept go.

    Raises:
        ConfigurationError: something is there already.
    """
    path = Path(options.file)
    name = path.name
    for suffix in (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"):
        name = name.removesuffix(suffix)
    fixed = path.with_name(f"{name}.fixed.jsonl")
    if fixed.exists():
        raise ConfigurationError(f"--fix would overwrite {fixed}. Move it away, or remove it")
    return fixed


def write_fixed(outcome: Any, path: Path) -> dict[str, Any]:
    """Write the rows that are kept, text unchanged, as a file that passes the same check; return path and rows.

    Pairs are written in the format `pairs`, judged answers as `feedback`, prompts as `prompts`, in file order.
    """
    from data_checks.fixing import fixed_lines

    num_rows = 0
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        for line in fixed_lines(outcome.data):
            stream.write(line + b"\n")
            num_rows += 1
    return {"path": str(path), "rows": num_rows}


def _compare(new: Any, old: Any, folder: Path) -> dict[str, Any]:
    from data_checks.comparison import compare

    return compare(new.data, new.report, old.data, old.report, folder)


def _write_page(outcome: Any, options: CheckOptions) -> None:
    from data_checks.fixing import sample_rows
    from data_checks.presentation import html_page

    assert options.html is not None
    samples = sample_rows(outcome.data, NUM_SAMPLES, with_text=options.show_text)
    write_text(options.html, html_page(outcome.report, samples))


def _write_data_docs(outcome: Any, folder: Path) -> None:
    from data_checks.checks import write_data_docs

    _make_folder(folder, "--data-docs")
    write_data_docs(folder, outcome.runs)


def _print(outcome: Any, answer: dict[str, Any], options: CheckOptions) -> None:
    from data_checks.presentation import check_lines
    from data_checks.report import refusal

    for line in check_lines(outcome.report, every_check=options.every_check):
        print(line)
    if (against := answer.get("against")) is not None:
        for line in comparison_lines(against):
            print(line)
    if (fixed := answer.get("fixed")) is not None:
        print(f"{fixed['rows']:,} rows written to {fixed['path']}")
    where = None if options.output is None else str(options.output)
    if message := refusal(outcome.data, outcome.checks, where):
        print(f"{options.file}: {message}", file=sys.stderr)


def comparison_lines(against: dict[str, Any], num_numbers: int = 12) -> list[str]:
    """Return how two versions differ, in words: the rows, then the numbers that moved most."""
    lines = ["", "against the older version:"]
    if against["fingerprint"]["new"] == against["fingerprint"]["old"]:
        lines.append("  the same examples: fingerprints are equal")
    for table in against["tables"].values():
        for name in ("added", "removed", "changed", "unchanged"):
            places = table["places"].get(name)
            example = f", for example {', '.join(places)}" if places else ""
            lines.append(f"  {table[name]:>12,} {name}{example}")
    moved = [(name, entry) for name, entry in against["drift"].items() if entry["difference"]]

    def relative(item: tuple[str, dict[str, float]]) -> float:
        entry = item[1]
        return abs(entry["difference"]) / max(abs(entry["new"]), abs(entry["old"]))

    for name, entry in sorted(moved, key=relative, reverse=True)[:num_numbers]:
        lines.append(f"  {name}: {entry['old']:.4g} -> {entry['new']:.4g}")
    if len(moved) > num_numbers:
        lines.append(f"  and {len(moved) - num_numbers} other numbers that differ (--json lists all)")
    return lines
