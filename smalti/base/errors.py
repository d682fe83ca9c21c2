"""The exceptions and their exit codes.

SmaltiError             exit 1    base class; raised itself, a bug
├── UserError           exit 2    the request cannot be carried out
│   └── DataError       exit 2    a named file or folder is missing or corrupt
├── CheckFailed         exit 3    a check failed, or a bound was not met
├── RetryableError      exit 75   a fault outside the request: try again
├── Interrupted         exit 130  stopped by Ctrl-C, after saving
└── InjectedError       exit 1    a fault that ``chaos`` injected
"""

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the process, by which launchers decide on a restart."""

    DONE = 0
    BUG = 1
    USAGE = 2
    CHECK_FAILED = 3
    RETRY = 75
    NO_PROGRESS = 93
    INTERRUPTED = 130
    TERMINATED = 143


class SmaltiError(Exception):
    """Base of all errors that Smalti raises on purpose."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, allowed: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UserError(SmaltiError):
    """The request cannot be carried out. The message has the value, what is allowed, and what to type."""

    exit_code = ExitCode.USAGE


class DataError(UserError):
    """A named file or folder is missing, corrupt, or does not fit the rest."""


class CheckFailed(SmaltiError):
    """The command completed, but a check failed or a bound was not met."""

    exit_code = ExitCode.CHECK_FAILED


class RetryableError(SmaltiError):
    """A fault outside the request (dead rank, preemption, full disk): the same command may be run again."""

    exit_code = ExitCode.RETRY


class Preempted(RetryableError):
    """Stopped by SIGTERM after saving."""


class Interrupted(SmaltiError):
    """Stopped by Ctrl-C after saving."""

    exit_code = ExitCode.INTERRUPTED


class InjectedError(SmaltiError):
    """A fault that ``chaos`` injected: it ends a rank as an unexpected error does, and is no bug."""


def nearest(name: str, allowed: Iterable[str], *, alike_frac: float = 0.5) -> str | None:
    """Return the entry of ``allowed`` most similar to ``name`` (difflib's ratio at least ``alike_frac``), or None."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=alike_frac)
    return matches[0] if matches else None


def missing_extra(package: str, extra: str, what: str, error: ImportError | None = None) -> UserError:
    """Return the error for an optional package that is not installed, or whose import failed with ``error``."""
    install = f"pip install 'smalti[{extra}]'"
    module = (error.name or "").partition(".")[0] if error is not None else package
    if (error is None or isinstance(error, ModuleNotFoundError)) and module and package.endswith(module):
        return UserError(f"{what} needs the package '{package}', which is not installed", hint=install)
    return UserError(
        f"{what} needs the package '{package}', whose import failed: {type(error).__name__}: {error}",
        hint=f"{install} installs it with its dependencies",
    )
