"""Runs a ``smalti`` command as a child process, which ends with this one and receives its signals once."""

import signal
import subprocess
from types import FrameType


def run_child(command: list[str], *, stdout: int | None = None) -> int:
    """Run a child to its end and return its exit code (128 + n after signal n), passing signals on to it.

    The child has its own process group, so that a Ctrl-C in the terminal reaches it only once, through this process: a
    second one would mean "at once, without saving". ``stdout``: the file descriptor for its output; None: this one's.
    """
    from smalti.base.processes import die_with_parent

    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            process_group=0,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        for number in received:  # while the child was being started
            child.send_signal(number)
        code = child.wait()
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    if code == 0 and received:  # the child has finished all the same; its caller still stops
        return 128 + received[-1]
    return code if code >= 0 else 128 - code
