"""`python -m scripted_stages.driver ARGUMENTS…`: the `tidegate` command over scripted stages."""

import os

from tasks.prefect_home import use_home

if __name__ == "__main__":
    from pathlib import Path

    use_home(Path(os.environ["TIDEGATE_ROOT"]))  # As the command does, before anything imports Prefect.
    from scripted_stages.replace import replacements

    for owner, name, value in replacements():
        setattr(owner, name, value)
    from flows.cli import main

    main()
