"""A process that has imported the slow libraries once and forks a real process for each request.

`python zygote.py MODULE...` reads one JSON object a line: `{"code", "arguments", "errors"}` starts a process that runs
`code` with these arguments and standard error in the file `errors`, and answers its id; `{"wait": id}` answers its
return code, negative for a signal.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback


def run(request: dict) -> None:
    """In the fork: never returns."""
    code = 70
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 2)
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["-c", *request["arguments"]]
        exec(compile(request["code"], "<request>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                run(request)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
