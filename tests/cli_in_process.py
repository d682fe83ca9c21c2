"""Run a ``smalti`` command in the test process, which has imported everything: for commands that start no rank."""

import contextlib
import io
import subprocess
from pathlib import Path

from smalti.cli.main import run


def run_cli(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Exit code and output of ``smalti ARGUMENTS``, run in the folder ``work``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(work), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
