"""A data check in this process, and what it wrote, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_checks.checks import DuckDbEngine, measure
from data_checks.config import CheckDataConfig
from data_checks.result import CheckedData
from data_checks.rows import Turn
from data_checks.runner import InputFiles, check_dataset


def files_of(config: CheckDataConfig) -> InputFiles:
    """Return the files where the config names them."""
    prompts = [None if path is None else Path(path) for path in (config.rl_prompts, config.eval_prompts)]
    feedback = [Path(file.path) for file in config.feedback]
    return InputFiles([Path(file.path) for file in config.preferences], *prompts, feedback)


class Row(dict[str, Any]):
    """A row of a table, its columns also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Loaded:
    """What a check wrote, read back: rows as dictionaries, messages as `Turn`s."""

    def __init__(self, data: CheckedData, config: CheckDataConfig, folder: Path) -> None:
        self.data = data
        self.config = config
        self.counts = data.ledgers
        self.formats = data.formats
        self.fingerprint = data.fingerprint
        self.whole = data.whole
        self.folder = folder

    def table(self, name: str) -> pa.Table:
        return pq.read_table(self.data.tables[name])

    def numbers(self) -> dict[str, Any]:
        """Return what the metric stage says."""
        with DuckDbEngine() as engine:
            return dict(measure(self.data, self.config, engine).numbers)

    def tokens(self, kind: str = "preferences") -> dict[int, Row]:
        """Return the numbers of each kept example, by its row."""
        rows = [Row(row) for row in self.features(kind).to_pylist()]
        return {row["row"]: row for row in rows if row["fate"] == "kept"}

    def features(self, kind: str = "preferences") -> pa.Table:
        return pq.read_table(self.data.features[kind])

    def rows(self, *names: str) -> list[Row]:
        rows = [Row(row) for name in names for row in self.table(name).to_pylist()]
        for row in rows:
            for part in ("prompt", "chosen", "rejected", "answer"):
                if f"{part}_messages" in row:
                    row[part] = tuple(Turn(**message) for message in row[f"{part}_messages"])
        return rows

    @property
    def train(self) -> list[Row]:
        return self.rows("train_pairs")

    @property
    def validation(self) -> list[Row]:
        return self.rows("validation_pairs")

    @property
    def pairs(self) -> list[Row]:
        return sorted(self.rows("train_pairs", "validation_pairs"), key=lambda row: row["source_row"])

    @property
    def feedback(self) -> list[Row]:
        return sorted(self.rows("train_feedback", "validation_feedback"), key=lambda row: row["source_row"])

    @property
    def quarantined(self) -> list[Row]:
        return self.rows("quarantine")

    @property
    def rl_prompts(self) -> list[Row]:
        return self.rows("rl_prompts")

    @property
    def eval_prompts(self) -> list[Row]:
        return self.rows("eval_prompts")


def load_check(
    files: InputFiles, config: CheckDataConfig, tokenizer: Path | None, folder: Path, seed: int = 3, **options: Any
) -> Loaded:
    """Check files in this process; return what was written to `folder`."""
    output = folder / "tables"
    output.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    data = check_dataset(
        files, config, tokenizer, seed=seed, work_folder=work, output_folder=output, **{"num_workers": 1, **options}
    )
    return Loaded(data, config, folder)
