"""`python -m tasks.guard MODULE ARGUMENTS…`: run a module as `python -m` does, and end when the parent is gone."""

import runpy
import sys

from training_core.protocol.child import watch_parent


def main(module: str, arguments: list[str]) -> None:
    watch_parent()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
