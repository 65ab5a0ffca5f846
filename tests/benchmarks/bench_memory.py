"""Peak memory of log-probabilities, forward and backward: in chunks (Tidegate's) beside plain logits.

    make bench-memory        or        python tests/benchmarks/bench_memory.py

Each way runs in a process of its own, once in each format of the matrix product. The ratio is of what the computation
adds to the process that holds its inputs. In float32 the gradients of both ways are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from training_core.protocol.atomic import write_json

MIB = 2**20
WAYS = ("plain", "chunked")
FORMATS = ("float32", "bfloat16")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of each row")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the matrix product: float32, bfloat16")
    parser.add_argument("--output", default=".bench/memory.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", nargs=3, metavar=("WAY", "FORMAT", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def compute(options: argparse.Namespace, way: str, number_format: str, folder: Path) -> None:
    """Do one forward and backward pass; leave the gradients in `folder`."""
    import torch

    from training_core.memory import release_free_memory
    from training_core.ops.logprobs import token_logprobs

    generator = torch.Generator().manual_seed(0)
    count = options.rows * options.tokens
    hidden = torch.randn(count, options.width, generator=generator).requires_grad_(True)
    weight = (torch.randn(options.vocabulary, options.width, generator=generator) * 0.05).requires_grad_(True)
    targets = torch.randint(0, options.vocabulary, (count,), generator=generator)
    upstream = torch.randn(count, generator=generator)
    dtype = getattr(torch, number_format)
    # What a process pays once, whatever the size: thread pools and compiled kernels.
    token_logprobs(hidden[:2], weight[:2], targets[:2] % 2, matmul_dtype=dtype)[0].sum().backward()
    hidden.grad = weight.grad = None
    release_free_memory()
    # The kernel's own high-water mark, begun anew: nothing between two samples is missed.
    Path("/proc/self/clear_refs").write_text("5")
    start, before = time.monotonic(), status_bytes("VmRSS")
    if way == "chunked":
        logprobs, _ = token_logprobs(hidden, weight, targets, matmul_dtype=dtype, with_entropy=False)
    else:
        shaped = hidden.view(options.rows, options.tokens, options.width)
        logits = shaped.to(dtype) @ weight.to(dtype).T
        shaped_targets = targets.view(options.rows, options.tokens, 1)
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, shaped_targets).flatten()
        del logits
    (logprobs * upstream).sum().backward()
    found = {"peak_mib": (status_bytes("VmHWM") - before) / MIB, "seconds": time.monotonic() - start}
    (folder / "found.json").write_text(json.dumps(found))
    if number_format == "float32":
        numpy.save(folder / "hidden.npy", hidden.grad.numpy())
        numpy.save(folder / "weight.npy", weight.grad.numpy())


def run_way(options: argparse.Namespace, way: str, number_format: str, folder: Path) -> dict[str, float]:
    """Return MiB added at the peak, and seconds.

    Raises:
        SystemExit: the process failed, for want of memory say.
    """
    folder.mkdir()
    sizes = [f"--{name}={getattr(options, name)}" for name in ("vocabulary", "width", "rows", "tokens")]
    command = [sys.executable, __file__, *sizes, "--child", way, number_format, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": str(options.threads)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{way} {number_format} ended with exit code {done.returncode}: {done.stderr}")
    found: dict[str, float] = json.loads((folder / "found.json").read_text())
    return found


def status_bytes(name: str) -> int:
    """Return a size of this process from /proc: VmRSS what it holds, VmHWM the most since the mark was cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not report {name}")


def difference(first: Path, second: Path) -> float:
    """Return the norm of the difference of two saved gradients over the norm of the first."""
    one, other = numpy.load(first).astype("float64"), numpy.load(second).astype("float64")
    return float(numpy.linalg.norm(one - other) / numpy.linalg.norm(one))


def main(arguments: Sequence[str]) -> dict[str, Any]:
    options = parse(arguments)
    if options.child:
        way, number_format, folder = options.child
        compute(options, way, number_format, Path(folder))
        return {}
    result: dict[str, Any] = {
        "shape": {name: getattr(options, name) for name in ("vocabulary", "width", "rows", "tokens")}
    }
    with tempfile.TemporaryDirectory() as place:
        for number_format in options.formats.split(","):
            folders = {way: Path(place) / f"{way}-{number_format}" for way in WAYS}
            found: dict[str, Any] = {way: run_way(options, way, number_format, path) for way, path in folders.items()}
            found["ratio"] = found["chunked"]["peak_mib"] / found["plain"]["peak_mib"]
            if number_format == "float32":
                found["relative_gradient_difference"] = {
                    name: difference(folders["plain"] / f"{name}.npy", folders["chunked"] / f"{name}.npy")
                    for name in ("hidden", "weight")
                }
            result[number_format] = found
            print(
                f"{number_format}: plain {found['plain']['peak_mib']:.0f} MiB in {found['plain']['seconds']:.1f} s, "
                f"chunked {found['chunked']['peak_mib']:.0f} MiB in {found['chunked']['seconds']:.1f} s, ratio "
                f"{found['ratio']:.3f} {found.get('relative_gradient_difference', '')}",
                flush=True,
            )
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, result)
    print(f"All numbers: {output}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
