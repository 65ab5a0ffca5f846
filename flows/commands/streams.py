"""Standard streams that end no command: a reader that went away, a closed descriptor, an encoding without the letter.

Everything that a command prints, a library's words included, goes through `sys.stdout` and `sys.stderr`. They are put
over descriptors that note the first failed write and take everything after it in silence, so that no print raises, no
library turns a broken pipe into an exit code of its own, and nobody is stopped in the middle of saving.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from typing import IO, Any

WENT_AWAY = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""What writing gives when nobody reads any more (`| head`)."""
DESCRIPTORS = (0, 1, 2)


class Descriptor(io.FileIO):
    """A descriptor whose writes do not fail; it stays open when this object is closed."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.problem: OSError | None = None
        """The first failure; from then on what is written goes to nobody."""

    def write(self, data: Any, /) -> int:
        if self.problem is None:
            try:
                return super().write(data)
            except OSError as error:
                self.problem = error
        return memoryview(data).nbytes


def text_stream(number: int, encoding: str) -> io.TextIOWrapper:
    """Return a text stream over a descriptor: `\\xe4` stands for what the encoding lacks."""
    raw = Descriptor(number)
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=raw.isatty())


def guard_streams() -> None:
    """Put `sys.stdout` and `sys.stderr` over guarded descriptors, for the rest of this process.

    A descriptor that was closed from outside (`>&-`) becomes /dev/null: the next file that is opened would get its
    number, and what is printed would land in it.
    """
    for number in DESCRIPTORS:
        try:
            os.fstat(number)
        except OSError:
            nobody = os.open(os.devnull, os.O_RDWR)
            if nobody != number:
                os.dup2(nobody, number)
                os.close(nobody)
            os.set_inheritable(number, True)
    before = (sys.stdout, sys.stderr)
    for stream in before:
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    encodings = [getattr(stream, "encoding", None) or "utf-8" for stream in before]
    sys.stdout = text_stream(1, encodings[0])
    sys.stderr = text_stream(2, encodings[1])
    sys.stderr.reconfigure(line_buffering=True)


def lost_output(stream: IO[str]) -> OSError | None:
    """Flush a stream; return why its output was lost, or None when it was written or its reader went away."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if not isinstance(raw, Descriptor) or raw.problem is None or raw.problem.errno in WENT_AWAY:
        return None
    # A terminal that was closed gives an input/output error, and `isatty` does not know it any more.
    is_device = stat.S_ISCHR(os.fstat(raw.fileno()).st_mode)
    return None if is_device and raw.problem.errno == errno.EIO else raw.problem
