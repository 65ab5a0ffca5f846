"""Runs one program in a sandbox. Started as a script of its own; imports nothing but the standard library.

Standard input: one JSON object, the fields of `Job` in sandbox.py. Standard output: one JSON object, see `report`.

Three processes: the first enters new namespaces, the second is the first process in them and watches, the third runs
the code. When the second ends, the kernel ends all that is left in its process namespace. Without namespaces the first
one watches, as reaper of all that the code starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import sys
import time
import types
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 24, 36, 38
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 2
UNSHARE = "unshare (user, mount, process, network and IPC namespaces)"
NOBODY = 65534
WATCHERS = 2
"""Processes in the namespace that are not the code's."""
SPARE_TASKS = 64
"""What the user's other programs may start meanwhile."""
DEVICES = ("null", "zero", "full", "random", "urandom")
TICK_SECONDS = {True: 0.01, False: 0.05}
"""Between two looks at the processes, by whether these are all in a namespace of their own: else they are many."""
PROOF = 3
"""The descriptor on which the code's process says that a check came to its end."""
SECRET = 4
"""The descriptor on which it is then told what to repeat: before that nothing in the process knows it."""
REQUEST = b"?"
PAGE_BYTES = resource.getpagesize()


class RefusedError(Exception):
    """The kernel does not isolate: what it refused, and why."""


def check(result: int, what: str) -> None:
    if result < 0:
        raise RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(result, f"mounting {kind or 'in place'} at {target}")


def set_mount_attributes(target: str, add: int, remove: int = 0, recursive: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    flags = AT_RECURSIVE if recursive else 0
    result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, ctypes.byref(attributes), size)
    check(result, f"changing how {target} is mounted (Linux 5.12 or newer can)")


def enter_namespaces() -> int:
    """Leave the network, the mounts, the processes and the privileges of the outside; children enter fully.

    Returns:
        The user that the code will run as: another one for root, whose number of processes the kernel never limits.
    """
    user, group = os.getuid(), os.getgid()
    if user != 0:
        check(LIBC.unshare(NAMESPACES), UNSHARE)
        write_maps("self", user, group)
        return user
    # Only somebody outside may map a second user.
    outside, (wait, go) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        if os.read(wait, 1):
            write_maps(str(outside), user, group, NOBODY)
        os._exit(0)
    check(LIBC.unshare(NAMESPACES), UNSHARE)
    os.write(go, b"!")
    if os.waitpid(helper, 0)[1]:
        raise RefusedError(f"mapping the user {NOBODY}, as which root runs the code")
    return NOBODY


def write_maps(process: str, user: int, group: int, *others: int) -> None:
    """Map users and groups of a new namespace to themselves."""
    contents = {
        "setgroups": "deny",
        "uid_map": "".join(f"{number} {number} 1\n" for number in (user, *others)),
        "gid_map": "".join(f"{number} {number} 1\n" for number in (group, *others)),
    }
    if others:
        del contents["setgroups"]  # Not asked of one who may set groups, and then not wanted: see below.
    try:
        for name, content in contents.items():
            with open(f"/proc/{process}/{name}", "w") as stream:
                stream.write(content)
    except OSError as error:
        raise RefusedError(f"writing {error.filename}: {error.strerror}") from None


def isolate_files(directory: str, max_bytes: int, user: int) -> None:
    """Make all files read-only, and `directory` an empty one in memory; show only this namespace's processes."""
    mount("", "/", "", MS_REC | MS_PRIVATE)
    devices = [path for path in (f"/dev/{name}" for name in DEVICES) if os.path.exists(path)]
    for path in devices:
        mount(path, path, "", MS_BIND)
    set_mount_attributes("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=True)
    for path in devices:
        set_mount_attributes(path, 0, ATTR_NODEV)
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # Sockets of services take connections on a read-only mount too.
    for path in ("/run", "/dev/shm"):
        if os.path.isdir(path) and not os.path.islink(path) and not directory.startswith(path + "/"):
            mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={max_bytes}")
    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, f"size={max_bytes},mode=700,uid={user},gid={user}")


def drop_privileges(user: int, kept: int) -> None:
    """Become `user`, and keep the capabilities in the bit set `kept` alone: with others the code could undo mounts."""
    for capability in range(64):
        if not kept >> capability & 1 and LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if os.getuid() != user:
        check(LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keeping the right to read")
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)(kept, kept, kept)), "giving up capabilities")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")


def num_tasks_of(user: int) -> int:
    """Return how many processes and threads a user runs, which is what the kernel holds against a limit."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # It ended while this list was read.
    return count


def processes_below(root: int) -> dict[int, int]:
    """Return the resident bytes of all processes that descend from `root`, by process id."""
    parents, resident = {}, {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue  # It ended while this list was read.
            parents[int(name)], resident[int(name)] = int(fields[1]), int(fields[21]) * PAGE_BYTES
    below: dict[int, int] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in below}
        below.update((pid, resident[pid]) for pid in frontier)
    return below


def end_all_below(root: int) -> None:
    """Kill whatever descends from `root`, until there is nothing left."""
    while True:
        # Stopped first, all of them: what multiplies would fill each gap that a kill makes.
        stopped: set[int] = set()
        while fresh := processes_below(root).keys() - stopped:
            signal_all(fresh, signal.SIGSTOP)
            stopped |= fresh
        if not stopped:
            return
        signal_all(stopped, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def signal_all(processes: set[int], number: int) -> None:
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def report(status: str, output: bytes = b"", proved: bool = False, detail: str = "") -> None:
    """Say how it ended: `ended` (`detail` is the exit status), `timeout`, `limit`, `refused` or `error`."""
    text = output.decode("utf-8", "replace")
    print(json.dumps({"status": status, "output": text, "proved": proved, "detail": detail}), flush=True)


def watch(child: int, output: int, proof: int, secret: int, job: dict[str, Any]) -> None:
    """Wait for the code's end or the first limit that it crosses, end what it started, and report."""
    deadline = time.monotonic() + job["timeout_seconds"]
    expected = b""
    received = {output: b"", proof: b""}
    status = detail = ""
    with selectors.DefaultSelector() as selector:
        for descriptor in received:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while not status:
            pid, result, usage = os.wait4(-1, os.WNOHANG)
            for key, _ in selector.select(0 if pid else TICK_SECONDS[job["isolated"]]):
                chunk = os.read(key.fd, 65536)
                received[key.fd] += chunk
                if key.fd == proof and chunk and not expected:
                    expected = os.urandom(16).hex().encode()
                    os.write(secret, expected)
                if not chunk:
                    selector.unregister(key.fd)
            if pid == child:
                status, detail = ended(result, usage.ru_utime + usage.ru_stime >= job["max_cpu_seconds"])
            elif time.monotonic() > deadline:
                status = "timeout"
            elif not pid:
                status, detail = crossed(received[output], job)
    if not job["isolated"]:
        end_all_below(os.getpid())  # In a process namespace the kernel does, when this process ends.
    for descriptor in received:
        while len(received[output]) <= job["max_output_bytes"] and (chunk := read_rest(descriptor)):
            received[descriptor] += chunk
    if status == "ended" and len(received[output]) > job["max_output_bytes"]:
        status, detail = "limit", "output"
    proved = bool(expected) and received[proof] == REQUEST + expected
    report(status, received[output][: job["max_output_bytes"]], proved, detail)


def crossed(output: bytes, job: dict[str, Any]) -> tuple[str, str]:
    """Return which limit on the whole test is crossed; nothing when none is."""
    if len(output) > job["max_output_bytes"]:
        return "limit", "output"
    # A first look without their details: a program that multiplies is faster than those.
    if job["isolated"] and sum(name.isdecimal() for name in os.listdir("/proc")) > job["max_processes"] + 1:
        return "limit", "processes"
    below = processes_below(os.getpid())
    if len(below) > job["max_processes"]:
        return "limit", "processes"
    return ("limit", "memory") if sum(below.values()) > job["max_memory_bytes"] else ("", "")


def read_rest(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def ended(result: int, is_over_time: bool) -> tuple[str, str]:
    if os.WIFSIGNALED(result) and (is_over_time or os.WTERMSIG(result) == signal.SIGXCPU):
        return "timeout", "cpu"
    return "ended", str(os.waitstatus_to_exitcode(result))


def set_limits(job: dict[str, Any]) -> None:
    limits = {
        # At the soft limit the code gets a signal that names the reason; one second later it is killed.
        resource.RLIMIT_CPU: (job["max_cpu_seconds"], job["max_cpu_seconds"] + 1),
        resource.RLIMIT_AS: (job["max_memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (job["max_disk_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (job["max_open_files"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    if not job["isolated"]:
        sandboxes = job["max_processes"] * (job["num_workers"] - 1)
        others = num_tasks_of(job["user"]) + sandboxes + SPARE_TASKS
    else:
        others = WATCHERS if job["user"] == os.getuid() else 0
    limits[resource.RLIMIT_NPROC] = (job["max_processes"] + others,) * 2
    for kind, (soft, hard) in limits.items():
        resource.setrlimit(kind, (soft, hard))


def become_program(job: dict[str, Any], output: int, proof: int, secret: int) -> None:
    """Set this process up as the one that runs the code: descriptors, limits, no privileges."""
    given = os.memfd_create("stdin")
    rest = job["stdin"].encode()
    while rest:
        rest = rest[os.write(given, rest) :]
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Above all others first: either may be where the other one goes.
    proof, secret = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in (proof, secret))
    os.dup2(proof, PROOF)
    os.dup2(secret, SECRET)
    os.closerange(SECRET + 1, 256)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 -- for as long as the program runs
    set_limits(job)
    # Files of root's stay readable for the one whom root's code runs as, the interpreter's above all.
    kept = 1 << CAP_DAC_READ_SEARCH if job["isolated"] and os.getuid() == 0 else 0
    drop_privileges(job["user"], kept)
    os.chdir(job["directory"])


def run_code(job: dict[str, Any]) -> None:
    """Run the code as a program, or the code and then a check in the same module, and say that both came to an end.

    What proves that is asked for after both: no frame and no object holds it while the code can look for it. A thread
    or a replaced function that the code leaves behind can still do what is done here.
    """
    check_code = job.pop("check")
    # Taken before the code can put others in their place.
    execute, assemble, read, write = exec, compile, os.read, os.write
    # A check imports what the code defines: the part of it that runs as a program stays out.
    module = types.ModuleType("__main__" if check_code is None else "answer")
    sys.modules[module.__name__] = module
    sys.argv = ["answer.py"]
    sys.path.insert(0, job["directory"])
    execute(assemble(job["code"], "answer.py", "exec"), module.__dict__)
    if check_code is not None:
        execute(assemble(check_code, "check.py", "exec"), module.__dict__)
        write(PROOF, REQUEST)
        write(PROOF, read(SECRET, 64))


def run_watched(job: dict[str, Any]) -> None:
    """Run the code in a child, and watch it; returns in both."""
    if job["isolated"]:
        isolate_files(job["directory"], job["max_disk_bytes"], job["user"])
    output, proof, secret = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        become_program(job, output[1], proof[1], secret[0])
        run_code(job)
        return
    for descriptor in (output[1], proof[1]):
        os.close(descriptor)
    # The watcher keeps the end to read the secret from, so that writing it never meets a closed pipe.
    watch(child, output[0], proof[0], secret[1], job)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    try:
        # Nothing outlives whoever started this.
        check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the parent")
        if job["isolated"]:
            job["user"] = enter_namespaces()
            first = os.fork()
            if first:
                os.waitpid(first, 0)
                return
            check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the parent")
        else:
            job["user"] = os.getuid() or NOBODY
            if os.getuid() != job["user"]:
                os.chown(job["directory"], job["user"], job["user"])
            check(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "keeping what the code leaves behind")
        run_watched(job)
    except RefusedError as error:
        report("refused", detail=str(error))


if __name__ == "__main__":
    main()
