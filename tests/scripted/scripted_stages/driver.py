"""`python -m scripted_stages.driver ARGUMENTS…`: the `tidegate` command over scripted stages."""

import sys

from scripted_stages.replace import replacements

from flows.cli import main

if __name__ == "__main__":
    for owner, name, value in replacements():
        setattr(owner, name, value)
    # As in the real command: Prefect reads its settings when it is imported, so nothing may import it before its home
    # and server are known.
    assert "prefect" not in sys.modules
    main()
