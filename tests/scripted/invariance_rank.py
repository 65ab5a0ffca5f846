"""One rank of the invariance test: its rows' part of each case's gradient, added up over all ranks.

usage: invariance_rank.py FOLDER TEST_FILE NUM_RANKS RANK
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from invariance import GROUP_SIZE, GROUPS, build_scored, build_step_signal, build_updater, gradients_of

from training_core.rl.layouts import Layout

ROWS = {2: [[0, 1, 2, 3, 4, 8], [5, 6, 7]], 3: [[1], [0, 3, 4, 5, 8], [2, 6, 7]]}
"""Rows of each rank: unequal numbers of tokens, and groups that lie on several ranks."""


def sum_over_ranks(counts: torch.Tensor) -> torch.Tensor:
    total = counts.clone()
    dist.all_reduce(total)
    return total


def main(folder: Path, test_file: str, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=num_ranks)
    spec = importlib.util.spec_from_file_location("invariance_cases", test_file)
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    found = {}
    for case in json.loads((folder / "cases.json").read_text()):
        updater = build_updater(cases.config_of(tuple(case)), sum_over_ranks)
        updater.layout = Layout("padded", GROUPS * GROUP_SIZE, None)
        signal = build_step_signal(updater, build_scored())
        gradients = gradients_of(updater, signal, ROWS[num_ranks][rank])
        for name, parameter in updater.policy.named_parameters():
            gradients.setdefault(f"policy.{name}", torch.zeros_like(parameter))
        if updater.critic is not None:
            for name, parameter in updater.critic.model.named_parameters():
                gradients.setdefault(f"critic.{name}", torch.zeros_like(parameter))
        found["-".join(case)] = {name: sum_over_ranks(gradients[name]) for name in sorted(gradients)}
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
