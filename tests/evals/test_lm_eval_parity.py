"""lm-evaluation-harness's `hf` backend gives the same likelihoods and accuracies on ten of the Gauntlet's files.

It gets the strings of mode ``fixed``: head and context, and the continuation. Where a tokenizer's own template has no
begin token, its text is in front of them. Runs where the environment `lm-eval` of tools/peers.py is installed;
`make prove lm_eval` installs it and takes all rows, and the model that `smalti demo` exports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
from conftest import PROVE
from lm_eval.api.instance import Instance
from tiny_models import llama_config, tiny_model
from tiny_runs import tiny_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from smalti.distributed.checkpoint.export import export
from smalti.evals.gauntlet.files import path_of
from smalti.evals.gauntlet.table import BY_NAME
from smalti.evals.likelihood import Scores, score_greedy
from smalti.evals.lm_eval.model import SmaltiLM
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.prompts import Prompt, make_prompts
from smalti.evals.tasks.windows import option_windows
from smalti.model.huggingface import Companions, LanguageModel, save
from smalti.serve.engine.engine import Engine

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/gauntlet"
TASKS = (
    *("arc_easy", "arc_challenge", "piqa", "copa", "openbook_qa", "boolq", "commonsense_qa", "winogrande"),
    *("lambada_openai", "bigbench_operators"),
)
SEQ_LEN = 4096
"""Longer than every prompt, and than the models' own context, which changes nothing in what is compared."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not DATA.is_dir(), reason="the Gauntlet's files are not here"),
    pytest.mark.skipif(
        not PROVE and not (peers.ENVIRONMENTS / "lm-eval/installed").is_file(), reason="installs lm-eval's hf backend"
    ),
]


def demo_export(folder: Path) -> Path:
    """The export of a run; under `make prove` that of `smalti demo`."""
    if not PROVE:
        run = tiny_run(folder)
        return Path(export(run))
    command = [sys.executable, "-m", "smalti", "demo", "--minutes", "0.5"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "runs/demo/export"


def random_llama(folder: Path) -> Path:
    """Random weights, and a tokenizer as Llama 2 has it: words begin with a mark, the template has a begin token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    config = llama_config(vocab_size=2000, context=SEQ_LEN)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    save(LanguageModel(tiny_model(config), Companions(tokens)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
    return folder


def prompts_of(name: str, limit: int | None) -> list[Prompt]:
    benchmark = BY_NAME[name]
    path = path_of(benchmark, str(DATA))
    assert path is not None
    task = benchmark.task(path)
    return make_prompts(task, read_items(task), mode="fixed", limit=limit)


def harness_task(name: str, prompts: list[Prompt], begin: str, work: Path) -> dict[str, Any]:
    """A task of lm-eval with the strings of these prompts, as a config in its format."""
    is_schema, is_exact = len(prompts[0].contexts) > 1, len(prompts[0].contexts) == len(prompts[0].continuations) == 1
    delimiter = " " if all(text.startswith(" ") for prompt in prompts for text in prompt.continuations) else ""
    rows = [
        {
            "context": begin + prompt.head + prompt.contexts[0],
            "contexts": [begin + prompt.head + context for context in prompt.contexts],
            "texts": [text.removeprefix(delimiter) for text in prompt.continuations],
            "continuation": prompt.continuations[0].removeprefix("" if is_exact else delimiter),
            "gold": prompt.item.gold,
        }
        for prompt in prompts
    ]
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("gold", "continuation", "contexts") if is_schema else ("context", "gold", "texts")
    text, target, choices = ("context", "continuation", None) if is_exact else columns
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "loglikelihood" if is_exact else "multiple_choice",
        "doc_to_text": text,
        "doc_to_target": target,
        **({} if choices is None else {"doc_to_choice": choices}),
        "target_delimiter": delimiter,
        # Of a schema, acc_norm divides by the lengths of the contexts.
        "metric_list": [{"metric": "acc"}, *([] if is_exact or is_schema else [{"metric": "acc_norm"}])],
    }


def harness_scores(
    folder: Path, pairs: list[tuple[str, str]], tasks: list[dict[str, Any]], work: Path
) -> tuple[Scores, dict[str, dict[str, float]]]:
    """What lm-eval gives for pairs of context and continuation, and what it reports of the tasks."""
    # In float32 its sum over an answer of 3,600 nats is itself 1.4e-4 off.
    job = {"folder": str(folder), "max_length": SEQ_LEN, "threads": 2, "softmax_dtype": "float64"}
    turn = {name: str(work / f"{name}.json") for name in ("pairs", "answers", "results")}
    turn |= {"batch_size": 16, "tasks": tasks}
    (work / "pairs.json").write_text(json.dumps(pairs))
    (work / "job.json").write_text(json.dumps(job))
    command = [peers.python_of("lm-eval"), ROOT / "bench/peers/lm_eval_hf.py", work / "job.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HOME"] = str(work)
    done = subprocess.run(command, env=environment, input=json.dumps(turn), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((work / "answers.json").read_text())
    log_likelihoods, greedy = zip(*answers, strict=True)
    scores = Scores(-np.array(log_likelihoods), np.zeros(len(answers), np.int64), np.array(greedy))
    return scores, json.loads((work / "results.json").read_text())


def rights(prompts: list[Prompt], scores: Scores, n_tokens: np.ndarray, rule: str) -> list[bool]:
    """Whether each item is right by a rule of ours (per token), or of lm-eval (acc: sum, acc_norm: per character)."""
    right, start = [], 0
    for prompt in prompts:
        options = [text for _ in prompt.contexts for text in prompt.continuations]
        part = slice(start, start + len(options))
        sizes = {"per token": n_tokens[part], "acc": 1, "acc_norm": np.array([len(text.strip()) for text in options])}
        ranks = scores.nats[part] / sizes[rule]
        right.append(bool(scores.greedy[start]) if len(options) == 1 else int(ranks.argmin()) == prompt.item.gold)
        start = part.stop
    return right


@pytest.mark.parametrize("model", ["demo", "llama"])
def test_lm_eval_gives_the_same_likelihoods_and_accuracies(model: str, tmp_path: Path, proof, record) -> None:
    limit = proof(short=4, full=0) or None
    folder = demo_export(tmp_path) if model == "demo" else random_llama(tmp_path)
    engine = Engine.from_folder(folder, device="cpu")
    begin = "" if engine.tokenizer.template_ids else engine.tokenizer.eod_token
    prompts = {name: prompts_of(name, limit) for name in TASKS}
    windows: list[Any] = []
    pairs: list[tuple[str, str]] = []
    ends: dict[str, slice] = {}
    for name, of_task in prompts.items():
        start = len(pairs)
        for prompt in of_task:
            options, _, cut = option_windows(engine, prompt, SEQ_LEN, "fixed")
            assert not cut
            windows += options
            pairs += [
                (begin + prompt.head + context, text) for context in prompt.contexts for text in prompt.continuations
            ]
        ends[name] = slice(start, len(pairs))
    tasks = [harness_task(name, of_task, begin, tmp_path) for name, of_task in prompts.items()]
    ours, (theirs, reported) = score_greedy(engine.model, windows), harness_scores(folder, pairs, tasks, tmp_path)
    assert np.abs(ours.nats - theirs.nats).max() < 1e-4
    bridge = SmaltiLM(engine, SEQ_LEN)
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    answers = bridge.loglikelihood(requests)
    assert max(abs(score + nats) for (score, _), nats in zip(answers, theirs.nats, strict=True)) < 1e-4
    assert [greedy for _, greedy in answers] == theirs.greedy.tolist()
    figures: dict[str, Any] = {}
    for name, part in ends.items():
        of_both = [Scores(one.nats[part], one.n_tokens[part], one.greedy[part]) for one in (ours, theirs)]
        assert np.array_equal(of_both[0].greedy, of_both[1].greedy), name
        figures[name] = {
            "items": len(prompts[name]),
            "requests": part.stop - part.start,
            "largest_difference_nats": float(np.abs(of_both[0].nats - of_both[1].nats).max()),
        }
        for rule in ("per token", "acc", "acc_norm"):
            mine, other = (rights(prompts[name], one, of_both[0].n_tokens, rule) for one in of_both)
            assert mine == other, (name, rule)
            figures[name][f"accuracy, {rule}"] = sum(mine) / len(mine)
            if f"{rule},none" in reported[name]:
                assert reported[name][f"{rule},none"] == figures[name][f"accuracy, {rule}"], (name, rule)
        assert "acc,none" in reported[name]
    record(f"lm_eval-{model}", {"peer": "lm-eval==0.4.13, hf backend, fp32, CPU", "mode": "fixed", "tasks": figures})
