"""Files from outside: what stands for their paths in specs and hashes."""

from __future__ import annotations

import shutil
from typing import Any

from scripted_stages.chain import config_of

from tasks.inputs import external_files, with_absolute_paths, without_folders
from tasks.planning import ChainState
from training_core.protocol.digests import path_digest

ROW = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'
FILES = ("a/train.jsonl", "b/train.jsonl", "c/train.jsonl", "more.jsonl")


def collide(space: Any) -> Any:
    """Return a config with three data files of one name and one of another."""
    for number, name in enumerate(FILES):
        (space.path / name).parent.mkdir(exist_ok=True)
        (space.path / name).write_text(ROW * (number + 1))
    return config_of(
        space,
        "data.preferences=[{path: a/train.jsonl}, {path: b/train.jsonl, format: pairs}, {path: more.jsonl}]",
        "data.rl_prompts=c/train.jsonl",
    )


def test_data_files_of_one_name_get_their_inputs_name(scripted: Any) -> None:
    config = collide(scripted)
    portable = {file.input_name: file.portable for file in external_files(config) if file.stage == "check_data"}
    assert portable == {
        "preferences_0": "preferences_0/train.jsonl",
        "preferences_1": "preferences_1/train.jsonl",
        "preferences_2": "more.jsonl",
        "rl_prompts": "rl_prompts/train.jsonl",
    }
    data = without_folders(config, config.identity())["data"]
    assert [file["path"] for file in data["preferences"]] == list(portable.values())[:3]
    assert data["rl_prompts"] == portable["rl_prompts"]
    assert config.data.preferences[0].path == "a/train.jsonl"


def test_no_hash_sees_a_folder(scripted: Any) -> None:
    config = collide(scripted)
    before = ChainState.begin(config)
    absolute = with_absolute_paths(config)
    assert absolute.data.rl_prompts == str(scripted.path / "c/train.jsonl")
    assert absolute.checkpoint.source == str(scripted.path / "model")
    assert ChainState.begin(absolute).run_id == before.run_id
    shutil.move(scripted.path / "a", scripted.path / "elsewhere")
    moved = config.model_dump(mode="json")
    moved["data"]["preferences"][0]["path"] = "elsewhere/train.jsonl"
    assert ChainState.begin(type(config).model_validate(moved)).run_id == before.run_id
    (scripted.path / "b/train.jsonl").write_text(ROW * 9)
    assert ChainState.begin(type(config).model_validate(moved)).run_id != before.run_id


def test_a_folder_of_datasets_is_a_file_like_others(scripted: Any) -> None:
    """Its digest is of all that lies in it, and no hash sees where it lies."""
    import datasets

    folder = scripted.path / "one" / "saved"
    datasets.Dataset.from_dict({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"]}).save_to_disk(folder)
    config = config_of(scripted, "data.preferences=[{path: one/saved}]")
    state = ChainState.begin(config)
    assert state.external["data.preferences.0.path"].sha256 == path_digest(folder)
    assert state.portable_config["data"]["preferences"][0]["path"] == "saved"
    shutil.move(scripted.path / "one", scripted.path / "two")
    elsewhere = config_of(scripted, "data.preferences=[{path: two/saved/}]")
    assert ChainState.begin(elsewhere).run_id == state.run_id
    (scripted.path / "two" / "saved" / "more").write_text("x")
    assert ChainState.begin(elsewhere).run_id != state.run_id
