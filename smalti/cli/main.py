"""The ``smalti`` command: finds the verb, imports it alone, and turns every error into three lines and an exit code.

The page of ``smalti --help`` is written here, so that it needs neither typer nor any room.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from smalti.base.errors import SmaltiError

VERBS = {
    "demo": "the whole job on an embedded corpus: documents to a model that answers",
    "plan": "parameters, FLOPs, memory and time of a run before it starts",
    "data": "curate documents, drop near-duplicates, tokenize, look at token files",
    "train": "train a model from a recipe; the same command again resumes",
    "eval": "measure a model, with n and error",
    "export": "write a run's model as a Hugging Face folder",
    "chat": "talk to an exported model in the terminal",
    "serve": "answer requests over HTTP, with a chat page",
    "runs": "list, show, compare and report runs; send them to a tracker",
    "env": "what a bug report needs: versions, machine, devices",
    "config": "show a recipe resolved, and the schema of all that may be written",
}
"""Verb -> what it is for; its typer ``app`` is in ``smalti/cli/<verb>.py`` or ``smalti/cli/<verb>/app.py``."""

EXIT_CODES = """exit codes:
    0  done
    1  a bug in Smalti
    2  usage or config: the message says what is allowed
    3  ran, and the answer is no
   75  try again: preempted with a checkpoint saved, a rank died, a disk is full
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
        _leave(code)
    raise SystemExit(code)


def _leave(code: int) -> NoReturn:
    """Exit without Python's own end: after an error threads of Daft 0.7.26 and obstore 0.12 are still at work, and
    abort in it (six of ten 'smalti plan data' without credentials ended with 134 in place of 2)."""
    import atexit

    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def leave_at_once(error: BaseException, code: int | None = None) -> NoReturn:
    """Exit with what ``error`` says, while it is still referred to; with ``code``, it goes to the log alone.

    For a rank that has lost another, or leaves the others waiting: whatever ends a process group, even the end of a
    variable that holds its work, waits for the rank that is gone.
    """

    def again() -> NoReturn:
        raise error

    if code is None:
        code = guarded(again, "smalti train")
    else:
        to_log(error)
    _flush()
    os._exit(code)


def _flush() -> None:
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
    """The text of ``smalti --help``."""
    verbs = "\n".join(f"  {name:<8} {text}" for name, text in VERBS.items())
    return f"""usage: smalti VERB [ARGUMENTS]    (smalti VERB --help says more)

Build language models from your own documents, end to end.

verbs:
{verbs}

options:
  --help      this page
  --version   the version
  --debug     with any verb: print the traceback of an error

start here: smalti demo

{EXIT_CODES}"""


def guarded(call: Callable[[], Any], command: str) -> int:
    """Run ``call``; its errors become lines on stderr. Returns the exit code."""
    from smalti.base.errors import SmaltiError

    try:
        result = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich make exit code 1 of a broken pipe
        broken = error.__context__ if isinstance(error, SystemExit) else error
        code = _reader_gone() if isinstance(broken, BrokenPipeError) else None
        if code is not None:
            return code
        if not isinstance(broken, BrokenPipeError):
            raise
        return _bug(broken)
    except SmaltiError as error:
        return _told(error)
    except Exception as error:
        outside = _outside(error) if isinstance(error, OSError) else None
        if outside is not None:
            return _told(outside)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors
            text = error.format_message()
            only_help = type(error).__name__ == "NoArgsIsHelpError"
            asked = getattr(getattr(error, "ctx", None), "command_path", None) or command
            _say(text if only_help else f"error: {text}\nhint: {asked} --help")
            return 2
        return _bug(error)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _reader_gone() -> int | None:
    """The exit code where the reader of our output (head, less) has left; None where it has not.

    Results go to stdout when the work is done, so without a reader for them it is done: 0. Progress goes to stderr, and
    without a reader for that the work has stopped in the middle: as SIGTERM's.
    """
    import select

    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    closed = {descriptor for descriptor, seen in poll.poll(0) if seen & (select.POLLERR | select.POLLHUP)}
    for descriptor in closed:  # what is still buffered goes nowhere, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return None if not closed else 0 if closed == {1} else 143


def _told(error: "SmaltiError") -> int:
    # A rank's stderr and log may lie on the very disk that is full: the exit code must come through all the same.
    with suppress(OSError):
        to_log(error)
    with suppress(OSError):
        _traceback_if_asked()
    _say(f"error: {error}")
    return int(error.exit_code)


def _outside(error: OSError) -> "SmaltiError | None":
    """What the system refused, in our words: a path that was named wrongly or a full disk; None for anything else.

    Without a path (a signal to another's process, a port) it is not about a file, and then it is ours to explain.
    """
    import errno

    from smalti.base.disk import reason
    from smalti.base.errors import DataError, RetryableError

    path, why = error.filename, os.strerror(error.errno) if error.errno else ""
    place = os.fsdecode(path) if isinstance(path, (str, bytes)) else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        what = "the disk fails" if error.errno == errno.EIO else "the disk is full"
        found: SmaltiError = RetryableError(
            f"{what}: {place or 'a file'} could not be written or read ({reason(error, place) if place else why})",
            hint="free space or mend the disk there, then run the same command again",
        )
    elif place is not None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
                                               errno.EEXIST, errno.ENAMETOOLONG):  # fmt: skip
        found = DataError(
            f"'{place}' cannot be written or read: {why}",
            allowed="paths that this user may read, and folders that this user may write to",
            hint="name another folder (folder=, output=, work= or --output FOLDER, whichever the command takes)",
        )
    else:
        return None
    found.__cause__ = error
    return found


def _call(verb: str, arguments: Sequence[str]) -> Any:
    from smalti.cli.not_yet import NOT_YET, planned

    name = planned([verb, *arguments])
    if name is not None:
        from smalti.base.errors import UserError

        raise UserError(f"'smalti {name}' is not there yet", hint=NOT_YET[name] or f"smalti {verb} --help")
    if verb not in VERBS:
        raise _unknown(verb)
    app = app_of(verb)
    app.pretty_exceptions_enable = False
    app.rich_markup_mode = None  # plain help pages: rich alone would take longer to import than they may take
    return app(args=list(arguments), prog_name=f"smalti {verb}", standalone_mode=False)


def app_of(verb: str) -> Any:
    """The typer app of a verb."""
    module = import_module(f"smalti.cli.{verb}")
    return (import_module(f"{module.__name__}.app") if hasattr(module, "__path__") else module).app


def _unknown(verb: str) -> "SmaltiError":
    from smalti.base.errors import UserError, nearest

    kind = "an option of smalti" if verb.startswith("-") else "a verb of smalti"
    close = nearest(verb, VERBS)
    hint = f"did you mean 'smalti {close}'?" if close else "smalti --help"
    return UserError(f"'{verb}' is not {kind}", allowed=", ".join(VERBS), hint=hint)


def _bug(error: Exception) -> int:
    """An error that nobody raised on purpose: the traceback goes to the log of the rank, else to a file."""
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
            place = "nowhere: no folder could be written"
    with suppress(OSError):
        _traceback_if_asked()
    _say(f"error: this is a bug in Smalti: {type(error).__name__}: {error}")
    _say(f"hint: the traceback is in {place}; --debug prints it")
    return 1


def _say(text: str) -> None:
    """A line on stderr; where nobody can read it, the exit code must come through all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def to_log(error: BaseException) -> str | None:
    """Write the traceback to the log files of this process; returns the first of them, None where it has none."""
    import logging

    files = [one for one in logging.getLogger("smalti").handlers if isinstance(one, logging.FileHandler)]
    for handler in files:
        record = logging.LogRecord(
            "smalti.cli", logging.ERROR, __file__, 0, str(error), None, (type(error), error, error.__traceback__)
        )
        handler.handle(record)
    return files[0].baseFilename if files else None


def _traceback_if_asked() -> None:
    if os.environ.get(_DEBUG):
        import traceback

        traceback.print_exc()
