"""What a scripted stage does: steps with checkpoints, metrics and progress, then small files as outputs.

The file named by SCRIPTED_STAGES holds `{stage: {steps, seconds, raise: [type, message], kill: n, hang: true, ...}}`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training_core import errors
from training_core.protocol.context import StageContext
from training_core.protocol.digests import config_digest, weights_digest
from training_core.records import StageOutcome

FOLDERS = {
    "sft_intake": ["model", "tokenizer"],
    "reward_model": ["reward_model"],
    "policy": ["policy"],
    "evaluate": ["evaluation"],
}
FILES = {
    "check_data": ["train_pairs", "validation_pairs", "rl_prompts", "eval_prompts", "quarantine"],
}


def run(context: StageContext) -> StageOutcome:
    script = json.loads(Path(os.environ["SCRIPTED_STAGES"]).read_text(encoding="utf-8")).get(context.spec.stage, {})
    digest = take_steps(context, script)
    act(context, script)
    return outcome(context, script, digest)


def take_steps(context: StageContext, script: dict[str, Any]) -> str:
    """A chain of digests: the last one depends on every step, as weights do."""
    total, store = script.get("steps", 1), context.checkpoints()
    latest = store.latest()
    step = latest.step if latest else 0
    digest = (latest.path / "digest.txt").read_text() if latest else context.spec.spec_hash
    context.metrics.truncate_after(step)
    with context.stop.deferred():
        while step < total:
            context.progress(step, total, "step")
            time.sleep(script.get("seconds", 0.0))
            digest, step = config_digest([digest, step]), step + 1
            context.metrics.write(step, {"reward/mean": step / total, "kl/policy_ref_nats": 0.25})
            if step % script.get("checkpoint_every", 1) == 0 or context.stop.requested:
                store.save(step, lambda path, text=digest: (path / "digest.txt").write_text(text))
            if context.stop.requested:
                context.stop.raise_preempted(f"stopped after step {step}")
        context.progress(total, total, "step")
    return digest


def act(context: StageContext, script: dict[str, Any]) -> None:
    """Whatever goes wrong, the first so many attempts."""
    attempts = len(json.loads(context.directory.environment_path.read_text())["attempts"])
    if attempts > script.get("bad_attempts", 1_000_000):
        return
    if "raise" in script:
        kind, message = script["raise"]
        raise getattr(errors, kind)(message)
    if "kill" in script:
        os.kill(os.getpid(), script["kill"])
    if "exit" in script:
        print(script.get("last_words", "no words"), file=sys.stderr, flush=True)
        os._exit(script["exit"])
    if "os_error" in script:
        raise OSError(script["os_error"], os.strerror(script["os_error"]), "weights.bin")
    if script.get("bug"):
        raise RuntimeError("a bug in a stage")
    if script.get("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A grandchild that ignores SIGTERM too: what a stage's own workers can be like.
        command = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", command])
        (context.directory.path / "grandchild").write_text(str(child.pid))
        time.sleep(600)


def outcome(context: StageContext, script: dict[str, Any], digest: str) -> StageOutcome:
    stage, outputs = context.spec.stage, {}
    for name in FOLDERS.get(stage, []):
        folder = context.new_output(name)
        folder.mkdir()
        (folder / "weights.safetensors").write_text(digest)
        outputs[name] = f"outputs/{name}"
    for name in FILES.get(stage, []):
        context.new_output(f"{name}.parquet").write_text(f"{name} {digest}")
        outputs[f"{name}.parquet"] = f"outputs/{name}.parquet"
    for name, text in script.get("files", {}).items():
        context.new_output(name).write_text(text)
        outputs[name] = f"outputs/{name}"
    summary: dict[str, Any] = {"digest": digest, **script.get("summary", {})}
    if stage in ("sft_intake", "reward_model", "policy"):
        summary["weights_sha256"] = weights_digest(context.directory.outputs_path / FOLDERS[stage][0])
    if stage == "sft_intake":
        summary["max_position_embeddings"] = 4096
    if stage == "gate":
        summary.update({"verdict": script.get("verdict", "pass"), "primary": {}, "guards": []})
        summary["reasons"] = script.get("reasons", [])
    if stage == "register":
        policy = weights_digest(context.input_path("policy"))
        summary.update({"model_name": "scripted", "version": "1", "aliases": ["champion"], "weights_sha256": policy})
    if stage in ("gate", "register"):
        name = "gate.json" if stage == "gate" else "registration.json"
        context.new_output(name).write_text(json.dumps(summary))
        outputs[name] = f"outputs/{name}"
    return StageOutcome(outputs=outputs, summary=summary)
