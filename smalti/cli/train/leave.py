"""Exits of a rank without cleanup.

For a rank that has lost another, or leaves the others waiting: destroying a process group, or a variable that holds its
work, would wait for the lost rank.
"""

import os
from typing import NoReturn

from smalti.cli.main import flush, report_error, to_log


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
