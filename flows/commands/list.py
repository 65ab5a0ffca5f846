"""`tidegate list TABLE`: the names that a config can choose from, with formula and source."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

from flows.commands.output import Answer
from training_core.catalogue import TABLES, Entry, find_table

ALL_TABLES = "tables"


def print_table(name: str, *, as_json: bool) -> Answer:
    """Print one table, or with `tables` what each of them holds.

    Raises:
        ConfigurationError: there is no such table.
    """
    if name == ALL_TABLES:
        return _print_tables(as_json)
    table = find_table(name)
    entries = table.read()
    if not as_json:
        print(f"{table.title}: `{table.field}` in a config")
        print("\n".join([*_filled(table.note, "", ""), ""] if table.note else [""]))
        print("\n\n".join("\n".join(entry_lines(entry)) for entry in entries))
    value = {"table": table.name, "title": table.title, "field": table.field, "note": table.note, "entries": entries}
    return Answer(value)


def _print_tables(as_json: bool) -> Answer:
    names = [{"table": table.name, "title": table.title, "field": table.field} for table in TABLES.values()]
    if not as_json:
        width = max(map(len, TABLES))
        for row in names:
            print(f"{row['table']:{width}}  {row['title']} (`{row['field']}`)")
        print("\n`tidegate list TABLE` prints one of them; `tidegate list` prints the runs.")
    return Answer({"tables": names})


def entry_lines(entry: Entry) -> Iterator[str]:
    """Yield the lines of one entry: its name, its summary, then the rest with titles."""
    titles = [key for key in entry if key not in ("name", "summary")]
    width = max(map(len, titles), default=0)
    yield entry["name"]
    yield from _filled(entry["summary"], "  ", "  ")
    for title in titles:
        yield from _filled(entry[title], f"  {title.replace('_', ' '):{width}}  ", " " * (width + 4))


def _filled(text: str, first: str, later: str) -> list[str]:
    """Return the lines of a text that fits a terminal; elsewhere one line, for whoever searches in it."""
    if not sys.stdout.isatty():
        return [first + text]
    width = max(shutil.get_terminal_size().columns, 60)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_long_words=False)
