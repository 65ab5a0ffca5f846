"""Which experts the tokens of a step went to: recorded in one forward pass, counted, and replayed in others.

Only the positions that predict answer tokens count in losses and metrics: each answer token once, whether prompts are
shared by their answers or repeated. Replay covers the prompts too.

Shapes: N answers of the step, L routers, E experts, K experts a token; "tokens" are a micro-batch's answer tokens in
row-major order of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training_core.metrics import MetricSums
from training_core.models.moe import RoutingRecord
from training_core.ops.moe import (
    expert_counts,
    load_entropy,
    load_fractions,
    router_auxiliary_losses,
    router_entropies,
    router_z_losses,
)
from training_core.rl.layouts import PackedBatch
from training_core.rl.shared_prompt import SharedPromptBatch
from training_core.rollout.batch import MicroBatch

UNRECORDED = -1
"""In place of an expert: leave the choice to the router."""


@dataclass(frozen=True)
class Places:
    """Where the tokens of a micro-batch's rows are among the positions that go through the routers."""

    call_sizes: list[int]
    """Positions of each call of the decoder, padding included."""
    rows: list[Tensor]
    """[prompt + answer - 1] int64 for each row: its tokens but the last one, whose output nothing reads, as indices in
    all positions of all calls laid end to end. Rows that share a prompt share its indices."""
    num_prompt_tokens: list[int]

    def answers(self) -> Tensor:
        """Return [tokens] int64: the positions that predict answer tokens, in row-major order of the mask."""
        return torch.cat([row[num - 1 :] for row, num in zip(self.rows, self.num_prompt_tokens, strict=True)])


def places_of(micro: MicroBatch) -> Places:
    """Return where each row's tokens are in the layout of `micro`."""
    answer_lengths = micro.mask.sum(dim=1)
    first = answer_lengths.cumsum(dim=0) - answer_lengths
    prompt_lengths: list[int] = (micro.predict_positions[first] + 1).tolist()
    lengths: list[int] = answer_lengths.tolist()
    num_rows, width = micro.input_ids.shape
    if isinstance(micro, SharedPromptBatch):
        num_prompts, prompt_width = micro.prompt_ids.shape
        answer_width = micro.answer_ids.shape[1] - 1
        sizes = [num_prompts * prompt_width] + ([num_rows * answer_width] if answer_width else [])
        rows = [
            torch.cat([_span(prompt * prompt_width, num_prompt), _span(sizes[0] + row * answer_width, length - 1)])
            for row, (prompt, num_prompt, length) in enumerate(
                zip(micro.prompt_of_row.tolist(), prompt_lengths, lengths, strict=True)
            )
        ]
        return Places(sizes, rows, prompt_lengths)
    if isinstance(micro, PackedBatch):
        sizes = [micro.packed_ids.shape[1]]
        starts = (micro.packed_predict[first] - micro.predict_positions[first]).tolist()
    else:
        sizes = [num_rows * width]
        starts = [row * width for row in range(num_rows)]
    counts = [num_prompt + length - 1 for num_prompt, length in zip(prompt_lengths, lengths, strict=True)]
    return Places(sizes, [_span(*span) for span in zip(starts, counts, strict=True)], prompt_lengths)


def _span(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length)


class StepRouting:
    """The experts of every token of a step, from the recorded pass over it: 2 * L * K bytes a token, on the CPU.

    Args:
        num_answers: N.
    """

    def __init__(self, num_answers: int) -> None:
        self._routes: list[Tensor | None] = [None] * num_answers
        self._num_prompt_tokens = [0] * num_answers
        self._num_experts = 0

    def store(self, micro: MicroBatch, record: RoutingRecord) -> None:
        """Keep what the routers chose for these rows."""
        self._num_experts = record.logits()[0].shape[1]
        places = places_of(micro)
        choices = torch.stack([torch.cat(calls) for calls in record.layer_choices], dim=1).to(torch.int16).cpu()
        for row, index, num_prompt in zip(micro.rows.tolist(), places.rows, places.num_prompt_tokens, strict=True):
            self._routes[row] = choices[index]
            self._num_prompt_tokens[row] = num_prompt

    def for_replay(self, micro: MicroBatch) -> list[list[Tensor]]:
        """Return what `replay_routing` needs to send these rows to the experts of the recorded pass, in any layout.

        Raises:
            ValueError: a row was not recorded.
        """
        places = places_of(micro)
        routes = [self.route(row) for row in micro.rows.tolist()]
        full = torch.full((sum(places.call_sizes), *routes[0].shape[1:]), UNRECORDED, dtype=torch.int64)
        for index, route in reversed(list(zip(places.rows, routes, strict=True))):
            full[index] = route.long()  # Of a shared prompt, as its first row has it.
        return [list(call.unbind(dim=1)) for call in torch.split(full, places.call_sizes)]

    def route(self, row: int) -> Tensor:
        """Return [positions, L, K] int16 of answer `row` of the step: of its prompt and all but its last token.

        Raises:
            ValueError: it was not recorded.
        """
        route = self._routes[row]
        if route is None:
            raise ValueError(f"the routing of answer {row} was not recorded")
        return route

    def counts(self, rows: Sequence[int]) -> Tensor:
        """Return [L, E] float64: how often each expert was chosen for the answer tokens of `rows`.

        Those of several ranks add. Zeros for no rows, once any row was recorded.
        """
        empty = [route[:0] for route in self._routes if route is not None][:1]
        tokens = torch.cat([*empty, *(self.route(row)[self._num_prompt_tokens[row] - 1 :] for row in rows)])
        return torch.stack([expert_counts(tokens[:, layer], self._num_experts) for layer in range(tokens.shape[1])])

    @property
    def num_chosen(self) -> int:
        """K, once any row was recorded."""
        return next(int(route.shape[2]) for route in self._routes if route is not None)


def answer_router_logits(micro: MicroBatch, record: RoutingRecord) -> list[Tensor]:
    """Return [tokens, E] a router: its logits where answer tokens are predicted, with their gradient."""
    return [_at_answers(micro, calls) for calls in record.layer_logits]


def _at_answers(micro: MicroBatch, calls: Sequence[Tensor]) -> Tensor:
    """Return the values of answer tokens, row-major, from those of all positions of each call."""
    return torch.cat(list(calls))[places_of(micro).answers().to(calls[0].device)]


def router_losses(micro: MicroBatch, record: RoutingRecord, fractions: Tensor, z_coefficient: float = 0.0) -> Tensor:
    """Return [tokens]: the auxiliary loss of each answer token, the mean over the routers.

    The term of an optimizer update is its coefficient times the sum of these over the update's tokens, divided by how
    many tokens the update has on all ranks: the same for every split.

    Args:
        micro: what went through the model.
        record: of that pass.
        fractions: [L, E]: `load_fractions` of the counts of all rows of the update, on all ranks, that go through the
            model.
        z_coefficient: weight of the z-loss beside the load-balancing loss.

    Gradient:
        To router and decoder, through the logits. None through `fractions`.
    """
    losses = []
    for logits, shares in zip(answer_router_logits(micro, record), fractions, strict=True):
        balance = router_auxiliary_losses(logits, shares.to(logits.device))
        losses.append(balance + z_coefficient * router_z_losses(logits) if z_coefficient else balance)
    return torch.stack(losses).mean(dim=0)


@torch.no_grad()
def add_routing_metrics(
    sums: MetricSums, micro: MicroBatch, record: RoutingRecord, routing: StepRouting | None = None
) -> None:
    """Add means over the answer tokens and routers of a pass.

    - `moe/router_entropy_nats`: how undecided the routers are.
    - `moe/replay_changed_fraction`: choices of the routers that `routing`, which is replayed, overrules.
    """
    layers = answer_router_logits(micro, record)
    entropies = torch.stack([router_entropies(logits) for logits in layers])
    sums.add("moe/router_entropy_nats", float(entropies.sum()), entropies.numel())
    if routing is None:
        return
    replayed = [list(calls) for calls in zip(*routing.for_replay(micro), strict=True)]
    for own_calls, replayed_calls in zip(record.layer_choices, replayed, strict=True):
        own = _at_answers(micro, own_calls)
        kept = _at_answers(micro, replayed_calls).to(own.device)
        is_kept = (own[:, :, None] == kept[:, None, :]).any(dim=2)
        sums.add("moe/replay_changed_fraction", int((~is_kept).sum()), is_kept.numel())


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return how evenly a step's answer tokens are spread over the experts.

    - `moe/load_max_fraction`: share of the choices that the busiest expert of any layer gets; 1 / E at best.
    - `moe/load_entropy_nats`: entropy of the shares, mean over layers; log E at best.
    - `moe/idle_expert_fraction`: experts that no token chose.

    No token is dropped: the experts have no capacity limit.

    Args:
        counts: [L, E] from `StepRouting.counts`.
    """
    shares = load_fractions(counts, 1)
    return {
        "moe/load_max_fraction": float(shares.max()),
        "moe/load_entropy_nats": float(load_entropy(counts).mean()),
        "moe/idle_expert_fraction": float((counts == 0).double().mean()),
    }
