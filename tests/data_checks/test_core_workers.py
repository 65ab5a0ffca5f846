"""Quick ways give what slow ways give: worker processes, plain pairs as columns, sides of the split in SQL."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from data_checking import files_of, load_check

from data_checks import examine
from data_checks.config import CheckDataConfig
from data_checks.examine import Judge
from data_checks.processes import process_context
from data_checks.reading import block
from data_checks.splits import is_validation, side_sql
from training_core.errors import TemporaryError

WORDS = (
    "river", "stone", "Garden", "WINDOW", "market", "bridge", "summer", "Straße", "naïve", "東京", "letter", "café",
)  # fmt: skip
ODD_LINES = (
    b'{"prompt": "Is this one?", "chosen": "   ", "rejected": "No, it is blank."}',
    b'{"prompt": "Is this one?", "chosen": " The same. ", "rejected": "The same."}',
    b'{"prompt": "\\t", "chosen": "Yes.", "rejected": "No."}',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": 3}',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": null}',
    b'{"prompt": "Is this one?", "chosen": "Yes."}',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": "No.", "score_chosen": 4.5, "score_rejected": 3}',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": "No.", "source": "elsewhere"}',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": "No.", "chosen": "Maybe."}',
    b'{"prompt": "A \\"quoted\\": one?", "chosen": "Yes: \\":\\" it is.", "rejected": "No."}',
    b'{"prompt": "Is this \\u0000 one?", "chosen": "Yes.", "rejected": "No."}',
    b'{"prompt": "Is this one?", "chosen": "A \\ud800 half.", "rejected": "No."}',
    b'{"prompt": "Is this one?", "chosen": "\xff\xfe", "rejected": "No."}',
    b'{"prompt": [{"role": "user", "content": "Is this one?"}], "chosen": "Yes.", "rejected": "No."}',
    b'["prompt", "chosen", "rejected"]',
    b'{"prompt": "Is this one?", "chosen": "Yes.", "rejected": "No."',
    b"",
    b"  \t",
)


def lines_of(seed: int, number: int, odd_share: float) -> list[bytes]:
    """Return pairs of a few words, some prompts twice, and odd lines among them."""
    draw = random.Random(seed)

    def text() -> str:
        words = [draw.choice(WORDS) for _ in range(draw.randint(1, 6))]
        return draw.choice(("", " ", "\n")) + draw.choice((" ", "  ", "\t")).join(words) + draw.choice((".", "", " "))

    prompts = [text() + str(draw.randrange(number)) for _ in range(number // 2 + 1)]
    lines = []
    for _ in range(number):
        row = {"prompt": draw.choice(prompts), "chosen": text(), "rejected": text()}
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()
        lines.append(draw.choice(ODD_LINES) if draw.random() < odd_share else line)
    return lines


def written(path: Path, folder: Path, **options: Any) -> dict[str, bytes]:
    """Check a file; return the bytes of every table, and what is counted."""
    config = CheckDataConfig.model_validate({"preferences": [{"path": str(path), "format": "pairs"}], "min_pairs": 2})
    loaded = load_check(files_of(config), config, None, folder, **options)
    tables = {name: file.read_bytes() for name, file in (loaded.data.tables | loaded.data.features).items()}
    return tables | {"counts": repr((loaded.counts, loaded.fingerprint, sorted(loaded.whole.items()))).encode()}


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("odd_share", [0.0, 0.02, 0.5])
def test_plain_pairs_take_no_other_way(
    odd_share: float, ending: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(ending.join([*lines_of(7, 600, odd_share), *(ODD_LINES if odd_share else ())]))
    ways = []
    convert_texts = examine.convert_texts
    monkeypatch.setattr(examine, "convert_texts", lambda *args: ways.append(1) or convert_texts(*args))
    quick = written(path, tmp_path / "quick")
    assert bool(ways) is (odd_share < 0.1)
    monkeypatch.setattr(examine, "PLAIN_FORMAT", "none")
    assert written(path, tmp_path / "slow") == quick


def test_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each process is started from nothing, because the folder of temporary files has a long name."""
    monkeypatch.setattr(block, "CHUNK_BYTES", 8_000)  # Blocks are cut in this process.
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n".join(lines_of(8, 600, 0.05)))
    alone = written(path, tmp_path / "alone", num_workers=1)
    assert written(path, tmp_path / "two", num_workers=2) == alone
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert process_context().get_start_method() == "spawn"
    assert written(path, tmp_path / "three", num_workers=3) == alone


def test_a_killed_worker_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "CHUNK_BYTES", 8_000)
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n".join(lines_of(9, 2000, 0.0)))
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    def kill_one(done: int, _total: int, _phase: str) -> None:
        if done == 2:
            new = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            youngest = max(new, key=lambda process: (process.create_time(), process.pid))
            os.kill(youngest.pid, signal.SIGKILL)

    with pytest.raises(TemporaryError, match="killed, most often by the system for want of memory"):
        written(path, tmp_path / "out", num_workers=2, progress=kill_one)


def test_sides_in_sql_are_those_in_python() -> None:
    draw = random.Random(10)
    keys = [draw.randbytes(16) for _ in range(2000)]
    signed = [tuple(int.from_bytes(key[at : at + 8], "big", signed=True) for at in (0, 8)) for key in keys]
    for seed, fraction in ((0, 0.1), (7, 0.5), (2**40 + 3, 0.0), (3, 1.0)):
        query = f"select {side_sql('a', 'b', seed, fraction)} from (values {', '.join(map(str, signed))}) t(a, b)"
        found = [side for (side,) in duckdb.sql(query).fetchall()]
        assert found == [is_validation(key.hex(), seed, fraction) for key in keys]
        assert 0 < sum(found) < len(found) or fraction in (0.0, 1.0)


def test_prompts_are_counted_once(write_rows: Callable[..., Path], check: Callable[..., Any]) -> None:
    """Rates of prompts are shares of distinct prompts, however many rows each has."""
    rows = [
        {"prompt": f"What is the {number}th letter of {WORDS[number]}?", "chosen": f"Yes {n}.", "rejected": f"No {n}."}
        for number in range(5)
        for n in range(4)
    ]
    assert check(write_rows(rows)).whole["num_prompts"] == 5


def test_a_judge_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    import pickle

    config = CheckDataConfig.model_validate({"preferences": [{"path": "a.jsonl"}]})
    assert pickle.loads(pickle.dumps(Judge(config, tmp_path, None, None))).config == config
