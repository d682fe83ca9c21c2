"""The verbs of ``smalti data``, a file each."""

import typer

from smalti.cli.data.build import build
from smalti.cli.data.classifier import app as classifier
from smalti.cli.data.compare import compare
from smalti.cli.data.curate import curate
from smalti.cli.data.dedup import dedup
from smalti.cli.data.diff import diff
from smalti.cli.data.documents import documents
from smalti.cli.data.explain import explain
from smalti.cli.data.inspect import inspect
from smalti.cli.data.pack import pack
from smalti.cli.data.to_mds import to_mds
from smalti.cli.data.tokenize import tokenize
from smalti.cli.data.tokenizers import app as tokenizers
from smalti.cli.data.why import why

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Build, curate, deduplicate and tokenize documents, and inspect the results.",
)

app.command(epilog="Example: smalti data documents data/demo/raw")(documents)
app.command(epilog="Example: smalti data build pages.yaml languages=[en,de] --dry-run")(build)
app.command(epilog="Example: smalti data why crawl/page-1.html data/web")(why)
app.command(epilog="Example: smalti data diff data/web-1 data/web-2")(diff)
app.command(epilog="Example: smalti data compare data/web-1 data/web-2 --tokens 2M --yes")(compare)
app.command(epilog="Example: smalti data curate demo-curate heldout_frac=0.1 --dry-run")(curate)
app.command(epilog="Example: smalti data dedup demo-dedup threshold=0.8 --dry-run")(dedup)
app.command(epilog="Example: smalti data tokenize demo-tokenize output=data/demo/tokens-2")(tokenize)
app.command(epilog="Example: smalti data inspect data/demo/tokens/code/train --samples 1")(inspect)
app.command(epilog="Example: smalti data explain runs/demo --step 2 --row 0 --text")(explain)
app.command(epilog="Example: smalti data pack data/demo/tokens/code/train --seq-len 512 --dry-run")(pack)
app.command("to-mds", epilog="Example: smalti data to-mds data/demo/tokens/code/train mds --seq-len 512 --dry-run")(
    to_mds
)
app.add_typer(tokenizers, name="tokenizers")
app.add_typer(classifier, name="classifier")
