"""What a run asks the registry: whom its candidate has to beat, and whether what it registered is still there."""

from __future__ import annotations

from pathlib import Path

from tasks import champion
from tasks.planning import ChainState
from tasks.runs import ChampionEntry, RunRecord
from training_core.protocol.digests import path_digest
from training_core.records import Artifact


def adopt_champion(state: ChainState, record: RunRecord) -> None:
    """Take over the champion that a run's record holds, or that there is none."""
    state.champion_known, found = record.champion_known, record.champion
    state.champion = None if found is None else Artifact(path=found.path, sha256=found.sha256)


def is_registered(state: ChainState, *, read_only: bool = False) -> bool:
    """Return whether the registry still has what the finished stage `register` registered.

    Args:
        read_only: write nothing anywhere, not even a lock file.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    summary = state.finished["register"].result.summary
    return champion.verify_registration(state.config, state.root, summary, read_only=read_only)


def ask_for_champion(state: ChainState) -> ChampionEntry | None:
    """Return the champion that the policy of a finished `policy` stage has to beat, downloaded below the root, or None.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    candidate = state.finished["policy"].result.summary.get("weights_sha256")
    found = champion.current_champion(state.config, state.root, state.root / "champions", candidate_sha256=candidate)
    if found is None:
        return None
    path = Path(found["path"]).absolute()
    return ChampionEntry(
        version=str(found["version"]),
        weights_sha256=found["weights_sha256"],
        path=str(path),
        sha256=path_digest(path),
    )


def look_at_champion(state: ChainState) -> tuple[str, Artifact | None] | None:
    """Return (version, files) of that champion without writing anything; files are None before their download.

    None: there is none.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    candidate = state.finished["policy"].result.summary.get("weights_sha256")
    folder = state.root / "champions"
    found = champion.current_champion(state.config, state.root, folder, candidate_sha256=candidate, download=False)
    if found is None:
        return None
    path = Path(found["path"]).absolute() if found["path"] else None
    return str(found["version"]), None if path is None else Artifact(path=str(path), sha256=path_digest(path))
