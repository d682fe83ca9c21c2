"""The last step of a build: its documents as token files, where the recipe has ``tokenize``."""

from smalti.base.errors import DataError
from smalti.base.progress import Progress
from smalti.config.build import BuildConfig
from smalti.config.curate import TokenizeConfig
from smalti.data.documents.publish import check_not_nested, read_record
from smalti.data.prepare.curate.report import read_report
from smalti.data.prepare.tokenize import KIND, RECORD_NAME, TokenizeReport, tokenize
from smalti.data.tokenizer.encode import load_tokenizer


def check_tokens(config: BuildConfig) -> None:
    """Raise UserError, before the work begins, for a tokenizer that cannot be loaded or folders that overlap."""
    if config.tokenize is None:
        return
    check_not_nested(config.output, config.tokenize.output, f"the documents ({config.output})")
    for item in config.inputs:
        check_not_nested(item.path, config.tokenize.output, f"input '{item.source}' ({item.path})")
    tokens = config.tokenize
    if tokens.tokenizer != "train":
        load_tokenizer(tokens.tokenizer, eod_token=tokens.eod_token, pattern=tokens.pattern)


def build_tokens(config: BuildConfig, progress: Progress) -> TokenizeReport | None:
    """Write ``config.tokenize.output``, unless it is up to date or not asked for (None)."""
    if config.tokenize is None:
        return None
    tokens = TokenizeConfig(documents=config.output, **config.tokenize.model_dump(exclude_unset=True))
    return None if _is_up_to_date(tokens) else tokenize(tokens, progress)


def _is_up_to_date(tokens: TokenizeConfig) -> bool:
    try:
        record = read_record(tokens.output, kind=KIND, record_name=RECORD_NAME, verb="smalti data tokenize")
    except DataError:
        return False
    if record.get("documents_digest") != read_report(tokens.documents)["digest"]:
        return False
    if record.get("config") != tokens.model_dump(mode="json", exclude={"output"}) or tokens.extend is not None:
        return False
    if tokens.tokenizer == "train":
        return True
    loaded = load_tokenizer(tokens.tokenizer, eod_token=tokens.eod_token, pattern=tokens.pattern)
    return bool(record["tokenizer"]["digest"] == loaded.digest)
