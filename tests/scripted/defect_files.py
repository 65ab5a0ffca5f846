"""One file for each defect of the catalogue: clean rows, and a few that have the defect.

    python tests/scripted/defect_files.py        writes them anew to tests/data_checks/fixtures/defects

Which defect is which number: docs/data-checks.md. Shares are planted just above what the limit allows in a file of that
size; where such rows are quarantined, mostly below what may be quarantined, so that one check alone complains.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import defect_rows as made
import defects_of_rows as rows
import defects_of_sets as sets
from defect_rows import DefectFile, Line

FOLDER = Path(__file__).parent.parent / "data_checks" / "fixtures" / "defects"


@lru_cache
def defect_files() -> tuple[DefectFile, ...]:
    """Return every file, in the order of the catalogue."""
    return (
        rows.duplicates(), rows.identical(), rows.contradictions(), rows.people_who_differ(),
        rows.wrong_labels(), rows.ties(), rows.inverted(), rows.length(), rows.length_of_source(),
        rows.two_prompts(), rows.blank(), rows.cut_off(), rows.last_turn(), rows.role_order(),
        rows.mojibake(), rows.odd_characters(), sets.control_tokens(), sets.personal(),
        sets.languages(), sets.toxic(), sets.contaminated(), sets.contaminated_in_disguise(),
        sets.near_duplicates(), sets.same_in_other_words(), sets.too_long(), sets.gold(),
        sets.unusable(), sets.broken_lines(), sets.unjudged(), sets.one_prompt(), sets.refusals(), sets.position(),
        sets.layout(),
    )  # fmt: skip


@lru_cache
def clean_files() -> tuple[DefectFile, ...]:
    """Return the rows that defects are planted into, of each layout."""
    everything: dict[str, Any] = {"languages": ["en"], "semantic_duplicates": True}
    return (
        DefectFile(0, "pairs", made.sheet(40), options=everything, tokenizer=True, evaluation=made.prompts(41)),
        DefectFile(0, "table_of_pairs", made.sheet(42), suffix=".csv"),
        DefectFile(0, "long_answers", made.sheet(43, 104, 4)),
        DefectFile(0, "messages", made.messages(44), tokenizer=True),
        DefectFile(0, "transcripts", made.transcripts(45)),
        DefectFile(0, "judged", made.judged(46)),
        DefectFile(0, "binarized", made.binarized(47), suffix=".parquet"),
        DefectFile(0, "comparisons", made.comparisons(48, lambda at: at % 2 == 0)),
        DefectFile(0, "feedback", made.feedback(51), kind="feedback"),
        DefectFile(0, "worded", made.worded(49), suffix=".parquet"),
        DefectFile(0, "questions", made.questions(50), kind="rl_prompts", suffix=".parquet", tokenizer=True),
    )


def lines_of_files() -> dict[str, list[Line]]:
    """Return what each file of the folder holds."""
    found = {}
    for file in (*clean_files(), *defect_files()):
        found[file.file_name] = file.sheet.rows
        if file.evaluation_name is not None:
            found[file.evaluation_name] = [{"prompt": prompt} for prompt in file.evaluation]
    return found


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.iterdir():
        path.unlink()
    for name, lines in lines_of_files().items():
        made.write(FOLDER / name, lines)


if __name__ == "__main__":
    main()
