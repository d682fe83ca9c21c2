"""The verbs of ``smalti eval``, a file each."""

import typer

from smalti.cli.eval.calibrate import calibrate
from smalti.cli.eval.compare import compare
from smalti.cli.eval.contamination import contamination
from smalti.cli.eval.data import data
from smalti.cli.eval.lint import lint
from smalti.cli.eval.ls import ls
from smalti.cli.eval.memorised import memorised
from smalti.cli.eval.read import read
from smalti.cli.eval.run import run

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Evaluate a model, with error bars, and read its samples.",
)

app.command(epilog="Example: smalti eval run runs/demo --suite demo n=100 max_bytes=500000")(run)
app.command(epilog="Example: smalti eval ls --json")(ls)
app.command(epilog="Example: smalti eval compare runs/base runs/lr-low")(compare)
app.command(epilog="Example: smalti eval read runs/demo --limit 5")(read)
app.command(epilog="Example: smalti eval data llm-foundry/scripts/eval/local_data --check")(data)
app.command(epilog="Example: smalti eval lint mine.jsonl; smalti eval lint --suite gauntlet data=DIR --json")(lint)
app.command(epilog="Example: smalti eval contamination runs/demo 'tasks=[capitals.yaml]'")(contamination)
app.command(epilog="Example: smalti eval calibrate runs/demo runs/base runs/lr-low")(calibrate)
app.command(epilog="Example: smalti eval memorised runs/demo --prompt-tokens 20 --new-tokens 20")(memorised)
