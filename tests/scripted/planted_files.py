"""Data files with planted strings in every place where a row can hold one; see `planted`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from clean_rows import Writer, as_comparison, as_judged
from planted import PUBLIC, STEMS, planted, write_rows

Rows = list[Any]


def texts(place: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, string) of every kind for a place."""
    return ((kind, planted(kind, place)) for kind in STEMS)


def keys(place: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, string) for names of columns: one that is a plain word may be shown."""
    return ((kind, text) for kind, text in texts(place) if kind not in PUBLIC)


def in_words(text: str) -> str:
    return f"Write to me about {text} whenever you like."


def messages(prompt: str, answer: str, system: str | None = None, role: str = "user") -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": role, "content": prompt}, {"role": "assistant", "content": answer}]


def conversation(pair: dict[str, Any], **turns: str) -> dict[str, Any]:
    return {side: messages(pair["prompt"], pair[side], **turns) for side in ("chosen", "rejected")}


PAIR_DEFECTS: tuple[Callable[[dict[str, Any], str], Any], ...] = (
    lambda pair, text: {**pair, "margin": text},
    lambda pair, text: {**pair, "source": text},
    lambda pair, text: {**pair, "source": [text]},
    lambda pair, text: {**pair, "tools": text},
    lambda pair, text: {**pair, text: "a value"},
    lambda pair, text: {**pair, "prompt": {text: text}},
    lambda pair, text: {**pair, "chosen": [[text]]},
    lambda pair, text: {**pair, "images": [text]},
    lambda pair, text: {**pair, "chosen": pair["rejected"], "note": text},
    lambda pair, text: {**pair, "prompt": " ", "chosen": text},
    lambda pair, text: {**pair, "rejected": text + "\x00"},
    lambda pair, text: {**pair, "rejected": pair["rejected"] + " \x1b[31m" + text},
    lambda pair, text: conversation(pair, role=text),
    lambda pair, text: conversation(pair, system=in_words(text)),
    lambda pair, text: {**conversation(pair), "chosen": messages(text, pair["chosen"])},
    lambda pair, text: {**conversation(pair), "chosen": [{"role": "assistant", "content": "x", text: text}]},
    lambda pair, text: {**conversation(pair), "chosen": [{"role": "user", "content": [{"type": text}]}]},
    lambda pair, text: json.dumps({**pair, "note": text})[:-1].encode(),
    lambda pair, text: json.dumps({**pair, "note": text}).encode()[:-1] + b',"note":"' + text.split("\n")[0].encode(),
    lambda pair, text: b'{"prompt": "\\q' + json.dumps(text).encode()[1:-1] + b'"}',
    lambda pair, text: json.dumps({**pair, "note": text}).encode() + b"\xff",
    lambda pair, text: json.dumps({**pair, "note": text}).encode()[:-1] + b', "bad": "\\ud800"}',
    lambda pair, text: json.dumps({**pair, "note": text}).encode()[:-1] + b', "note": NaN}',
    lambda pair, text: json.dumps(text).encode(),
    lambda pair, text: {**pair, "note": text, "big": 10**400},
)
"""What may be wrong with a pair, each with a text that a message about it could quote."""


def pair_rows(num_clean: int = 300) -> Rows:
    """Return clean pairs, pairs with every kind in every text, and defective ones."""
    writer, places = Writer(3), count()
    rows: Rows = writer.pairs(num_clean)
    for part in ("prompt", "chosen", "rejected", "note"):
        place = next(places)
        rows += [{**writer.pair(), part: in_words(text)} for _, text in texts(place)]
    kinds = cycle(kind for kind in STEMS if kind not in PUBLIC)  # Some of these texts are keys.
    rows += [defect(writer.pair(), planted(next(kinds), next(places))) for defect in PAIR_DEFECTS]
    repeated = {**writer.pair(), "prompt": in_words(planted("word", next(places)))}
    return [*rows, repeated, repeated, {**repeated, "chosen": repeated["rejected"], "rejected": repeated["chosen"]}]


def comparisons() -> Rows:
    writer = Writer(4)
    rows: Rows = [as_comparison(writer.pair(), number % 2, f"worker {number % 7}") for number in range(200)]
    for kind, text in texts(50):
        good = as_comparison(writer.pair(), 1, text)
        rows += [good, good | {"choice": text}, good | {"info": {"post": [text]}}, good | {"summaries": text}]
        rows.append(good | {"worker": [text], "info": {"post": kind, "title": text}})
    return rows


def feedback() -> Rows:
    writer = Writer(5)
    rows: Rows = [as_judged(writer.pair(), number % 2 == 0) for number in range(300)]
    for _, text in texts(51):
        good = as_judged(writer.pair(), True)
        rows += [good | {"annotator": text}, good | {"label": text}, good | {"thumb": text}, good | {"rating": text}]
        rows += [good | {"group_id": text, "example_id": text}, good | {"response": text}, {"prompt": text}]
    return rows


def prompts() -> Rows:
    writer = Writer(6)
    rows: Rows = [{"prompt": writer.prompt(), "ground_truth": str(number)} for number in range(200)]
    for _, text in texts(52):
        good = {"prompt": writer.prompt(), "prompt_id": text, "data_source": text, "ability": text}
        for truth in (rf"\frac{{{text}}}{{", rf"\sqrt{{{text}}}", f"The end.\n#### {text}", [text], {text: text}, text):
            rows.append({**good, "prompt": writer.prompt(), "ground_truth": truth})
        rows += [{"prompt": [{"role": text, "content": text}]}, {"prompt": 3, "other": text}]
    return [*rows, *({text: text} for _, text in keys(52))]


def stepwise() -> Rows:
    writer = Writer(7)
    good = [
        {"prompt": writer.prompt(), "completions": [writer.answer(), writer.answer()], "labels": [True, False]}
        for _ in range(100)
    ]
    bad = [{**good[0], "prompt": writer.prompt(), "labels": [text, True]} for _, text in texts(53)]
    return [*good, *bad, *({**good[1], "completions": [text, {text: text}]} for _, text in texts(54))]


def ratings() -> Rows:
    def row(writer: Writer, first: Any, *others: str) -> dict[str, Any]:
        completions = [{"response": writer.answer(), "overall_score": score, "model": "m"} for score in (first, 2, 3)]
        return {"instruction": writer.prompt(), "completions": completions, "models": list(others)}

    writer = Writer(8)
    return [row(writer, 1 + n % 5) for n in range(200)] + [row(writer, text, text) for _, text in texts(55)]


def csv_text(columns: str, rows: list[str]) -> bytes:
    return "\n".join([columns, *rows, ""]).encode()


def write_files(folder: Path) -> dict[str, Path]:
    """Write every file and return them by name. Some are refused, in others rows are."""
    folder.mkdir(exist_ok=True)
    writer = Writer(9)
    clean = [f'"{pair["prompt"]}","{pair["chosen"]}","{pair["rejected"]}"' for pair in writer.pairs(150)]
    first = {kind: text.split("\n")[0] for kind, text in texts(60)}
    broken = [line for text in first.values() for line in (f'{text},"{text}"', f"a,b,c,{text}", f'"{text}" {text},b,c')]
    chats = [f"\"[{{'role': 'user', 'content': '{text}'}}]\",b,c" for text in first.values()]
    chats += [f'"[{{""role"": ""user"", ""role"": ""{text}""}}]",b,c' for text in first.values()]
    headless = [f"{text},{text} b,{text} c" for kind, text in first.items() if kind not in PUBLIC]
    lines = {
        "pairs": pair_rows(), "comparisons": comparisons(), "feedback": feedback(), "prompts": prompts(),
        "stepwise": stepwise(), "ratings": ratings(),
        "unknown": [{text: text, "body": text} for _, text in keys(61)],
        "no_json": [json.dumps(text)[1:-1].encode() for _, text in texts(62)],
        "mixed": [*writer.pairs(20), *({"text": text, "label": text} for _, text in texts(63))],
        "ambiguous": [{**writer.pair(), "completion": text, "label": text} for _, text in texts(64)],
    }  # fmt: skip
    for name, rows in lines.items():
        write_rows(folder / f"{name}.jsonl", rows)
    secret_pairs = [{**writer.pair(), "chosen": text, text: text} for _, text in keys(65)]
    files = {
        "table.csv": csv_text("prompt,chosen,rejected", [*clean, *broken, *chats]),
        "headless.csv": csv_text(headless[0], headless[1:]),
        "headed.csv": csv_text("prompt;" + ";".join(first.values()), [";".join(first.values())]),
        "unclosed.csv": csv_text("prompt,chosen,rejected", [*clean, *(f'"{text},b' for text in first.values())]),
        "list.json": json.dumps(secret_pairs)[:-1].encode(),
        "wrapped.json": json.dumps({"data": secret_pairs, **{text: [text] for _, text in keys(66)}}).encode(),
        "text.json": json.dumps({text: text for _, text in texts(67)}, indent=1).encode(),
        "cut.jsonl.gz": gzip.compress("\n".join(map(json.dumps, secret_pairs * 400)).encode())[:-5000],
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_tables(folder, writer)
    return {path.name: path for path in sorted(folder.iterdir())}


def write_tables(folder: Path, writer: Writer) -> None:
    """Write Parquet files: with texts of every kind, with values that cannot be read, and damaged."""
    rows = [*writer.pairs(150), *({**writer.pair(), "chosen": in_words(text)} for _, text in texts(68))]
    table = pa.Table.from_pylist(rows)
    kinds = [text for _, text in texts(69)]
    odd = pa.array([text.encode() + b"\xff" for text in kinds], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(odd), odd.buffers())
    columns = {name: table[name].slice(0, len(kinds)) for name in ("prompt", "rejected")}
    pq.write_table(pa.table({**columns, "chosen": broken, kinds[6]: pa.array(kinds)}), folder / "unreadable.parquet")
    pq.write_table(table, folder / "good.parquet", compression="none")
    content = bytearray((folder / "good.parquet").read_bytes())
    content[200:260] = b"\xee" * 60
    (folder / "damaged.parquet").write_bytes(content)
