"""The model card of an exported run, written from the files of its run folder alone.

What these do not contain (licences of the documents, evals not run) is stated as unknown.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smalti import __version__
from smalti.base import log, store
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.units import format_count
from smalti.config.data import SourceConfig
from smalti.config.run import RunConfig
from smalti.config.yaml_lines import parse
from smalti.cost.flops import FORMULA, train_flops_per_token
from smalti.cost.params import count
from smalti.data.examples.source import ExampleSource
from smalti.data.sources.open import open_source, read_index
from smalti.track.registry.facts import RECORD
from smalti.track.report.continued import COLUMNS, continued
from smalti.track.report.read import read_run
from smalti.track.sinks.jsonl import read_metrics

_GIVE_UP = "5s"
"""Longest wait for a store that does not answer."""


_USE_OF_SCORES = (
    "## Use\n\n```python\n"
    "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n\n"
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
    'model = AutoModelForSequenceClassification.from_pretrained("FOLDER")\n'
    'chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]\n'
    'ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]\n'
    "print(model(ids).logits[0, 0])\n```\n\n"
    "The score is that of the last token of the rendered conversation. Only differences between answers to one prompt "
    "have a meaning."
)


def model_card(run_folder: str | Path, config: RunConfig, step: int, dtype: str) -> str:
    """Return Markdown with YAML front matter, as the Hugging Face Hub reads it."""
    run = Path(run_folder)
    parts = [
        _front_matter(config),
        f"# {config.name}\n\n{_what(config)}",
        _USE_OF_SCORES if config.model.num_labels else _use(tuned=config.tune is not None),
        "## Model\n\n" + _table(("", ""), _shape_rows(config, dtype)),
        *history(run, config, step),
    ]
    return "\n\n".join(parts) + "\n"


def history(run: Path, config: RunConfig, step: int) -> list[str]:
    """Return the sections on training, examples and loss, data, evals and provenance."""
    return [
        "## Training\n\n" + _table(("", ""), _training_rows(config, step)),
        *_tuning(config),
        *_continued(run, step),
        "## Data\n\n" + _data(run, config, step),
        "## Evaluation\n\n" + _evals(run, step),
        "## Provenance\n\n" + _table(("", ""), _provenance_rows(run)),
    ]


def _what(config: RunConfig) -> str:
    kind = "reward model" if config.model.num_labels else "language model"
    made = f"{kind} of {format_count(count(config.model).total)} parameters, made with Smalti {__version__}"
    if config.init_from is not None:
        if config.tune is not None:
            return f"A {made}, tuned from the weights of {config.init_from}."
        return f"A {made} from the weights of {config.init_from}. What those were tuned for is not known here."
    return f"A base {made}. It continues text. It was not tuned to follow instructions or to be safe."


def _front_matter(config: RunConfig) -> str:
    tags = ["smalti", "mixture-of-experts" if config.model.moe else "dense"]
    if config.init_from is None:
        tags.append("base-model")
    pipeline = "text-classification" if config.model.num_labels else "text-generation"
    lines = ["library_name: transformers", f"pipeline_tag: {pipeline}", "tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join(["---", *lines, "---"])


def _use(*, tuned: bool) -> str:
    if tuned:
        return (
            "## Use\n\n```\nsmalti chat FOLDER\n```\n\n```python\n"
            "from transformers import pipeline\n\n"
            'chat = pipeline("text-generation", "FOLDER")\n'
            'print(chat([{"role": "user", "content": "Hello"}], max_new_tokens=64))\n```'
        )
    return (
        "## Use\n\n```\nsmalti chat FOLDER --prompt 'def main('\n```\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'ids = tokenizer(tokenizer.eos_token + "def main(", return_tensors="pt").input_ids\n'
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0]))\n```\n\n"
        "Every document began with the end-of-document token in training, so a prompt begins with it too."
    )


def _shape_rows(config: RunConfig, dtype: str) -> list[tuple[str, str]]:
    model, params = config.model, count(config.model)
    rows = [
        ("family", model.family),
        ("parameters", f"{params.total:,} ({params.active:,} active for each token)"),
        ("layers, hidden size", f"{model.num_hidden_layers}, {model.hidden_size}"),
        ("query heads, key/value heads", f"{model.num_attention_heads}, {model.kv_heads}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("longest context", f"{model.max_position_embeddings:,} tokens (trained at {_lengths(config)})"),
        ("weights", dtype),
    ]
    if model.moe:
        rows.insert(2, ("experts", f"{model.moe.num_experts}, {model.moe.num_experts_per_tok} for each token"))
    return rows


def _tuning(config: RunConfig) -> list[str]:
    """Return the section on the examples and the loss, and the models that this one comes from."""
    if config.tune is None:
        return []
    examples, parents = config.tune.examples, []
    origin: str | None = config.init_from
    while origin is not None and origin not in parents:
        parents.append(origin)
        origin = _origin_of(origin)
    rows = [
        ("loss", config.tune.loss),
        ("examples", ", ".join(examples.files)),
        ("chat template", examples.template),
        ("in the loss", f"{examples.turns} messages of {', '.join(examples.roles)}"),
        ("parents", ", from ".join(parents)),
    ]
    return ["## Tuning\n\n" + _table(("", ""), rows)]


def _origin_of(folder: str) -> str | None:
    """Return ``init_from`` of the run that a folder is, is in, or was exported from; None if there is none."""
    path = Path(folder)
    record = path / RECORD
    runs = [Path(store.read_json(record)["run_folder"])] if record.is_file() else [path, path.parent.parent]
    for run in runs:
        if (run / "config.yaml").is_file():
            origin = parse((run / "config.yaml").read_text(encoding="utf-8"), str(run)).value.get("init_from")
            return origin if isinstance(origin, str) else None
    return None


def _continued(run: Path, step: int) -> list[str]:
    result = continued(read_run(run), step=step)
    return [f"## {result.heading}\n\n{result.title()}\n\n{_table(COLUMNS, result.table_rows())}"] if result else []


def _lengths(config: RunConfig) -> str:
    return ", ".join(f"{seq_len:,}" for seq_len in config.tokens_by_seq_len())


def _training_rows(config: RunConfig, step: int) -> list[tuple[str, str]]:
    length, by_seq_len = config.length, config.tokens_by_seq_len(step)
    tokens = length.tokens(step)
    flops = sum(
        train_flops_per_token(config.model, seq_len, frozen=config.adapter is not None) * n
        for seq_len, n in by_seq_len.items()
    )
    batches = [f"{size:,} from step {start:,}" for start, size in length.batches if start < step]
    optimizer, precision, adapter = config.train.optimizer, config.train.precision, config.adapter
    trained = []
    if adapter is not None:
        base = f", beside {adapter.quantize} weights" if adapter.quantize else ""
        trained = [("trained", f"adapters (LoRA) of rank {adapter.rank} on {', '.join(adapter.targets)}{base}")]
    return [
        *trained,
        ("steps", f"{step:,}"),
        ("tokens trained", f"{tokens:,}"),
        ("tokens in a step", ", ".join(batches) if len(batches) > 1 else f"{length.batch_tokens(0):,}"),
        ("FLOPs", f"{flops:.3g} ({flops / max(1, tokens):.3g} a token, formula {FORMULA})"),
        ("optimizer", f"{optimizer.name}, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"),
        ("precision", f"compute {precision.compute}, master weights {precision.master}"),
        ("seed", str(config.seed)),
    ]


def _data(run: Path, config: RunConfig, step: int) -> str:
    logged_step, values = _last_metrics(run, step)
    trained = {
        name.split("/")[2]: value
        for name, value in values.items()
        if name.startswith("data/mix/") and name.endswith("/tokens")
    }
    rows = []
    for name, source in config.data.sources.items():
        size, digest = _size_and_digest(config, source)
        rows.append((name, f"{trained[name]:,.0f}" if name in trained else "unknown", size, digest))
    until = f" by step {logged_step:,}" if trained and logged_step != step else ""
    text = _table(("source", f"tokens trained{until}", "tokens in the source", "digest"), rows)
    return text + "\n\nLicences of the documents are not recorded here; whoever passes the model on has to state them."


def _size_and_digest(config: RunConfig, source: SourceConfig) -> tuple[str, str]:
    """Return tokens and digest of a source, in any format; or why they are not known."""
    fetch = config.data.fetch.model_copy(update={"give_up": _GIVE_UP})
    try:
        index = read_index(source, fetch, tokenizer=config.data.tokenizer)
        opened = open_source(source, index, fetch, tokenizer=config.data.tokenizer)
    except DataError:
        return "(not found when exported)", ""
    except (UserError, RetryableError) as error:
        log.get("export").warning("the card does not say how many tokens %s has: %s", source.path, error.message)
        return "(could not be reached when exported)", ""
    opened.close()
    in_loss = f" ({opened.record.n_loss_tokens:,} in the loss)" if isinstance(opened, ExampleSource) else ""
    return f"{opened.n_tokens:,}{in_loss}", opened.digest[:12]


def _evals(run: Path, step: int) -> str:
    """Return the results of each suite at exactly this step: of each task those with most items, then the latest."""
    suites: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}
    for path in sorted(run.glob("evals/*/*/results.json"), key=lambda path: path.parent.name):
        results = store.read_json(path)
        if results.get("step") != step:
            continue
        tasks = suites.setdefault(results["suite"], {})
        for name, score in results["tasks"].items():
            if name not in tasks or score["n"] >= tasks[name][0]["n"]:
                tasks[name] = score, results
    if not suites:
        return f"Step {step} has not been evaluated. `smalti eval run RUN` does it."
    parts = []
    for suite, tasks in suites.items():
        rows = [
            (
                f"{name}{_settings(score)}",
                score["metric"].replace("_", " "),
                f"{score['value']:.4g}",
                _interval(score),
                f"{score['n']:,}",
                _baseline(score),
            )
            for name, (score, _) in tasks.items()
        ]
        whole = [results for _, results in tasks.values()]
        times, lengths = (sorted({str(results[key]) for results in whole}) for key in ("time", "seq_len"))
        head = f"Suite `{suite}`, {', '.join(times)}, contexts of {', '.join(lengths)} tokens.\n\n"
        parts.append(head + _table(("task", "metric", "value", "95 % interval", "n", "baseline"), rows))
    return "\n\n".join(parts)


def _settings(score: dict[str, Any]) -> str:
    """Return mode and shots of a task, where it has them."""
    shots = score.get("shots")
    words = [score.get("mode"), None if shots is None else f"{shots} shot{'' if shots == 1 else 's'}"]
    return f" ({', '.join(filter(None, words))})" if any(words) else ""


def _interval(score: dict[str, Any]) -> str:
    interval = score.get("interval")
    return f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else ""


def _baseline(score: dict[str, Any]) -> str:
    if "gzip_bits_per_byte" in score:
        return f"gzip -9 {score['gzip_bits_per_byte']:.4g}, xz -9 {score['xz_bits_per_byte']:.4g}"
    return f"chance {score['chance']:.4g}: {score['verdict']}" if score.get("chance") else ""


def _provenance_rows(run: Path) -> list[tuple[str, str]]:
    path = run / "provenance.json"
    if not path.is_file():
        return [("provenance.json", "not in the run folder")]
    record = store.read_json(path)
    git = record.get("git") or {}
    commit = f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "not from a checkout"
    rows = [("commit", commit), ("command", " ".join(record.get("command", [])))]
    rows += [(key, str(record[key])) for key in ("time", "smalti", "python", "platform") if key in record]
    torch_version = record.get("packages", {}).get("torch")
    return [*rows, ("torch", torch_version)] if torch_version else rows


def _last_metrics(run: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Return the step and the values of the last line with the mixture at or before ``step``."""
    last_step = 0
    last_line: dict[str, Any] = {}
    for line in read_metrics(run):
        if last_step <= line.get("step", 0) <= step and any(name.startswith("data/mix/") for name in line):
            last_step, last_line = line["step"], line
    return last_step, last_line


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
