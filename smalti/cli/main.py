"""The ``smalti`` command: imports the module of one verb, and turns errors into a message and an exit code.

The text of ``smalti --help`` is here, so that printing it imports neither typer nor another package.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from smalti.base.errors import ExitCode, SmaltiError, UserError, nearest

VERBS = {
    "demo": "run the whole pipeline on an embedded corpus, from documents to a model",
    "plan": "predict parameters, FLOPs, memory, time and cost of a run",
    "data": "curate, deduplicate and tokenize documents, and inspect the results",
    "train": "train a model from a recipe; the same command again resumes",
    "eval": "evaluate a model, with error bars",
    "tune": "tune a model on chats, instructions and preferences",
    "export": "write a run's model as a Hugging Face folder",
    "chat": "generate text with an exported model in the terminal",
    "serve": "serve a model over HTTP, with a chat page",
    "models": "list, tag and remove registered models",
    "runs": "list, show, compare and report runs",
    "fleet": "launch runs in the background: a queue for this machine",
    "env": "print versions, machine and devices, for a bug report",
    "config": "show resolved recipes and the schema of configs",
}
"""Verb -> its description; its typer ``app`` is in ``smalti/cli/<verb>.py`` or ``smalti/cli/<verb>/app.py``."""

EXIT_CODES = """exit codes:
    0  done
    1  a bug in Smalti
    2  usage or config: the message says what is allowed
    3  completed, and the check failed
   75  try again: preempted with a checkpoint saved, a rank died, a disk is full
   93  several attempts in a row ended by a fault without a newer checkpoint
  130  interrupted (Ctrl-C), after saving
  143  stopped before anything was saved"""

_DEBUG = "SMALTI_DEBUG"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command line and exit the process with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments.remove("--debug")
        os.environ[_DEBUG] = "1"  # the ranks are children of this process
    code = run(arguments)
    if code and ("daft" in sys.modules or "obstore" in sys.modules):
        _exit_without_finalizing(code)
    raise SystemExit(code)


def _exit_without_finalizing(code: int) -> NoReturn:
    """Exit without finalizing Python: after an error, running threads of Daft 0.7.26 and obstore 0.12 abort there (six
    of ten 'smalti plan data' without credentials ended with 134 in place of 2)."""
    import atexit

    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def flush() -> None:
    """Flush stdout and stderr, if they are open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        return guarded(lambda: print(help_page()), "smalti")
    if arguments[0] in ("--version", "-V"):
        from smalti import __version__

        return guarded(lambda: print(f"smalti {__version__}"), "smalti")
    return guarded(lambda: _call(arguments[0], arguments[1:]), f"smalti {arguments[0]}")


def help_page() -> str:
    """Return the text of ``smalti --help``."""
    verbs = "\n".join(f"  {name:<8} {text}" for name, text in VERBS.items())
    return f"""usage: smalti VERB [ARGUMENTS]    (smalti VERB --help for details)

Build language models from your own documents, end to end.

verbs:
{verbs}

options:
  --help      show this page
  --version   show the version
  --debug     with any verb: print the traceback of an error

start here: smalti demo

{EXIT_CODES}"""


def guarded(call: Callable[[], Any], command: str) -> int:
    """Run ``call`` and print its errors on stderr. Returns the exit code."""
    try:
        result = call()
        sys.stdout.flush()
    except BaseException as error:
        return report_error(error, command)
    return result if isinstance(result, int) and not isinstance(result, bool) else ExitCode.DONE


def report_error(error: BaseException, command: str) -> int:
    """Print an error on stderr and return its exit code; for use where ``error`` is being handled.

    Raises ``error`` itself if it is a SystemExit, which has its own code, or no Exception.
    """
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return ExitCode.INTERRUPTED
    broken_pipe = _broken_pipe(error)
    if broken_pipe is not None:
        code = _code_of_closed_output()
        return _bug(broken_pipe) if code is None else code
    if not isinstance(error, Exception):
        raise error
    translated = _from_system(error) if isinstance(error, OSError) else error
    if isinstance(translated, SmaltiError):
        return _report(translated)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors
        text = error.format_message()
        only_help = type(error).__name__ == "NoArgsIsHelpError"
        path = getattr(getattr(error, "ctx", None), "command_path", None) or command
        _say(text if only_help else f"error: {text}\nhint: {path} --help")
        return ExitCode.USAGE
    return _bug(error)


def _broken_pipe(error: BaseException) -> BrokenPipeError | None:
    """Return the BrokenPipeError that ``error`` is or comes from; None for other errors."""
    # typer and rich turn a broken pipe into SystemExit(1)
    cause = error.__context__ if isinstance(error, SystemExit) else error
    return cause if isinstance(cause, BrokenPipeError) else None


def _code_of_closed_output() -> ExitCode | None:
    """Return the exit code if the reader of our output (head, less) has closed it; None if both streams are open.

    Results go to stdout once the work is done, so a closed stdout is success: 0. Progress goes to stderr while it is
    not, so a closed stderr is an interruption: 143, as for SIGTERM.
    """
    import select

    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    closed = {descriptor for descriptor, seen in poll.poll(0) if seen & (select.POLLERR | select.POLLHUP)}
    for descriptor in closed:  # discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    if not closed:
        return None
    if closed == {1}:
        return ExitCode.DONE
    return ExitCode.TERMINATED


def _report(error: SmaltiError) -> int:
    # A rank's stderr and log may be on the full disk itself; the exit code must be returned all the same.
    with suppress(OSError):
        to_log(error)
    with suppress(OSError):
        _traceback_if_debug()
    _say(f"error: {error}")
    return int(error.exit_code)


def _from_system(error: OSError) -> SmaltiError | None:
    """Return the SmaltiError for an OSError of a wrong path or a full disk; None for others.

    An OSError without a path (a signal to another user's process, a port) is not about a file: it is None too.
    """
    from smalti.base.disk import as_smalti_error

    path = error.filename
    place = os.fsdecode(path) if isinstance(path, (str, bytes)) else None
    translated = as_smalti_error(error, place, "written or read")
    if translated is not None:
        translated.__cause__ = error
    return translated


def _call(verb: str, arguments: Sequence[str]) -> Any:
    from smalti.cli.not_yet import NOT_YET, planned

    name = planned([verb, *arguments])
    if name is not None:
        raise UserError(f"'smalti {name}' is not implemented yet", hint=NOT_YET[name] or f"smalti {verb} --help")
    if verb not in VERBS:
        raise _unknown(verb)
    app = app_of(verb)
    app.pretty_exceptions_enable = False
    app.rich_markup_mode = None  # plain help pages: importing rich alone would take longer than the page may
    return app(args=list(arguments), prog_name=f"smalti {verb}", standalone_mode=False)


def app_of(verb: str) -> Any:
    """Return the typer app of a verb."""
    module = import_module(f"smalti.cli.{verb}")
    return (import_module(f"{module.__name__}.app") if hasattr(module, "__path__") else module).app


def _unknown(verb: str) -> UserError:
    kind = "an option of smalti" if verb.startswith("-") else "a verb of smalti"
    close = nearest(verb, VERBS)
    hint = f"did you mean 'smalti {close}'?" if close else "smalti --help"
    return UserError(f"'{verb}' is not {kind}", allowed=", ".join(VERBS), hint=hint)


def _bug(error: Exception) -> int:
    """Report an unexpected error: the traceback goes to the log of the rank, else to a file."""
    import traceback

    text = "".join(traceback.format_exception(error))
    place = to_log(error)
    if place is None:
        from smalti.base.env import user_folder

        place = os.path.join(user_folder(), "last-error.log")
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            place = "not saved: no folder could be written"
    with suppress(OSError):
        _traceback_if_debug()
    _say(f"error: this is a bug in Smalti: {type(error).__name__}: {error}")
    _say(f"hint: the traceback is in {place}; --debug prints it")
    return ExitCode.BUG


def _say(text: str) -> None:
    """Print a line on stderr, if it is open."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def to_log(error: BaseException) -> str | None:
    """Write the traceback to the log files of this process; returns the first of them, or None."""
    import logging

    files = [handler for handler in logging.getLogger("smalti").handlers if isinstance(handler, logging.FileHandler)]
    for handler in files:
        record = logging.LogRecord(
            "smalti.cli", logging.ERROR, __file__, 0, str(error), None, (type(error), error, error.__traceback__)
        )
        handler.handle(record)
    return files[0].baseFilename if files else None


def _traceback_if_debug() -> None:
    if os.environ.get(_DEBUG):
        import traceback

        traceback.print_exc()
