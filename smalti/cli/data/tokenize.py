"""``smalti data tokenize``: clean documents to token files."""

from smalti.cli.data.arguments import Config, Json, Overrides
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine


def tokenize(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a byte-level BPE tokenizer on the training split (or load a tokenizer), and write documents as token files.

    Writes OUTPUT/tokenizer/ (Hugging Face format) and OUTPUT/SOURCE/{train,heldout}/ with manifest.json and *.tok.
    Running it again replaces them with identical files.
    """
    from smalti.cli.data.report import print_report
    from smalti.config.curate import TokenizeConfig
    from smalti.config.load import load

    loaded = load(TokenizeConfig, config, overrides or []).config
    need_data_extra()
    from smalti.data.prepare.tokenize import COLUMNS
    from smalti.data.prepare.tokenize import tokenize as run

    with ProgressLine() as progress:
        report = run(loaded, progress)
    vocabulary = (
        f"vocabulary of {report.vocab_size:,}; end of document {report.eod_id}; digest {report.tokenizer_digest[:12]}"
    )
    next_step = f"written to {loaded.output}; look inside: smalti data inspect {loaded.output}"
    print_report(report, COLUMNS, as_json, blocks=[vocabulary], notes=report.notes, next_step=next_step)
