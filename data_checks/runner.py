"""One check from files to tables: no stage, no Great Expectations, and no more rows in memory than a few blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data_checks.batch import merge_defects
from data_checks.config import CheckDataConfig, FeedbackFile, PreferenceFile
from data_checks.decide import decide
from data_checks.detection import FormatEvidence, identify
from data_checks.examine import Chunk, FileTask, Judge, convert
from data_checks.files import distinct_names
from data_checks.formats.base import Kind, Options
from data_checks.pass_rates import PassRates
from data_checks.processes import default_workers
from data_checks.result import INPUT_TABLES, CheckedData, Ledger, Numbers
from data_checks.rows import Policy, Reason
from data_checks.sampling import SampleCandidates
from data_checks.tables import OutputWriter, Written
from data_checks.tokens import Limits, load_tokenizer
from data_checks.workers import examine_all

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from data_checks.whole.contamination import EvaluationIndex

ReportProgress = Callable[[int, int, str], None]
"""Called with (done, total, phase)."""
STORE_MEMORY_BYTES = 1 << 30
"""What the database of pass 2 may take before it writes to the work folder."""
KINDS: dict[str, tuple[Kind, ...]] = {
    "preferences": ("pairs",),
    "feedback": ("feedback",),
    "rl_prompts": ("prompts",),
    "eval_prompts": ("prompts",),
    "stepwise": ("stepwise",),
}


@dataclass(frozen=True)
class InputFiles:
    """Where the files of a `CheckDataConfig` lie: the config names them, a stage may hold them elsewhere."""

    preferences: list[Path] = field(default_factory=list)
    rl_prompts: Path | None = None
    eval_prompts: Path | None = None
    feedback: list[Path] = field(default_factory=list)
    stepwise: list[Path] = field(default_factory=list)
    """Files of process supervision: `tidegate check` reads them, no stage trains on them."""


def no_progress(step: int, total: int, phase: str) -> None:
    """Report to no one."""


class SampleUser(Protocol):
    """Takes the examples from which costly numbers are computed."""

    def prepare(self, is_large: bool) -> None:
        """Called when all rows are read. Large inputs are worth another process."""

    def take(self, sample: pa.Table | None) -> None:
        """Called once, with numbers and texts of kept pairs or, without pairs, of judged answers; None: there are none.

        The tables are written after it returns.
        """


class NoSampleUser:
    """Does without the costly numbers."""

    def prepare(self, is_large: bool) -> None:
        pass

    def take(self, sample: pa.Table | None) -> None:
        pass


def check_dataset(
    files: InputFiles,
    config: CheckDataConfig,
    tokenizer: Path | None,
    *,
    seed: int,
    work_folder: Path,
    output_folder: Path | None = None,
    progress: ReportProgress = no_progress,
    num_workers: int | None = None,
    sample_user: SampleUser | None = None,
) -> CheckedData:
    """Read, judge and split a data set; every row of every file ends up used, quarantined or dropped by a policy.

    Args:
        files: where the files lie.
        config: what is allowed.
        tokenizer: folder of one with a chat template and an EOS token. None: nothing is said of tokens.
        seed: of the split.
        work_folder: a folder that nobody else uses; made if it is missing, and what is in it is lost.
        output_folder: for the tables. None: no tables are written, only counts and numbers.
        progress: called with (done, total, phase).
        num_workers: processes that read and judge. None: one a core for large files. The result depends on none of it.
        sample_user: gets the examples from which costly numbers are computed; None: nobody wants them.

    Raises:
        ConfigurationError: a file is missing or of a kind that is not read.
        DataError: a file cannot be read, is empty, or its format is unknown or ambiguous.
        ArtifactError: the tokenizer does not load.
    """
    shutil.rmtree(work_folder, ignore_errors=True)
    work_folder.mkdir(parents=True)
    limits = None if tokenizer is None else Limits.of(config, load_tokenizer(tokenizer))
    tasks, formats = plan_files(files, config)
    index = evaluation_index(tasks, config)
    judge = Judge(config, work_folder, tokenizer, limits, output_folder is not None, index)
    candidates = SampleCandidates(config.sample_rows, tasks)
    workers = num_workers or default_workers(task.path for task in tasks)
    chunks = list(examine_all(judge, tasks, candidates, workers, progress))
    sample_user = sample_user or NoSampleUser()
    sample_user.prepare(is_large=workers > 1)
    connection = _open(work_folder)
    try:
        decisions = decide(connection, chunks, config, seed)
    finally:
        connection.close()
    sample_user.take(candidates.take(decisions))
    kinds = [name for name in INPUT_TABLES if any(chunk.table == name for chunk in chunks)]
    writer = OutputWriter(output_folder, work_folder, kinds, decisions)
    written = writer.write_all(chunks, lambda done: progress(done, len(chunks), "writing tables"))
    for chunk in chunks:
        for path in (chunk.canonical, chunk.features, chunk.sketches, chunk.prefixes):
            if path is not None:
                path.unlink()
    ledgers = {kind: _ledger(kind, chunks, written) for kind in kinds}
    rates = PassRates()
    for chunk in chunks:
        if chunk.table == "rl_prompts":
            rates.merge(chunk.pass_rates)
    unusable, why = rates.unusable_fraction()
    numbers: Numbers = decisions.numbers | {f"longest_{k}_tokens": v for k, v in written.longest_prompt_tokens.items()}
    if "rl_prompts" in kinds:
        numbers["unusable_prompts_fraction"] = unusable
    return CheckedData(
        tables=written.tables,
        features=written.features,
        ledgers=ledgers,
        num_rows=written.num_rows,
        formats=formats,
        limits=limits,
        fingerprint=decisions.fingerprint,
        whole=numbers,
        skipped={"unusable_prompts_fraction": why} if why is not None and "rl_prompts" in kinds else {},
    )


def evaluation_index(tasks: Sequence[FileTask], config: CheckDataConfig) -> EvaluationIndex | None:
    """Return what finds the prompts of the evaluation's file in other texts; None without such a file."""
    from data_checks.reading import iter_rows
    from data_checks.whole.contamination import EvaluationIndex

    own = [task for task in tasks if task.table == "eval_prompts"]
    texts = [
        "\n".join(content for role, content in prompt if role != "system")
        for task in own
        for rows in iter_rows(task.path, task.name, task.label)
        for prompt in convert(rows, task).prompts
        if prompt is not None
    ]
    return EvaluationIndex.of(texts, config.contamination) if own else None


def plan_files(files: InputFiles, config: CheckDataConfig) -> tuple[list[FileTask], list[FormatEvidence]]:
    """Tell each file's format from its first rows; return how each is read, in the order of reports.

    Raises:
        ConfigurationError: a file is missing or of a kind that is not read.
        DataError: it cannot be read, is empty, or its format is unknown or ambiguous.
    """
    entries = list(_entries(files, config))
    names = distinct_names({key: path.name for key, path, *_ in entries})
    tasks, formats = [], []
    for key, path, table, label, file in entries:
        evidence = identify(names[key], path, label, KINDS[table], file.format, _chosen(file))
        formats.append(evidence)
        options = Options(source=file.source or names[key], **_chosen(file))
        ties = file.ties if isinstance(file, PreferenceFile) else None
        tasks.append(FileTask(table, path, names[key], label, evidence.format, options, ties))
    return tasks, formats


@dataclass(frozen=True)
class PromptsFile:
    """How a file of prompts or steps is read."""

    format: str
    source: str | None = None


def _chosen(file: PreferenceFile | FeedbackFile | PromptsFile) -> dict[str, Any]:
    """Return what the config says on how rows are read, beside the format."""
    said: dict[str, Any] = {}
    if isinstance(file, PreferenceFile):
        said = {"label": file.label, "score": file.score, "max_pairs_per_row": file.max_pairs_per_row}
    elif isinstance(file, FeedbackFile):
        said = {"score": file.score, "rating_threshold": file.rating_threshold}
    return {name: value for name, value in said.items() if value is not None}


Entry = tuple[str, Path, str, str, PreferenceFile | FeedbackFile | PromptsFile]


def _entries(files: InputFiles, config: CheckDataConfig) -> Iterator[Entry]:
    """Yield (input's name, path, kind of input, what messages call it, its part of the config) of each file."""
    for index, (path, pairs) in enumerate(zip(files.preferences, config.preferences, strict=True)):
        label = f"data.preferences.{index}.path: {pairs.path}"
        yield f"preferences_{index}", path, "preferences", label, pairs
    for index, (path, judged) in enumerate(zip(files.feedback, config.feedback, strict=True)):
        yield f"feedback_{index}", path, "feedback", f"data.feedback.{index}.path: {judged.path}", judged
    prompts = (
        ("rl_prompts", files.rl_prompts, config.rl_prompts, config.rl_prompts_format),
        ("eval_prompts", files.eval_prompts, config.eval_prompts, config.eval_prompts_format),
    )
    for table, found, named, layout in prompts:
        if found is not None:
            yield table, found, table, f"data.{table}: {named or found}", PromptsFile(layout)
    for index, path in enumerate(files.stepwise):
        yield f"stepwise_{index}", path, "stepwise", str(path), PromptsFile("auto")


def _open(work_folder: Path) -> duckdb.DuckDBPyConnection:
    from data_checks.whole.store import open_store

    return open_store(work_folder, STORE_MEMORY_BYTES, 2)


def _ledger(kind: str, chunks: Sequence[Chunk], written: Written) -> Ledger:
    """Return the account of one kind of input."""
    own = [chunk for chunk in chunks if chunk.table == kind]
    fates: Mapping[tuple[str, str], int] = written.fates.get(kind, {})
    defects = merge_defects([*(chunk.defects for chunk in own), written.defects.get(kind, {})], list(Reason))
    return Ledger(
        rows=sum(chunk.rows for chunk in own),
        examples=sum(chunk.examples for chunk in own),
        kept=fates.get(("kept", ""), 0),
        quarantined={r.value: fates["quarantined", r.value] for r in Reason if fates.get(("quarantined", r.value))},
        dropped={p.value: fates["dropped", p.value] for p in Policy if fates.get(("dropped", p.value))},
        defects=defects,
    )
