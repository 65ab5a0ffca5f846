"""Counts on a real file: HH-RLHF harmless-base, test split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_checks.runner import CheckedData

HH_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "hh-rlhf-harmless-base-test.jsonl.gz"


@pytest.mark.skipif(not HH_FILE.exists(), reason=f"{HH_FILE.name} is not in ../shared/data")
def test_hh_rlhf_counts(check: Any) -> None:
    data: CheckedData = check(HH_FILE, max_prompt_tokens=100_000, max_total_tokens=100_000)
    assert (data.formats[0].format, data.formats[0].decided_by) == ("hh", "columns")
    counts = data.counts["preferences"]
    assert (counts.rows, counts.kept) == (2312, 2299)
    # Each row is counted once; the five mismatched rows also have two turns of one role in a row.
    assert counts.quarantined == {"prompt_mismatch": 5, "empty_response": 4, "role_order": 4}
    found = {name: (defect.rows, defect.transcripts) for name, defect in counts.defects.items()}
    assert found == {"prompt_mismatch": (5, 0), "empty_response": (4, 4), "role_order": (9, 13)}
    assert len(data.pairs) == 2299
