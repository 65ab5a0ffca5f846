"""SHA-256 of files, directories and configs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from training_core.errors import ArtifactError, DigestMismatchError

CHUNK_BYTES = 1 << 22


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: the text that config digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def config_digest(value: Any) -> str:
    return text_digest(canonical_json(value))


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def tree_files(path: Path) -> list[Path]:
    """Return all regular files below `path`, sorted by relative name."""
    return sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.relative_to(path).as_posix())


def tree_digest(path: Path, suffix: str = "") -> str:
    """Return one digest over the relative names and contents of all files below `path` whose name ends in `suffix`."""
    digest = hashlib.sha256()
    for file in tree_files(path):
        if file.name.endswith(suffix):
            digest.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\n".encode())
    return digest.hexdigest()


def path_digest(path: Path) -> str:
    """Return the digest of a file or of a directory tree.

    Raises:
        ArtifactError: nothing is there.
    """
    if path.is_dir():
        return tree_digest(path)
    if path.is_file():
        return file_digest(path)
    raise ArtifactError(f"{path} does not exist. Restore it, or run the stage that writes it again")


def weights_digest(model_directory: Path) -> str:
    """Return the digest of a model's weights alone: all *.safetensors files of its directory, members' too.

    Raises:
        ArtifactError: the directory holds no safetensors file.
    """
    if not any(model_directory.rglob("*.safetensors")):
        raise ArtifactError(f"{model_directory} holds no *.safetensors file, so it has no weights to identify")
    return tree_digest(model_directory, suffix=".safetensors")


def verify_digest(path: Path, expected: str, what: str) -> None:
    """Check that `path` still has the digest that was planned.

    Raises:
        ArtifactError: nothing is there.
        DigestMismatchError: the content is another one.
    """
    actual = path_digest(path)
    if actual != expected:
        raise DigestMismatchError(
            f"{what} at {path} changed since it was planned: expected sha256 {expected[:16]}…, found {actual[:16]}…. "
            "Restore the file, or run the command again to plan with the new content"
        )
