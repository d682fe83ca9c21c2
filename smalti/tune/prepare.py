"""Tokenizes the examples of a tuning recipe before the run, and fills in the sections that follow from them.

The folder of the result is named by all that determines it: equal recipes and files share it, and it is written once.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

from smalti.base import env, store
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import digest_json, sha256_file
from smalti.config.adapter import Quantization
from smalti.config.families import FAMILIES
from smalti.config.load import Additions, from_dict
from smalti.config.train import PrecisionConfig
from smalti.config.tune import UNKNOWN_STEPS, TuneConfig, TuneSection
from smalti.data.documents.heldout import HELDOUT, TRAIN
from smalti.data.documents.publish import only_writer
from smalti.data.examples.folder import RECORD_NAME, ExamplesRecord, write_examples
from smalti.data.examples.source import ExampleSource
from smalti.data.pack.examples import ExampleRows
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.evals.tasks.find import load_task
from smalti.train.origin import model_of, run_of
from smalti.tune import tokenizers
from smalti.tune.chats import ChatTokenizer
from smalti.tune.chats.examples import examples_of
from smalti.tune.chats.files import files_of
from smalti.tune.chats.report import ExamplesReport
from smalti.tune.form import Form, form_of
from smalti.tune.spool import Spool

SOURCE, VALIDATION = "examples", "validation"
"""Names of the tokenized examples in ``data.sources``, and of the held-out ones in ``data.heldout``."""
REPORT_NAME = "report.json"
_FORMAT = 5
"""Changed whenever the same files and config would give other examples."""
_DECIDES_TOKENS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/default.jinja", "generation_config.json",
)  # fmt: skip
_NOT_TOKENIZER = shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt", "*.pth", "README.md")


def complete(
    values: Mapping[str, Any], origins: Mapping[tuple[str | int, ...], str], *, tokenize: bool = True
) -> Additions:
    """Return what follows from ``tune`` and ``init_from`` of a recipe: sources, held-out set, tokenizer, and the steps
    of a duration in epochs. Tokenizes the examples, unless an earlier command has.

    Without ``tokenize`` nothing is written: prompts count as held out, and epochs become ``UNKNOWN_STEPS``.

    Raises UserError for a recipe without ``init_from``, and DataError for bad examples.
    """
    sections = {name: values[name] for name in TuneSection.model_fields if name in values}
    section = from_dict(TuneSection, sections, "recipe", origins=origins).config
    tune = section.tune
    origin = values.get("init_from")
    if not isinstance(origin, str):
        raise UserError("a recipe with 'tune:' has no init_from", hint="init_from=runs/NAME/export, the model to tune")
    data = values.get("data") or {}
    model = values.get("model") or {}
    if tune.reward:
        _require_scores(model.get("family") or model_of(origin).family)
    seq_len = data.get("seq_len") or model.get("max_position_embeddings") or model_of(origin).max_position_embeddings
    compute = ((values.get("train") or {}).get("precision") or {}).get("compute", PrecisionConfig().compute)
    tokenizer = data.get("tokenizer") or tokenizer_of(origin)
    if tokenize:
        tokenizers.check(tune, tokenizer, origin)
    quantization = section.adapter.quantize if section.adapter else None
    folder = prepared_folder(
        tune, tokenizer, seq_len, origin=origin, compute=compute, quantization=quantization, write=tokenize
    )
    is_known = (folder / TRAIN / RECORD_NAME).is_file()
    _refuse_own_names(data)
    stages = data.get("stages") or [{"weights": {SOURCE: 1.0}}]
    has_heldout = (folder / HELDOUT).is_dir() if is_known else tune.examples.heldout_frac > 0
    heldout = {VALIDATION: str(folder / HELDOUT)} if has_heldout else {}
    data_section = {
        "sources": {SOURCE: str(folder / TRAIN)},
        "heldout": heldout,
        "tokenizer": str(folder / "tokenizer"),
        "seq_len": seq_len,
        "stages": stages,
    }
    additions = {
        "data": data_section,
        **({"model": {"num_labels": 1}} if tune.reward else {}),
        **_steps(values.get("train") or {}, folder / TRAIN if is_known else None, seq_len, stages),
    }
    return additions, f"tune.examples: {folder}"


def _require_scores(family: str) -> None:
    """Raise UserError where a model of the family cannot be a reward model."""
    families = [name for name, options in FAMILIES.items() if "num_labels" in options.free]
    if family not in families and family != "decoder":
        raise UserError(
            f"a reward model cannot begin with a model of the family {family}: transformers has no class of it for "
            "sequence classification",
            allowed=f"init_from of a family among {', '.join(families)}",
            hint="init_from=FOLDER of another base: a reward model need not be of the family or size of what it judges",
        )


def _refuse_own_names(data: Mapping[str, Any]) -> None:
    """Raise UserError where the recipe gives the sections that follow from the examples."""
    for section, name in (("sources", SOURCE), ("heldout", VALIDATION)):
        if name in (data.get(section) or {}):
            raise UserError(
                f"data.{section}.{name} is given, and follows from tune.examples",
                allowed="other names",
                hint=f"rename data.{section}.{name}",
            )


def tokenizer_of(origin: str) -> str:
    """Return the folder of the tokenizer of a run, a checkpoint or a Hugging Face folder."""
    run = run_of(Path(origin))
    return str(Path(origin) if run is None else run / "tokenizer")


def prepared_folder(
    tune: TuneConfig,
    tokenizer: str,
    seq_len: int,
    *,
    origin: str,
    compute: str,
    quantization: Quantization | None = None,
    write: bool = True,
) -> Path:
    """Return the folder of the tokenized examples: ``train``, ``heldout`` and ``tokenizer``. Writes it if needed,
    unless ``write`` is false.

    origin: the model to tune, which is the reference of preferences. compute: its format of matmuls. quantization: that
    of its weights beside adapters.

    A rank never writes it: the ranks of a job would write it together.
    """
    inputs = [file.path for name in tune.examples.files for file in files_of(name)]
    digests = [_digest_of_tokenizer(tokenizer), *map(sha256_file, inputs), _digest_of_template(tune)]
    of_tasks = [
        sha256_file(file) for path in tune.examples.decontaminate for file in (path, load_task(path).config.file)
    ]
    form = form_of(tune, seq_len, origin, compute, quantization)
    values = [_FORMAT, tune.examples.model_dump(mode="json"), seq_len, digests, of_tasks, *form.key]
    folder = Path(tune.prepared) / digest_json(values)[:16]
    if not write or (folder / TRAIN / RECORD_NAME).is_file():
        return folder
    if env.inside_world():
        raise UserError(
            f"the examples are not tokenized yet: {folder} does not exist",
            hint=f"run 'smalti tune {tune.kind} RECIPE --dry-run' once, on one node; then start the ranks",
        )
    _write(folder, tune, tokenizer, form)
    return folder


def _digest_of_tokenizer(folder: str) -> str:
    """Return the digest of the files that decide tokens, template and end tokens."""
    if not (Path(folder) / "tokenizer.json").is_file():
        raise DataError(f"{folder} holds no tokenizer", hint="data.tokenizer=FOLDER names it")
    paths = [path for name in _DECIDES_TOKENS if (path := Path(folder) / name).is_file()]
    return digest_json({path.name: sha256_file(path) for path in paths})


def _digest_of_template(tune: TuneConfig) -> str:
    template = tune.examples.template
    return sha256_file(template) if template.endswith(".jinja") and Path(template).is_file() else template


def _write(folder: Path, tune: TuneConfig, tokenizer: str, form: Form) -> None:
    """Tokenize the examples into ``folder``, which appears complete or not at all, and print the counts.

    They are in temporary files until all are tokenized: mismatched answers and references need a split as a whole.
    """
    try:
        store.make_folder(folder.parent)
    except OSError as error:
        raise UserError(
            f"tune.prepared={tune.prepared} cannot be created: {os.strerror(error.errno or 0)}",
            allowed="a folder that this user can write to",
            hint="tune.prepared=FOLDER",
        ) from error
    print(f"tokenizing {', '.join(tune.examples.files)} into {folder}", file=sys.stderr, flush=True)
    report = ExamplesReport()
    by_split: dict[str, Spool] = {}
    with _temporary_folder(folder) as temporary, ExitStack() as spools:
        for split, example in examples_of(tune.examples, tokenizer, report, max_tokens=form.max_tokens):
            if split not in by_split:
                by_split[split] = spools.enter_context(closing(Spool(temporary)))
            by_split[split].append(example)
        shutil.copytree(tokenizer, temporary / "tokenizer", ignore=_NOT_TOKENIZER)
        if report.template:
            ChatTokenizer(tokenizer, report.template).write_to(temporary / "tokenizer")
        loaded = load_tokenizer(temporary / "tokenizer")
        for split, examples in by_split.items():
            write_examples(temporary / split, form.convert(examples, loaded), loaded)
        store.write_json(temporary / REPORT_NAME, report.to_json())
        if not folder.exists():  # another process may have written the same
            os.replace(temporary, folder)
    if HELDOUT not in by_split:
        text = "no prompt was held out, so nothing measures the answers and no checkpoint is the best"
        text += f"; tune.examples.heldout_frac={min(0.2, 10 / max(report.rows, 1)):.2g} holds some out"
        print(f"warning: {text}", file=sys.stderr)
    for name, text in report.rows_of_table():
        print(f"{name:<12} {text}", file=sys.stderr)


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``, removed at the end; first remove those of processes that were killed."""
    for left in folder.parent.glob(f".{'[0-9a-f]' * len(folder.name)}.*.tmp"):
        with suppress(UserError, OSError), only_writer(left):  # unless a process that lives is writing it
            shutil.rmtree(left)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    unlocked = temporary.with_suffix(".new")
    store.make_folder(unlocked)
    try:
        with only_writer(unlocked):
            os.replace(unlocked, temporary)  # locked before it has the name by which others find and remove it
            yield temporary
    finally:
        for path in (unlocked, temporary):
            shutil.rmtree(path, ignore_errors=True)


def _steps(train: Mapping[str, Any], folder: Path | None, seq_len: int, stages: Any) -> dict[str, Any]:
    """Return ``train.duration`` in steps, where the recipe gives epochs of the examples (``3ep``); else nothing.

    ``folder``: of the tokenized examples; None: they are not tokenized.
    """
    duration, batch = train.get("duration"), train.get("global_batch_tokens")
    if not isinstance(duration, str) or (match := re.fullmatch(r"(\d+\.?\d*)(ep|h|min|s|\s*ep\w+)", duration)) is None:
        return {}
    if match[2] != "ep":
        raise UserError(
            f"train.duration={duration} is not a length of tuning",
            allowed="epochs of the examples (3ep), steps (600step) or tokens (2e6tok)",
            hint=f"train.duration={match[1]}ep",
        )
    epochs, weights = float(match[1]), stages[0].get("weights", {}) if len(stages) == 1 else {}
    own_length = any("seq_len" in stage or "weights_end" in stage for stage in stages)
    if not epochs or not isinstance(batch, int) or not weights.get(SOURCE) or own_length:
        raise UserError(
            f"train.duration={duration} cannot be converted to steps",
            allowed=f"a number of epochs, with train.global_batch_tokens and one stage with a weight for '{SOURCE}'",
            hint="train.duration=3ep, or a number of steps: train.duration=600step",
        )
    if folder is None:
        return {"train": {"duration": UNKNOWN_STEPS}}
    share = weights[SOURCE] / sum(weights.values())
    rows = ExampleRows(ExampleSource(str(folder), ExamplesRecord.load(folder)), seq_len, 0).size
    return {"train": {"duration": f"{max(1, ceil(epochs * rows * seq_len / share / batch))}step"}}
