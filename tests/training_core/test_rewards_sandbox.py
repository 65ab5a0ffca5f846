"""What a policy's program may not do, tried for real."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from training_core.config.verifiers import CodeTestsReward
from training_core.errors import ConfigurationError
from training_core.rewards import sandbox
from training_core.rewards.sandbox import Sandbox, SandboxOutcome

MEBIBYTE = 1024**2


def sandbox_of(**knobs: Any) -> Sandbox:
    return Sandbox(CodeTestsReward.model_validate({"kind": "code_tests", **knobs}))


@pytest.fixture(scope="module")
def isolated() -> Sandbox:
    try:
        return sandbox_of(timeout_seconds=20.0)
    except ConfigurationError as error:
        if "the kernel does not isolate" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["isolated", "limits only"])
def either(request: pytest.FixtureRequest) -> Sandbox:
    """With namespaces, and as `network: allow` runs where the kernel refuses them."""
    if request.param == "isolated":
        found: Sandbox = request.getfixturevalue("isolated")
        return found
    found = object.__new__(Sandbox)
    found.config, found.isolated = CodeTestsReward(kind="code_tests", timeout_seconds=20.0), False
    # Root's code runs as another user, who may not be able to read the Python of these tests.
    for found.python in (sys.executable, "/usr/bin/python3"):
        if found.run(sandbox.PROBE, check="").proved:
            return found
    pytest.skip("no Python that another user can read")


def with_limits(base: Sandbox, **knobs: Any) -> Sandbox:
    found = copy.copy(base)
    found.config = base.config.model_copy(update=knobs)
    return found


def is_gone(marker: str) -> bool:
    """Return whether no process has `marker` in its command line; waits for the kernel to end them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if not any(marker in line for line in found.splitlines()):
            return True
        time.sleep(0.05)
    return False


def test_a_program_reads_prints_and_ends(either: Sandbox) -> None:
    assert either.run("print(input()[::-1], '☀')", stdin="ab\n") == SandboxOutcome("ended", "ba ☀\n", detail="0")
    assert either.run("import sys; sys.exit(3)").detail == "3"
    assert either.run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)").detail == "-15"
    big = "x" * 3 * MEBIBYTE
    assert either.run("import sys; print(len(sys.stdin.read()))", stdin=big).output == f"{len(big)}\n"
    assert either.run("print(len(open('/dev/stdin').read()))", stdin="abc").output == "3\n"


def test_a_check_runs_in_the_same_module(either: Sandbox) -> None:
    assert either.run("def f(x): return x + 1", check="assert f(1) == 2").proved
    assert not either.run("def f(x): return x + 1", check="assert f(1) == 3").proved


def test_ordinary_programs_work(either: Sandbox) -> None:
    code = """
import multiprocessing, random, subprocess, tempfile, threading
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool: print(pool.map(square, [1, 2]))
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
    print(subprocess.run(["echo", "child"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout, end="")
    with tempfile.NamedTemporaryFile("w") as stream: print(stream.write("abc"))
"""
    assert either.run(code).output == "[1, 4]\nthread\nchild\n3\n"


def test_hashes_are_the_same_each_time(either: Sandbox) -> None:
    outputs = {either.run("print(hash('a'), {'a', 'b', 'c', 'd'})").output for _ in range(2)}
    assert len(outputs) == 1


def test_an_endless_loop_is_a_time_out(either: Sandbox) -> None:
    assert with_limits(either, max_cpu_seconds=1).run("while True: pass").status == "timeout"
    started = time.monotonic()
    assert with_limits(either, timeout_seconds=0.5).run("import time; time.sleep(60)").status == "timeout"
    assert time.monotonic() - started < 15


def test_a_program_that_ignores_the_signal_is_killed_and_a_time_out_too(isolated: Sandbox) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass"
    found = with_limits(isolated, max_cpu_seconds=1).run(stubborn)
    assert (found.status, found.detail) == ("timeout", "cpu")


def test_a_fork_bomb_is_bounded(either: Sandbox) -> None:
    """The kernel refuses more, or the watcher ends it; in both cases all of it is gone afterwards."""
    marker = f"bomb-{os.getpid()}-{either.isolated}"
    bomb = f"""
import os, subprocess
subprocess.Popen(['sh', '-c', 'sleep 60; : {marker}'])
while True:
    try: os.fork()
    except OSError: pass
"""
    small = with_limits(either, timeout_seconds=1.0, max_processes=4)
    started = time.monotonic()
    assert small.run(bomb).status in ("limit", "timeout")
    assert time.monotonic() - started < 15
    assert is_gone(marker)


def test_the_number_of_processes_is_bounded(either: Sandbox) -> None:
    count = """
import os, time
for number in range(1, 50):
    try:
        if os.fork() == 0: time.sleep(9); os._exit(0)
    except OSError: print(number, flush=True); break
time.sleep(0.5)
"""
    found = with_limits(either, max_processes=4).run(count)
    assert (found.status, found.output, found.detail) in [("ended", "4\n", "0"), ("limit", "", "processes")]
    assert found.status == "ended" or not either.isolated  # The kernel counts in a namespace.


def test_memory_is_bounded(either: Sandbox) -> None:
    code = "try:\n    x = bytearray(10**10)\nexcept MemoryError: print('no')"
    assert either.run(code).output == "no\n"
    share = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
    share += "x = bytearray(b'1') * (90 * 2**20)\ntime.sleep(9)"
    assert with_limits(either, max_memory_bytes=200 * MEBIBYTE).run(share).detail == "memory"


def test_output_is_bounded(either: Sandbox) -> None:
    found = with_limits(either, max_output_bytes=1000).run("while True: print('x' * 100)")
    assert (found.status, found.detail, len(found.output)) == ("limit", "output", 1000)
    assert with_limits(either, max_output_bytes=4).run("print('abc')") == SandboxOutcome("ended", "abc\n", detail="0")
    assert with_limits(either, max_output_bytes=4).run("print('abcd')").status == "limit"


def test_files_are_bounded_and_gone_afterwards(either: Sandbox) -> None:
    code = "import os\ntry:\n    open('big', 'wb').write(b'1' * 10**7)\nexcept OSError: print(os.getcwd())"
    found = with_limits(either, max_disk_bytes=MEBIBYTE).run(code)
    directory = Path(found.output.strip())
    assert directory.name.startswith("sandbox-")
    assert not directory.exists()


def test_open_files_are_bounded(either: Sandbox) -> None:
    code = "k = []\ntry:\n    while True: k.append(open('/dev/null'))\nexcept OSError: print(len(k) < 20)"
    assert with_limits(either, max_open_files=20).run(code).output == "True\n"


def test_children_end_with_the_program(either: Sandbox) -> None:
    """Also those that left its session and closed all that they inherited."""
    marker = f"left-behind-{os.getpid()}-{either.isolated}"
    code = "import os, subprocess, sys\n"
    code += f"command = ['sh', '-c', 'sleep 60; : {marker}']\n"
    code += "subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)\n"
    code += "print('ended', flush=True)"
    started = time.monotonic()
    assert either.run(code).output == "ended\n"
    assert time.monotonic() - started < 15
    assert is_gone(marker)


def test_the_environment_is_empty(either: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_TOKEN", "secret")
    names = either.run("import os; print(sorted(os.environ))").output
    assert names == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']\n"


def test_there_is_no_network(isolated: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 2); print('in')\n"
        assert isolated.run(connect + "except OSError as error: print(error.errno)").output != "in\n"
        # The same from here, so that it is the sandbox which stands between.
        socket.create_connection(("127.0.0.1", port), 2).close()
    interfaces = isolated.run("import socket; print([name for _, name in socket.if_nameindex()])").output
    assert interfaces == "['lo']\n"


def test_nothing_outside_can_be_changed(isolated: Sandbox, tmp_path: Path) -> None:
    victim = tmp_path / "checkpoint"
    victim.write_text("precious")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    code = f"""
import ctypes, os, pathlib, signal
victim = pathlib.Path({str(victim)!r})
def attempt(name, act):
    try: act()
    except OSError: return
    print(name)
attempt("write", lambda: victim.write_text("hurt"))
attempt("unlink", victim.unlink)
attempt("create", lambda: (victim.parent / "new").write_text("x"))
attempt("chmod", lambda: victim.chmod(0))
attempt("shm", lambda: pathlib.Path("/proc/sys/kernel/hostname").write_text("x"))
attempt("kill", lambda: os.kill({os.getpid()}, signal.SIGKILL))
attempt("see", lambda: os.stat("/proc/{os.getpid()}/environ") if {os.getpid()} > 50 else 1 / 0)
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(None, b"/", None, ctypes.c_ulong(32 | 4096), None) == 0: print("remount")
if libc.umount(str(victim.parent).encode()) == 0: print("umount")
if libc.unshare(0x10020000) == 0 and libc.mount(None, b"/", None, ctypes.c_ulong(32 | 4096), None) == 0: print("nested")
attempt("write again", lambda: victim.write_text("hurt"))
print("done", victim.read_text() if os.access(victim, os.R_OK) else "precious")
"""
    found = isolated.run(code)
    assert found.output == "done precious\n", found
    assert victim.read_text() == "precious"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_packages_are_visible_on_request(isolated: Sandbox) -> None:
    code = "import pydantic_core; print('found')"
    assert isolated.run(code).output == ""
    roomy = sandbox_of(packages=True, timeout_seconds=20.0)
    assert roomy.run(code).output == "found\n"


def test_no_module_of_the_training_core_is_in_reach(either: Sandbox) -> None:
    code = "try:\n    import code_tests\nexcept ImportError: print('no')"
    assert either.run(code).output == "no\n"


def test_it_all_ends_when_whoever_started_it_is_killed(isolated: Sandbox, tmp_path: Path) -> None:
    marker = f"orphan-{os.getpid()}"
    started = tmp_path / "started"
    code = f"import subprocess\nsubprocess.run(['sh', '-c', 'sleep 60; : {marker}'])"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code, str(started)], stdin=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while is_running(marker) is False and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_running(marker)
    parent.kill()
    parent.wait()
    assert is_gone(f"sleep 60; : {marker}'")
    assert is_gone(f"-c sleep 60; : {marker}")


PARENT = """
import sys
from training_core.config.verifiers import CodeTestsReward
from training_core.rewards.sandbox import Sandbox
Sandbox(CodeTestsReward(kind="code_tests", timeout_seconds=50.0)).run(sys.argv[1])
"""


def is_running(marker: str) -> bool:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return any(line.startswith("sh -c") and marker in line for line in found.splitlines())


def test_a_sandbox_that_fails_says_so(isolated: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setattr(sandbox, "PROCESS", broken)
    found = isolated.run("print(1)")
    assert found.status == "error"
    assert "broken on purpose" in found.detail
    broken.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 0.2)
    quick = CodeTestsReward(kind="code_tests", timeout_seconds=0.2)
    monkeypatch.setattr(isolated, "config", quick)
    assert "did not end" in isolated.run("print(1)").detail
