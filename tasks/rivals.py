"""The champion that a run's candidate has to beat: asked for once, noted in the run's record."""

from __future__ import annotations

from pathlib import Path

from tasks.planning import ChainState
from tasks.runs import ChampionEntry, RunRecord
from training_core.protocol.digests import path_digest
from training_core.records import Artifact


def adopt_champion(state: ChainState, record: RunRecord) -> None:
    """Take over the champion that a run's record holds."""
    state.champion_known = record.champion_known
    if record.champion is not None:
        state.champion = Artifact(path=record.champion.path, sha256=record.champion.sha256)


def ask_for_champion(state: ChainState) -> ChampionEntry | None:
    """Return the champion that the policy of a finished `grpo` stage has to beat, downloaded below the root, or None.

    Raises:
        ServerUnreachableError: the registry does not answer.
    """
    from tasks.registration import current_champion

    candidate = state.finished["grpo"].result.summary.get("weights_sha256")
    found = current_champion(state.config, state.root, state.root / "champions", candidate_sha256=candidate)
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
    from tasks.registration import current_champion

    candidate = state.finished["grpo"].result.summary.get("weights_sha256")
    folder = state.root / "champions"
    found = current_champion(state.config, state.root, folder, candidate_sha256=candidate, download=False)
    if found is None:
        return None
    path = Path(found["path"]).absolute() if found["path"] else None
    return str(found["version"]), None if path is None else Artifact(path=str(path), sha256=path_digest(path))
