"""The experts' part of a policy update: routing recorded before it, replayed in it, and the router losses.

Shapes: N answers of the step, L routers, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training_core.config.moe import MoeConfig
from training_core.metrics import MetricSums
from training_core.models.moe import RoutingRecord, record_routing, replay_routing, routers
from training_core.ops.aggregation import AllSum, keep
from training_core.ops.moe import load_fractions
from training_core.rl.routing import StepRouting, add_routing_metrics, load_metrics, router_losses
from training_core.rollout.batch import MicroBatch


class ExpertTerm:
    """Follows one step at a time: `begin_step`, `recording` around each pass before the updates, then for each update
    `begin_update` and `training` around each micro-batch's forward and backward pass.

    Args:
        config: what is asked for.
        policy: a mixture of experts.
        all_sum: sums counts over ranks.

    Raises:
        ConfigurationError: the policy has no experts, or routers that cannot be watched.
    """

    def __init__(self, config: MoeConfig, policy: PreTrainedModel, all_sum: AllSum = keep) -> None:
        routers(policy)
        self.config = config
        self.policy = policy
        self.all_sum = all_sum
        self._routing = StepRouting(0)
        self._fractions = torch.zeros(0, 0)
        self._num_tokens = 0.0

    def begin_step(self, num_answers: int) -> None:
        """Forget the step before."""
        self._routing = StepRouting(num_answers)

    @contextlib.contextmanager
    def recording(self, micro: MicroBatch) -> Iterator[None]:
        """Record the policy's routing of these rows: one forward pass of it runs within."""
        with record_routing(self.policy) as record:
            yield
        self._routing.store(micro, record)

    def begin_update(self, rows: Sequence[int]) -> None:
        """Count the shares of the experts for the rows of an update that go through the model, on all ranks."""
        if self.config.auxiliary_coefficient > 0.0:
            counts = self.all_sum(self._routing.counts(rows))
            self._fractions = load_fractions(counts, self._routing.num_chosen)
            self._num_tokens = float(counts[0].sum()) / self._routing.num_chosen

    @contextlib.contextmanager
    def training(self, micro: MicroBatch) -> Iterator[RoutingRecord]:
        """Watch, and with `replay` fix, the routing of one forward pass of the policy; open until its backward is done.

        Passes without gradient may run within: the reference's, be it the policy without its adapters.
        """
        with contextlib.ExitStack() as stack:
            record = stack.enter_context(record_routing(self.policy, torch.is_grad_enabled))
            if self.config.replay:
                calls = self._routing.for_replay(micro)
                stack.enter_context(replay_routing(self.policy, calls, torch.is_grad_enabled))
            yield record

    def loss(self, micro: MicroBatch, record: RoutingRecord, sums: MetricSums) -> Tensor | None:
        """Return this micro-batch's part of the update's router loss, None without one; add to the step's metrics.

        The parts add up to coefficient * mean over the update's tokens and routers, whatever the split.

        Args:
            micro: what went through the policy.
            record: of that pass. It is closed: the backward pass may run layers again.
            sums: takes `moe/auxiliary_loss`, `moe/router_entropy_nats` and, with replay, `moe/replay_changed_fraction`.

        Gradient:
            To routers and decoder.
        """
        record.is_open = False
        add_routing_metrics(sums, micro, record, self._routing if self.config.replay else None)
        if self.config.auxiliary_coefficient == 0.0:
            return None
        losses = router_losses(micro, record, self._fractions, self.config.z_coefficient)
        sums.add("moe/auxiliary_loss", float(losses.detach().double().sum()), len(losses))
        return self.config.auxiliary_coefficient * losses.sum() / self._num_tokens

    def step_metrics(self, num_answers: int) -> dict[str, float]:
        """Return how evenly the step's answer tokens were spread before its first update; see `load_metrics`."""
        return load_metrics(self.all_sum(self._routing.counts(range(num_answers))))
