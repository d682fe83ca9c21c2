"""The verbs of ``smalti tune``, a file each."""

import typer

from smalti.cli.tune.compare import compare
from smalti.cli.tune.show import show
from smalti.cli.tune.train import preference, reward, sft

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Tune a model on chats, instructions and preferences.",
)


@app.callback()
def _group() -> None:
    """Tune a model on chats, instructions and preferences."""


app.command(epilog="Example: smalti tune show chats.jsonl --tokenizer runs/demo/tokenizer --template chatml")(show)
app.command(epilog="Example: smalti tune sft instruct init_from=runs/demo/export 'tune.examples.files=[chats.jsonl]'")(
    sft
)
app.command(
    epilog="Example: smalti tune preference dpo init_from=runs/instruct/export 'tune.examples.files=[pairs.jsonl]'"
)(preference)
app.command(
    epilog="Example: smalti tune reward reward init_from=runs/instruct/export 'tune.examples.files=[pairs.jsonl]'"
)(reward)
app.command(
    epilog="Example: smalti tune compare instruct --ways prompt,lora,full 'tune.examples.files=[answers.jsonl]'"
)(compare)
