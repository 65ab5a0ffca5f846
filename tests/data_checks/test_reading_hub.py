"""Data sets of the hub, with the library's two network calls replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest

from data_checks.reading import hub, is_hub_id, iter_rows
from training_core.errors import ConfigurationError, ServerUnreachableError, TidegateError

ROWS = [{"prompt": f"p{index}", "chosen": "a", "rejected": None} for index in range(5)]
SPLITS = {"org/one": ["train"], "org/two": ["train", "test"]}


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def split_names(identifier: str) -> list[str]:
        if identifier == "org/down":
            raise httpx.ConnectError("no route")
        if identifier == "org/configs":
            raise ValueError("Config name is missing. Please pick one among the available configs: ['a', 'b']")
        if identifier not in SPLITS:
            raise datasets.exceptions.DatasetNotFoundError("not there")
        return SPLITS[identifier]

    def load(identifier: str, split: str) -> Any:
        assert identifier in SPLITS
        return datasets.Dataset.from_list([{**row, "split": split} for row in ROWS])

    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    monkeypatch.setattr(datasets, "load_dataset", load)


def read(text: str) -> list[Any]:
    return [row for rows in iter_rows(Path(text), text, f"data.x: {text}") for row in rows]


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("text", "split"),
    [("org/one", "train"), ("hf://org/one", "train"), ("org/two:test", "test"), ("hf://org/two:train", "train")],
)
def test_a_data_set_is_read_like_a_file(text: str, split: str) -> None:
    expected = [{"prompt": row["prompt"], "chosen": "a", "split": split} for row in ROWS]
    assert [row.value for row in read(text)] == expected


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("org/two", ConfigurationError, "has several splits. Name one: org/two:train, org/two:test"),
        ("org/two:dev", ConfigurationError, "has no split 'dev'. Name one: org/two:train, org/two:test"),
        ("org/none", ConfigurationError, "there is no data set org/none on the hub"),
        ("org/configs", ConfigurationError, "cannot be loaded .Config name is missing.*Download one of its files"),
        ("org/down", ServerUnreachableError, "the hub does not answer .ConnectError"),
    ],
)
def test_why_a_data_set_is_not_read(text: str, error: type[TidegateError], message: str) -> None:
    with pytest.raises(error, match=rf"^data\.x: {text}.*{message}"):
        read(text)


@pytest.mark.parametrize("variable", hub.OFFLINE_VARIABLES)
def test_offline_says_so_without_asking(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=rf"^data\.x: org/one does not exist here, and .*{variable} is set"):
        read("org/one")


def test_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="is a folder"):
        read("org/one")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("a/b", True),
        ("a/b.jsonl", False),
        ("./a/b", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("hf://a/b.jsonl", True),
    ],
)
def test_what_can_name_a_data_set(text: str, is_id: bool) -> None:
    assert is_hub_id(text) == is_id
