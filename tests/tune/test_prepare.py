"""A tuning recipe becomes the config of a run: examples tokenized once, sections filled in, epochs as steps."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_run

from smalti.base.errors import UserError
from smalti.cli.plan.data_counts import known_sources, make_plan, reading_of
from smalti.cli.working_directory import load_run
from smalti.config.load import Loaded, show
from smalti.config.run import RunConfig
from smalti.data.examples.folder import ExamplesRecord
from smalti.data.examples.source import ExampleSource
from smalti.data.pack.examples import ExampleRows
from smalti.data.tokenizer.chat import load_chat
from smalti.tune.prepare import prepared_folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tune")
    tiny_run(root)
    rows = [{"prompt": f"add {n} and 1", "completion": str(n + 1)} for n in range(60)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def _load(root: Path, **changes: Any) -> Loaded[RunConfig]:
    values: dict[str, Any] = {
        "init_from": str(root / "runs/tiny"),
        "tune.examples.files": f"[{root / 'sums.jsonl'}]",
        "tune.prepared": str(root / "prepared"),
        "tune.examples.heldout_frac": 0.2,
        "train.global_batch_tokens": 192,
        **changes,
    }
    return load_run("instruct", [f"{key}={value}" for key, value in values.items()])


def test_sections_follow_from_the_examples(root: Path) -> None:
    loaded = _load(root)
    config, folder = loaded.config, Path(loaded.config.data.sources["examples"].path).parent
    assert config.data.seq_len == config.model.max_position_embeddings == 96
    assert config.data.heldout == {"validation": str(folder / "heldout")}
    assert loaded.origins["data.seq_len"] == f"tune.examples: {folder}"
    train, heldout = (ExamplesRecord.load(folder / split) for split in ("train", "heldout"))
    assert train.n_examples + heldout.n_examples == 60
    assert heldout.n_examples > 2
    template = load_chat(str(config.data.tokenizer))
    assert template.source.endswith("chat_template.jinja")
    generation = json.loads((folder / "tokenizer" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [train.eod_id]


def test_epochs_are_converted_to_steps(root: Path) -> None:
    def steps(**changes: Any) -> int:
        return _load(root, **changes).config.length.total_steps

    folder = _load(root).config.data.sources["examples"].path
    rows = ExampleRows(ExampleSource(folder, ExamplesRecord.load(folder)), 96, 0).size
    assert steps(**{"train.duration": "10ep"}) == math.ceil(10 * rows * 96 / 192)
    config = _load(root, **{"train.duration": "10ep"}).config
    (planned,) = make_plan(config, known_sources(config, {}), reading_of(config)).sources
    assert planned.epochs == pytest.approx(config.length.total_steps * 192 / (rows * 96))
    halved = "[{weights: {examples: 1, code: 1}}]"
    mixed = steps(**{"train.duration": "10ep", "data.stages": halved, "data.sources.code": root / "data/code/train"})
    assert mixed == pytest.approx(2 * steps(**{"train.duration": "10ep"}), abs=1)
    assert steps(**{"train.duration": "7step"}) == 7
    with pytest.raises(UserError, match=r"train.duration=0ep cannot be converted"):
        steps(**{"train.duration": "0ep"})
    with pytest.raises(UserError, match=r"train.duration=3epochs is not a length of tuning") as raised:
        steps(**{"train.duration": "3epochs"})
    assert raised.value.hint == "train.duration=3ep"


def test_names_and_stages_that_do_not_fit_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"data.sources.examples is given"):
        _load(root, **{"data.sources.examples": "elsewhere"})
    text = "[{weights: {code: 1}}]"
    with pytest.raises(UserError, match=r"one stage with a weight for 'examples'"):
        _load(root, **{"data.stages": text, "data.sources.code": root / "data/code/train", "train.duration": "2ep"})


def test_examples_are_tokenized_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(_load(root).config.data.sources["examples"].path).parent
    before = (folder / "train" / "tokens.npy").stat().st_mtime_ns
    assert Path(_load(root, **{"train.optimizer.lr": 1e-4}).config.data.sources["examples"].path).parent == folder
    assert (folder / "train" / "tokens.npy").stat().st_mtime_ns == before
    other = Path(_load(root, **{"tune.examples.seed": 3}).config.data.sources["examples"].path).parent
    assert other != folder
    tune = _load(root).config.tune
    assert tune is not None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    nowhere = tune.model_copy(update={"prepared": str(root / "nowhere")})
    with pytest.raises(UserError, match="not tokenized yet"):  # the ranks of a job would write it together
        prepared_folder(nowhere, str(root / "data/tokenizer"), 96, origin=str(root / "runs/tiny"), compute="fp32")


def test_a_config_is_shown_without_tokenizing(root: Path, tmp_path: Path) -> None:
    values = {"init_from": root / "runs/tiny", "tune.examples.files": f"[{root / 'sums.jsonl'}]"}
    values |= {"tune.prepared": tmp_path / "prepared", "train.duration": "3ep", "train.global_batch_tokens": 192}
    overrides = [f"{key}={value}" for key, value in values.items()]
    loaded = load_run("instruct", overrides, tokenize=False)
    assert not (tmp_path / "prepared").exists()
    text = show(loaded)
    assert re.search(r"\n  duration: 3ep +# command line\n", text)
    known = load_run("instruct", overrides)
    lines = set(show(known).splitlines())
    (other,) = [line for line in text.splitlines() if line not in lines]
    assert other.startswith("  duration: ")
    assert load_run("instruct", overrides, tokenize=False) == known


def test_what_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothere.jsonl, which does not exist"):
        _load(root, **{"tune.examples.files": "[nothere.jsonl]"})
    with pytest.raises(UserError, match=r"command line: unknown key adapter.rnk = 3") as raised:
        _load(root, **{"adapter.rnk": 3})
    assert "adapter.rank=3" in str(raised.value.hint)
    with pytest.raises(UserError, match="no init_from"):
        _load(root, init_from="null")
    run = tiny_run(tmp_path)
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(UserError, match="holds no tokenizer"):
        _load(root, init_from=run)


def test_the_uniform_loss_of_held_out_examples(root: Path) -> None:
    from tiny_models import UniformModel

    from smalti.evals.in_loop import heldout_hook

    config = _load(root).config
    record = ExamplesRecord.load(config.data.heldout["validation"])
    hook = heldout_hook(config)
    assert hook is not None
    assert hook(UniformModel(config.model.vocab_size), 0) == {
        "metrics/eval/validation/LanguageCrossEntropy": pytest.approx(math.log(320), rel=1e-6),
        "metrics/eval/validation/LanguagePerplexity": pytest.approx(320, rel=1e-4),
        "metrics/eval/validation/bits_per_byte": pytest.approx(
            math.log2(320) * record.n_loss_tokens / record.n_text_bytes, rel=1e-6
        ),
    }


def test_the_template_of_a_model_is_kept_and_texts_need_none(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "tokenizer"
    shutil.copytree(root / "runs/tiny/tokenizer", model)
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": f"def f{n}(): pass"}) + "\n" for n in range(40)))
    texts = {"tune.examples.files": f"[{root / 'texts.jsonl'}]", "tune.examples.template": "model"}
    config = _load(root, **texts, **{"data.tokenizer": str(model)}).config
    assert not load_chat(str(config.data.tokenizer)).source
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = _load(root, **{"tune.examples.template": "model", "data.tokenizer": str(model)}).config
    assert (Path(str(config.data.tokenizer)) / "chat_template.jinja").read_text() == template
