"""`tidegate`: parses, calls, prints. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.errors import exit_code_of
from flows.commands.output import Answer
from flows.commands.streams import guard_streams

app = typer.Typer(
    name="tidegate",
    help="From an SFT checkpoint and preference data to a registered model, only when it is measurably better.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG...", help="YAML files, merged left to right: what a later one says counts."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Set one field, after the files. May be given several times."),
]
Root = Annotated[
    str | None,  # Not Path: an empty text would silently be the current folder.
    typer.Option(
        "--root",
        metavar="FOLDER",
        help="Folder for everything that runs write. Default: TIDEGATE_ROOT, the config, .tidegate",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on standard output, with `error` in it when something went wrong; all else goes to "
        "standard error.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Another one is taken if it is in use.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run id, the start of one, or `latest`.")]


@app.command()
def run(configs: Configs, settings: Settings = None, root: Root = None, as_json: AsJson = False) -> Answer:
    """Run the pipeline. The same command again continues: what is complete is not done twice."""
    from flows.commands.run import run_pipeline

    return run_pipeline(configs, settings or [], root, as_json=as_json)


@app.command()
def plan(configs: Configs, settings: Settings = None, root: Root = None, as_json: AsJson = False) -> Answer:
    """Say what a run would do: which stages are cached, continue, run or wait, and why."""
    from flows.commands.plan import print_plan

    return print_plan(configs, settings or [], root, as_json=as_json)


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A data file, a `datasets` folder, or a hub id.")],
    format_: Annotated[
        str, typer.Option("--format", help="How rows are laid out. Default: told from the columns.")
    ] = "auto",
    ties: Annotated[str | None, typer.Option(help="`drop` or `keep` pairs in which nothing is preferred.")] = None,
    label: Annotated[str | None, typer.Option(help="Which of several judgements counts.")] = None,
    score: Annotated[str | None, typer.Option(help="Which of several ratings counts.")] = None,
    rating_threshold: Annotated[float | None, typer.Option(help="Ratings from here on are good.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Of the model to be trained: then lengths and control tokens are checked."),
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="OLD", help="An older version to compare with.")] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the rows that are kept to NAME.fixed.jsonl beside it.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="PAGE", help="Write an HTML page.")] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Put a few rows' texts into the page, folded.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write canonical tables, quarantine and report to a new folder."),
    ] = None,
    data_docs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write Great Expectations' Data Docs to a new folder.")
    ] = None,
    every_check: Annotated[bool, typer.Option("--all", help="Also list what passed or was skipped.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> Answer:
    """Check a data file: what is in it, what would be trained on, what would not, and why. Exit code 3: not fit."""
    from flows.commands.check import CheckOptions, check_file

    options = CheckOptions(
        file=file,
        format=format_,
        ties=ties,
        label=label,
        score=score,
        rating_threshold=rating_threshold,
        settings=settings or [],
        tokenizer=tokenizer,
        against=against,
        fix=fix,
        html=html,
        output=output,
        show_text=show_text,
        every_check=every_check,
        data_docs=data_docs,
    )
    return check_file(options, as_json=as_json)


@app.command()
def show(run_name: RunName = "latest", root: Root = None, as_json: AsJson = False) -> Answer:
    """Show one run: its stages, the gate's verdict, the registered model."""
    from flows.commands.show import print_run

    return print_run(run_name, root, as_json=as_json)


@app.command("list")
def list_(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE",
            help="What a config can choose: algorithms, advantages, losses, kl, aggregations, preference-losses, "
            "reward-losses, rewards, engines or sentinels; `tables` says what each of them holds.",
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> Answer:
    """List the runs under the root, the one that changed last first; or what a config can choose from."""
    if table is not None:
        from flows.commands.list import print_table

        return print_table(table, as_json=as_json)
    from flows.commands.show import print_runs

    return print_runs(root, as_json=as_json)


@app.command()
def report(
    run_name: RunName = "latest",
    root: Root = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Its name ends in .html or .htm. Default: report.html by run.json."
        ),
    ] = None,
) -> None:
    """Write a run's report: one HTML file that needs no network."""
    from flows.commands.show import write_run_report

    write_run_report(run_name, root, output)


@app.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    import json

    from flows.config import pipeline_schema

    print(json.dumps(pipeline_schema(), indent=2))


@app.command()
def ui(
    root: Root = None,
    mlflow_port: Port = 5000,
    prefect_port: Port = 4200,
) -> None:
    """Serve MLflow and Prefect on this machine over the root, until Ctrl-C."""
    from flows.commands.ui import serve

    serve(root, mlflow_port, prefect_port)


@app.command()
def doctor(root: Root = None, as_json: AsJson = False) -> Answer:
    """Look at versions, devices, disk, servers and runs, and say what is wrong.

    Exit code: 0 when all is in order, 2 when something has to be installed or corrected, 4 when a file of a run is
    damaged, 75 when it may pass by itself (a server is down, little disk is free). The first that applies counts.
    """
    from flows.commands.doctor import examine

    return examine(root, as_json=as_json)


def main() -> None:
    """Entry point of the `tidegate` script."""
    guard_streams()
    code = exit_code_of(app, sys.argv[1:])
    gc.freeze()  # At the end Python would search all there is for cycles: a second after a large check, for nothing.
    sys.exit(code)


if __name__ == "__main__":
    main()
