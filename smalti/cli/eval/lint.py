"""``smalti eval lint``: checks the files of tasks for defects."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Json
from smalti.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from smalti.evals.lint import Finding

_LINES_SHOWN = 4


def lint(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|TASK.yaml|data=DIR", help="JSONL files, tasks, or the data of the suite."),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="gauntlet: all of its files that are in data=DIR.")] = None,
    results: Annotated[
        str | None, typer.Option(help="A results.json: also report tasks at the ceiling or at chance.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check tasks: constant or skewed gold, copies, empty or one-character answers, answers given away.

    Exits with 3 if there is a finding.
    """
    from smalti.base.errors import CheckFailed, UserError
    from smalti.base.store import read_json
    from smalti.evals.lint import lint_results, lint_task

    files = [target for target in targets or () if not target.startswith("data=")]
    data = next((target.removeprefix("data=") for target in targets or () if target.startswith("data=")), None)
    if suite not in (None, "gauntlet"):
        raise UserError(f"--suite {suite} has no files", allowed="gauntlet")
    if (data is None) != (suite is None):
        raise UserError(
            "--suite gauntlet and data=DIR belong together", hint="smalti eval lint --suite gauntlet data=DIR"
        )
    if not files and not suite and not results:
        raise UserError("nothing to check", hint="smalti eval lint FILE.jsonl, TASK.yaml or --suite gauntlet data=DIR")
    findings: list[Finding] = []
    n_files = 0
    if suite:
        from smalti.config.eval import EvalConfig
        from smalti.evals.tasks.find import FileTask, find_tasks

        tasks = [task for task in find_tasks(EvalConfig(tasks=("gauntlet",), data=data)) if isinstance(task, FileTask)]
        findings += [finding for task in tasks for finding in lint_task(task.config)]
        n_files += len(tasks)
    for file in files:
        findings += _lint_target(file)
        n_files += 1
    if results:
        findings += lint_results(read_json(results)["tasks"], results)
    _print(findings, n_files, as_json=as_json)
    if findings:
        n_with = len({finding.file for finding in findings})
        raise CheckFailed(f"{len(findings)} findings in {n_with} files", hint="--json lists all lines of each")


def _lint_target(target: str) -> "list[Finding]":
    from smalti.evals.lint import lint_file, lint_task
    from smalti.evals.tasks.find import load_task

    return lint_task(load_task(target).config) if target.endswith((".yaml", ".yml")) else lint_file(target)


def _print(findings: "list[Finding]", n_files: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"files": n_files, "findings": [finding.row() for finding in findings]})
        return
    rows = [(finding.file, finding.check, finding.message, _lines(finding.lines)) for finding in findings]
    print_table(("file", "check", "finding", "lines"), rows, empty=f"no findings in {n_files} files")


def _lines(lines: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, lines[:_LINES_SHOWN]))
    return shown + (f" and {len(lines) - _LINES_SHOWN} more" if len(lines) > _LINES_SHOWN else "")
