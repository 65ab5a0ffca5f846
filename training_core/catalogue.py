"""Every table of names that a config chooses from, with what there is to say of each name.

Nothing is written here twice: names, knobs and defaults come from the config's unions, summaries, formulas, gradients
and sources from the docstrings of what is registered. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from training_core.config.advantages import AdvantageConfig
from training_core.config.aggregation import AggregationConfig
from training_core.config.algorithms import AlgorithmConfig
from training_core.config.kl import KlInLoss, KlInReward
from training_core.config.policy_losses import PolicyLossConfig
from training_core.config.preference import PairLossConfig
from training_core.config.reward_model import RewardLossConfig
from training_core.config.reward_parts import RewardPartConfig
from training_core.config.rewards import RewardConfig
from training_core.config.rollout import RolloutConfig
from training_core.config.sentinels import SentinelsConfig
from training_core.docstrings import Docs, function_docs, parse_docstring, registered_docs
from training_core.errors import ConfigurationError
from training_core.registry import nearest_name

Entry = dict[str, str]
"""`name`, `summary`, and what else the table has; what an entry does not have is left out."""

REWARD_LOSS_FUNCTIONS = {"bradley_terry": "bradley_terry", "regression": "squared_error", "ordinal": "ordinal"}
"""`reward_model.loss.kind` -> function of training_core/ops/reward_losses.py."""
CITATION = re.compile(r" ?\(([^()]*(?:arXiv|\d{4})[^()]*)\)")
MORE_WEIGHT = re.compile(r" More weight: (.+?)\.$")


@dataclass(frozen=True)
class Table:
    """One table."""

    name: str
    title: str
    """What its names are."""
    field: str
    """Where a config says which one."""
    read: Callable[[], list[Entry]]
    """Returns the entries in the order of the config."""
    note: str = ""
    """What the formulas' letters mean."""


def variants(union: Any, discriminator: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (name, config) of each variant of an annotated union."""
    for variant in get_args(get_args(union)[0]):
        yield get_args(variant.model_fields[discriminator].annotation)[0], variant


def knobs(variant: type[BaseModel], without: frozenset[str]) -> str:
    """Return `name = default` of a config's fields; a field without a default stands alone."""
    parts = []
    for name, field in variant.model_fields.items():
        if name in without:
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        parts.append(name if default is PydanticUndefined else f"{name} = {show_default(default)}")
    return ", ".join(parts)


def show_default(value: Any) -> str:
    """Return a default as YAML writes it; of a union's variant its name.

    >>> show_default(None), show_default(True), show_default(0.2), show_default("none"), show_default({})
    ('null', 'true', '0.2', 'none', '{}')
    """
    if isinstance(value, BaseModel):
        return str(getattr(value, next(iter(type(value).model_fields))))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def entry(name: str, docs: Docs, config: type[BaseModel] | None = None, **more: str) -> Entry:
    """Return an entry, its empty parts left out."""
    summary = docs.summary.removeprefix("Compute ")
    if re.match(r"[a-z]+ ", summary):  # Not a name like k3 or vLLM.
        summary = summary[:1].upper() + summary[1:]
    own = knobs(config, frozenset(RewardPartConfig.model_fields) | {"kind", "engine"}) if config else ""
    parts = {
        "summary": summary,
        "formula": docs.formula,
        **more,
        "knobs": own,
        "source": docs.sections.get("Source", ""),
    }
    return {"name": name, **{key: value for key, value in parts.items() if value}}


def config_docs(config: type[BaseModel]) -> Docs:
    """Return what a config's docstring says: its first paragraph, and the paper in its brackets as source."""
    summary = parse_docstring(config.__doc__ or "").summary
    cited = CITATION.search(summary)
    source = {"Source": cited[1] + "."} if cited else {}
    return Docs(summary=summary.replace(cited[0], "", 1) if cited else summary, sections=source)


def _of_union(union: Any, functions: dict[str, Docs]) -> list[Entry]:
    return [entry(name, functions.get(name) or config_docs(config), config) for name, config in variants(union, "kind")]


def _algorithms() -> list[Entry]:
    found = []
    for name, config in variants(AlgorithmConfig, "name"):
        parts = {part: _part(config, part) for part in ("advantage", "loss", "aggregation")}
        formula = function_docs("training_core.ops.preference_losses", "kto").formula if name == "kto" else ""
        docs = config_docs(config)
        found.append(entry(name, Docs(docs.summary, formula, docs.sections), None, **parts))
    return found


def _part(config: type[BaseModel], name: str) -> str:
    field = config.model_fields.get(name)
    if field is None:
        return ""
    return "any" if field.is_required() else show_default(field.default)


def _kl() -> list[Entry]:
    placed = {
        "reward": get_args(KlInReward.model_fields["estimator"].annotation),
        "loss": get_args(KlInLoss.model_fields["estimator"].annotation),
    }
    functions = {**registered_docs("KL_REWARDS"), **registered_docs("KL_LOSSES")}
    found = []
    for name in dict.fromkeys((*placed["reward"], *placed["loss"])):
        where = " or ".join(placement for placement, names in placed.items() if name in names)
        docs = functions[name]
        formula = docs.formula.replace(f"{docs.function} = ", f"{name} = ", 1)
        sections = {title: _by_registered_names(text, functions) for title, text in docs.sections.items()}
        gradient = sections.get("Gradient", "")
        found.append(entry(name, Docs(docs.summary, formula, sections), placement=where, gradient=gradient))
    return found


def _by_registered_names(text: str, functions: dict[str, Docs]) -> str:
    """Docstrings name functions, a config names what is registered."""
    for name, docs in functions.items():
        text = text.replace(f"`{docs.function}`", f"`{name}`")
    return text


def _aggregations() -> list[Entry]:
    functions = registered_docs("AGGREGATIONS")
    found = []
    for name, config in variants(AggregationConfig, "kind"):
        docs = functions[name]
        heavier = MORE_WEIGHT.search(docs.summary)
        plain = Docs(MORE_WEIGHT.sub("", docs.summary), docs.formula, docs.sections)
        found.append(entry(name, plain, config, more_weight=heavier[1] if heavier else ""))
    return found


def _reward_losses() -> list[Entry]:
    module = "training_core.ops.reward_losses"
    return _of_union(RewardLossConfig, {n: function_docs(module, f) for n, f in REWARD_LOSS_FUNCTIONS.items()})


def _engines() -> list[Entry]:
    return [entry(name, config_docs(config), config) for name, config in variants(RolloutConfig, "engine")]


def _sentinels() -> list[Entry]:
    found = []
    for name, field in SentinelsConfig.model_fields.items():
        config = field.annotation
        if isinstance(config, type) and issubclass(config, BaseModel) and "action" in config.model_fields:
            found.append(entry(name, config_docs(config), config))
    return found


TABLES = {
    table.name: table
    for table in (
        Table("algorithms", "how a policy is trained", "algorithm.name", _algorithms),
        Table(
            "advantages",
            "what an answer, or a token, is worth",
            "algorithm.advantage.kind",
            lambda: _of_union(AdvantageConfig, registered_docs("ADVANTAGE_ESTIMATORS")),
            "i is an answer, t a token. An answer without a score has no advantage and is left out; it is never a 0.",
        ),
        Table(
            "losses",
            "what an advantage does to a token's probability",
            "algorithm.loss.kind",
            lambda: _of_union(PolicyLossConfig, registered_docs("POLICY_LOSSES")),
            "A is the advantage, old_logprobs are the policy's before the step's first update, sg takes no gradient.",
        ),
        Table(
            "kl",
            "estimates of the distance to the reference",
            "algorithm.kl.estimator",
            _kl,
            "log_ratio is log policy - log reference of a sampled token, importance_log_ratio log policy - log of the "
            "policy that sampled.",
        ),
        Table(
            "aggregations",
            "how token losses become one number",
            "algorithm.aggregation.kind",
            _aggregations,
            "w is the weight of a token's loss in the optimizer step, over all its micro-batches and ranks; a row is "
            "an answer.",
        ),
        Table(
            "preference-losses",
            "losses of pairs, for `dpo`",
            "algorithm.loss.kind",
            lambda: _of_union(PairLossConfig, registered_docs("PREFERENCE_LOSSES")),
            "h is log policy - log reference of the chosen answer, minus that of the rejected one.",
        ),
        Table("reward-losses", "what a reward model learns from", "reward_model.loss.kind", _reward_losses),
        Table("rewards", "what an answer is rewarded for", "rewards[].kind", lambda: _of_union(RewardConfig, {})),
        Table("engines", "what samples answers", "rollout.engine", _engines),
        Table("sentinels", "what is watched in training", "algorithm.sentinels", _sentinels),
    )
}


def find_table(name: str) -> Table:
    """Return a table.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name in TABLES:
        return TABLES[name]
    near = nearest_name(name, list(TABLES))
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigurationError(f"there is no table {name!r}. Tables: {', '.join(TABLES)}.{hint}")
