"""A command of ``smalti`` in the process of the tests, which has imported everything: for what starts no rank."""

import contextlib
import io
import subprocess
from pathlib import Path

from smalti.cli.main import run


def here(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What ``smalti ARGUMENTS`` says and ends with, from the folder ``work``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(work), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
