"""One rank of the invariance test: its rows' part of each case's gradient, added up over all ranks.

usage: invariance_rank.py FOLDER TEST_FILE RANK

Three processes meet; the first two of them are the two ranks of the smaller world as well.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from invariance import GROUP_SIZE, GROUPS, Gradients, build_scored, build_step_signal, build_updater, gradients_of

from training_core.rl.layouts import Layout

ROWS = {2: [[0, 1, 2, 3, 4, 8], [5, 6, 7]], 3: [[4], [0, 1, 3, 5, 8], [2, 6, 7]]}
"""Rows of each rank: unequal numbers of tokens, groups that lie on several ranks, and a rank whose only answer has no
score: it has nothing to learn from, and must be asked for its counts all the same."""


def summed_over(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def all_sum(counts: torch.Tensor) -> torch.Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=group)
        return total

    return all_sum


def gradients_over_ranks(config: Any, all_sum: Any, rows: list[int]) -> Gradients:
    updater = build_updater(config, all_sum)
    updater.layout = Layout("padded", GROUPS * GROUP_SIZE, None)
    gradients = gradients_of(updater, build_step_signal(updater, build_scored()), rows)
    for name, parameter in updater.policy.named_parameters():
        gradients.setdefault(f"policy.{name}", torch.zeros_like(parameter))
    if updater.critic is not None:
        for name, parameter in updater.critic.model.named_parameters():
            gradients.setdefault(f"critic.{name}", torch.zeros_like(parameter))
    return {name: all_sum(gradients[name]) for name in sorted(gradients)}


def main(folder: Path, test_file: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=3)
    worlds = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    spec = importlib.util.spec_from_file_location("invariance_cases", test_file)
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    found: dict[int, dict[str, Gradients]] = {2: {}, 3: {}}
    for case in map(tuple, json.loads((folder / "cases.json").read_text())):
        for num_ranks, group in worlds.items():
            if rank < num_ranks:
                rows = ROWS[num_ranks][rank]
                found[num_ranks]["-".join(case)] = gradients_over_ranks(cases.config_of(case), summed_over(group), rows)
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
