"""Stacks of a rank that hangs, and exits without cleanup.

For a rank that has lost another, or leaves the others waiting: destroying a process group, or a variable that holds its
work, would wait for the lost rank.
"""

import faulthandler
import os
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from smalti.cli.main import flush, report_error, to_log
from smalti.fleet.launch.local import STACK_SIGNAL, stack_file


def write_stacks_on_signal(log_folder: Path, rank: int) -> None:
    """Write the stacks of all threads to ``stack_file`` when the agent asks for them, also while the GIL is held."""
    with suppress(OSError):
        log_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(stack_file(log_folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def report_and_exit(error: BaseException) -> NoReturn:
    """Print ``error`` on stderr and exit with its code, without cleanup."""
    code = report_error(error, "smalti train")
    flush()
    os._exit(code)


def log_and_exit(error: BaseException, code: int) -> NoReturn:
    """Write ``error`` only to the log, and exit with ``code``, without cleanup."""
    to_log(error)
    flush()
    os._exit(code)
