"""Statements that need rows side by side: repeats, contradictions, prompts on both sides, groups that dominate."""

from __future__ import annotations

from collections.abc import Sequence

from data_checks.checks.metrics_sql import KEPT, PREFIXES, rows_where, total

SPLIT_TABLES = ("preferences", "feedback")
"""Kinds of which a part is held out; the rest of training (RL prompts) has none."""


def pair_repeats(table: str = "preferences") -> str:
    """Return SQL of how many kept pairs repeat an earlier one, and how many contradict one.

    Answers that differ in case and whitespace only have one key, and contradict nothing; a tie contradicts nothing, and
    neither do two people.
    """
    forward = "chosen_key <= rejected_key and not coalesce(is_tie, false)"
    backward = "chosen_key > rejected_key and not coalesce(is_tie, false)"
    votes = (
        "select prompt_key, case when chosen_key <= rejected_key then chosen_key else rejected_key end as low_key, "
        "case when chosen_key <= rejected_key then rejected_key else chosen_key end as high_key, "
        f"{rows_where(forward)} as forward, {rows_where(backward)} as backward "
        f"from {table} where {KEPT} group by 1, 2, 3, annotator"
    )
    return (
        f"with votes as ({votes}) select "
        f"{total('forward - 1', 'forward > 1')} + {total('backward - 1', 'backward > 1')} as duplicate_rows_kept, "
        f"{total('forward + backward', 'forward > 0 and backward > 0')} as conflicting_rows_kept from votes"
    )


def feedback_repeats(table: str = "feedback") -> str:
    """Return SQL of how many kept judgements repeat an earlier one, and how many have the other label elsewhere."""
    judged = (
        "select prompt_key, chosen_key, label, rating, annotator, count(*) as num_rows "
        f"from {table} where {KEPT} group by prompt_key, chosen_key, label, rating, annotator"
    )
    answers = (
        f"select cast(sum(num_rows - 1) as bigint) as repeats, {total('num_rows', 'label')} as good, "
        f"{total('num_rows', 'not label')} as bad from judged group by prompt_key, chosen_key, annotator"
    )
    return (
        f"with judged as ({judged}), answers as ({answers}) select "
        "cast(coalesce(sum(repeats), 0) as bigint) as duplicate_rows_kept, "
        f"{total('good + bad', 'good > 0 and bad > 0')} as conflicting_rows_kept from answers"
    )


def prompt_repeats(table: str) -> str:
    """Return SQL of how many kept prompts of a file repeat an earlier one."""
    return (
        "select cast(count(*) as bigint) - cast(count(distinct prompt_key) as bigint) as duplicate_rows_kept "
        f"from {table} where {KEPT}"
    )


def prompt_groups(tables: Sequence[str]) -> str:
    """Return SQL of one row on the prompts of all kinds together: who is on which side, and which are the largest.

    A prompt is an evaluation prompt when it is in the file of them; without that file, when it is held out.
    """
    held_out = "side = 'eval_prompts'" if "eval_prompts" in tables else "side = 'validation'"
    rows = " union all ".join(_sides(table) for table in tables)
    columns = {"train": "side = 'train'", "validation": "side = 'validation'", "evaluation": held_out}
    # RL may use the prompts of validation pairs, which are held out of the reward model's training alone.
    columns["trained"] = "side in ('train', 'rl_prompts')"
    columns |= {f"{table}_rows": f"of_kind = '{table}'" for table in tables}
    counted = ", ".join(f"{rows_where(condition)} as {name}" for name, condition in columns.items())
    grouped = (
        "select group_key, min(cluster_key) as cluster_key, count(cluster_key) as num_clustered, "
        f"{counted} from ({rows}) r group by group_key"
    )
    clusters = (
        "select cluster_key, cast(sum(train) as bigint) as train, cast(sum(validation) as bigint) as validation, "
        "cast(sum(evaluation) as bigint) as evaluation, cast(sum(trained) as bigint) as trained, "
        "count(*) as num_prompts from prompts "
        "where cluster_key is not null group by cluster_key"
    )
    listed = ", ".join(
        f"cast(coalesce(max({table}_rows), 0) as bigint) as {PREFIXES[table]}largest_prompt_rows, "
        f"{rows_where(f'{table}_rows > 0')} as {PREFIXES[table]}num_prompts"
        for table in tables
    )
    of_prompts = (
        f"select count(*) as num_all_prompts, {rows_where('train > 0 and validation > 0')} as prompts_on_both_sides, "
        f"{rows_where('trained > 0 and evaluation > 0')} as evaluation_prompts_trained_on, "
        f"{rows_where('evaluation > 0')} as num_eval_groups, "
        f"cast(coalesce(sum(num_clustered), 0) as bigint) as num_clustered_rows, {listed} from prompts"
    )
    both = "train > 0 and validation > 0"
    of_clusters = (
        f"select count(*) as num_clusters, {rows_where('num_prompts > 1')} as num_clusters_of_several, "
        f"{total('train + validation', both)} as clustered_rows_on_both_sides, "
        f"{total('train + validation', 'num_prompts > 0')} as clustered_rows, "
        f"{rows_where('trained > 0 and evaluation > 0')} as evaluation_clusters_trained_on from clusters"
    )
    return (
        f"with prompts as ({grouped}), clusters as ({clusters}), of_prompts as ({of_prompts}), "
        f"of_clusters as ({of_clusters}) select * from of_prompts cross join of_clusters"
    )


def _sides(table: str) -> str:
    side = "split" if table in SPLIT_TABLES else f"'{table}'"
    return f"select group_key, cluster_key, {side} as side, '{table}' as of_kind from {table} where {KEPT}"


def annotators(table: str = "preferences", min_rows: int = 20, limit: int = 10_000) -> str:
    """Return SQL of one row an annotator with enough rows: how many, and how often the first answer was chosen."""
    return (
        f"select annotator, count(*) as num_rows, {rows_where('chosen_position = 1')} as num_first from {table} "
        f"where {KEPT} and not coalesce(is_tie, false) and chosen_position is not null and annotator is not null "
        f"group by annotator having count(*) >= {min_rows} order by num_rows desc, annotator limit {limit}"
    )


def over_long(table: str, max_total_tokens: int) -> str:
    """Return SQL of how often prompt and answer are too long together, by side, over rows whose tokens are known."""
    known = "prompt_tokens is not null and chosen_tokens is not null and rejected_tokens is not null"
    chosen, rejected = (
        f"{known} and prompt_tokens + {side}_tokens > {int(max_total_tokens)}" for side in ("chosen", "rejected")
    )
    return (
        f"select {rows_where(known)} as num_rows, {rows_where(chosen)} as num_chosen, "
        f"{rows_where(rejected)} as num_rejected, "
        f"{rows_where(f'({chosen}) <> ({rejected})')} as num_one_side from {table}"
    )


def number(value: float) -> str:
    """Return a double as SQL that every engine reads as one.

    >>> number(0.5)
    '5.00000000000000000e-01'
    """
    return f"{value:.17e}"


def out_of_range(table: str, column: str, low: float, high: float) -> str:
    """Return SQL of one row a file: how many rows have a number, and how many have one outside [low, high]."""
    outside = f"{column} is not null and ({column} < {number(low)} or {column} > {number(high)})"
    return (
        f"select file, {rows_where(f'{column} is not null')} as num_rows, {rows_where(outside)} as num_outside "
        f"from {table} group by file"
    )
