"""`python many_runs.py ROOT`: `tidegate run` again and again in one process, over one Prefect server.

What takes seconds every time is done once: imports, the server's start, and each stage process is a fork of one that
has imported torch and MLflow (zygote.py). A stage still is a process of its own that reads spec.json and writes
result.json.

Each line of standard input is `{"configs": [...], "settings": [...]}`; each answer is a line
`{"code": exit code, "view": the object of --json}`. Everything else goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULES = (
    "data_checks.stage",
    "mlflow.transformers",
    "tasks.registration",
    "training_core.rl.stage",
    "training_core.preference.stage",
    "training_core.stages.evaluate",
    "training_core.stages.gate",
    "training_core.stages.reward_model",
    "training_core.stages.sft_intake",
)
STAGE = """
import sys
from tasks.planning import PACKAGES
from training_core.protocol.child import main
sys.exit(main(sys.argv[2:], PACKAGES[sys.argv[1]]))
"""


class Stages:
    """Stands in for `tasks.launch.run_stage_process`: the same protocol, forked instead of started."""

    def __init__(self) -> None:
        zygote = [sys.executable, str(Path(__file__).with_name("zygote.py")), *MODULES]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self.process = subprocess.Popen(
            zygote, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, request: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def run(self, package: str, spec: Any, directory: Any, launch: Any, on_poll: Any) -> Any:
        from tasks.launch import refuse_if_running, stage_error

        refuse_if_running(directory)
        directory.prepare(spec)
        directory.error_path.unlink(missing_ok=True)
        arguments = [package, str(directory.spec_path.resolve())]
        pid = self.ask({"code": STAGE, "arguments": arguments, "errors": str(directory.output_log_path)})
        code = self.ask({"wait": pid})
        if code != 0:
            raise stage_error(spec.stage, code, directory)
        return directory.result()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def main(root: Path) -> None:
    from tasks.prefect_home import prefect_server, use_home

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stages = Stages()
    root.mkdir(parents=True, exist_ok=True)
    use_home(root)
    with prefect_server(root) as server:
        import tasks.dispatch
        from flows.commands.run import run_pipeline

        tasks.dispatch.run_stage_process = stages.run
        assert server is not None
        server.wait_until_ready()
        for line in sys.stdin:
            request = json.loads(line)
            files = [Path(name) for name in request["configs"]]
            answer = run_pipeline(files, request["settings"], root, as_json=True)
            print(json.dumps({"code": answer.exit_code, "view": answer.value}), file=answers, flush=True)
    stages.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
