"""Several adapters over one base: each row of a batch computes what the merged model computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from app_requests import error_message, send
from tiny_models import family_config
from tiny_runs import tiny_run, tiny_tokenizer

from smalti.base.errors import DataError, UserError
from smalti.cli.main import run as smalti
from smalti.config.adapter import AdapterConfig
from smalti.config.model import ModelConfig
from smalti.data.tokenizer.chat import PlainChat
from smalti.distributed.checkpoint.export import export, relative_error
from smalti.model.adapters import peft, several
from smalti.model.adapters.adapter import Adapter, Merged
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder
from smalti.model.huggingface_weights import meta_weights
from smalti.serve.adapters import load, load_chats, load_end_ids, parse
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.loop import EngineLoop
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.server.app import build
from smalti.serve.server.metrics import Metrics
from smalti.serve.server.serving import Serving
from smalti.tune.chats.templates import write_template

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIGS = (
    AdapterConfig(rank=2, alpha=8, targets=("attention", "mlp")),
    AdapterConfig(rank=3, alpha=3, targets=("q_proj", "down_proj"), layers=(1, 1)),
)


def drawn(model: ModelConfig, config: AdapterConfig, seed: int) -> Adapter:
    """An adapter with values that change the answers."""
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[str, Any] = {}
    weights = meta_weights(model)
    for layer, names in config.paths(model).items():
        for name in names:
            key = f"blocks.{layer}.{name}" + ("" if ".experts." in name else ".weight")
            shape = weights[key].mT.shape if key.endswith("experts.down_proj") else weights[key].shape
            sizes = ((*shape[:-2], config.rank, shape[-1]), (*shape[:-1], config.rank))
            pairs[key] = tuple(torch.randn(size, generator=generator) / 4 for size in sizes)
    return Adapter(config.scale, pairs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_rows_of_a_batch_use_their_own_adapters(family: str, tmp_path: Path) -> None:
    folder = export(tiny_run(tmp_path, family=family))
    base = load_folder(folder, torch.float32)
    adapters = [drawn(base.config, config, seed) for seed, config in enumerate(CONFIGS)]
    weights = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = load_folder(folder, torch.float32)
    rows = several.add(model, adapters)
    ids_BT = (torch.arange(60) * 7 % 300).view(5, 12)
    numbers = [1, several.NONE, 0, 1, 0]
    rows.set(numbers, torch.device("cpu"))
    with torch.inference_mode():
        mixed = model(ids_BT).value
        for row, number in enumerate(numbers):
            merged = Decoder(base.config).eval()
            merged.load_state_dict(weights if number < 0 else Merged(weights, adapters[number]))
            assert relative_error(mixed[row], merged(ids_BT[row : row + 1]).value[0]) < 1e-5
        rows.set([several.NONE] * 5, torch.device("cpu"))
        assert relative_error(model(ids_BT).value, base(ids_BT).value) < 1e-6


@pytest.mark.slow
def test_engine_answers_with_the_adapter_of_each_request(tmp_path: Path) -> None:
    folder = export(tiny_run(tmp_path))
    config = load_folder(folder).config
    folders = {}
    for seed, adapter in enumerate(CONFIGS):
        path = tmp_path / f"adapter-{seed}"
        path.mkdir()
        peft.save(path, drawn(config, adapter, seed), config, adapter, folder)
        folders[f"a{seed}"] = str(path)
    engine = Engine.from_folder(folder, adapters=folders)
    names = ["a0", None, "a1", "a0", None]
    params = SamplingParams(max_tokens=12, temperature=0)
    mixed = generate(engine, ["def add("] * 5, params, names)
    texts = {
        name: [answer.text for answer, other in zip(mixed, names, strict=True) if other == name] for name in set(names)
    }
    for name, same in texts.items():
        assert len(set(same)) == 1
        assert generate(engine, ["def add("], params, [name])[0].text == same[0]
    assert len({same[0] for same in texts.values()}) == 3, "the adapters change the answer"
    with pytest.raises(UserError, match="there is no adapter 'b'"):
        engine.prepare("x", params, lambda _: None, "b")
    _check_server(engine, {name or "tiny": same[0] for name, same in texts.items()})


def _check_server(engine: Engine, texts: dict[str, str]) -> None:
    """The field ``model`` of a request chooses the adapter."""
    loop = EngineLoop(engine)
    app = build(Serving(engine, loop, PlainChat(), Metrics(loop.counts), "tiny"), max_body_bytes=20_000)
    listed = send(app, "GET", "/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("tiny", None), ("a0", "tiny"), ("a1", "tiny")]
    for name, text in texts.items():
        body = {"model": name, "prompt": "def add(", "max_tokens": 12, "temperature": 0}
        answer = send(app, "POST", "/v1/completions", json=body).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
    unknown = send(app, "POST", "/v1/completions", json={"model": "a2", "prompt": "x"})
    assert "this server has 'tiny', 'a0', 'a1'" in error_message(unknown, 404, code="model_not_found")
    loop.close()


@pytest.mark.slow
def test_requests_have_the_template_and_end_tokens_of_their_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(tiny_run(tmp_path))
    config = load_folder(folder).config
    folders = {}
    for name in ("tuned", "plain"):
        path = tmp_path / name
        path.mkdir()
        peft.save(path, drawn(config, CONFIGS[0], 0), config, CONFIGS[0], folder)
        folders[name] = str(path)
    prompt = Engine.from_folder(folder).tokenizer.encode("def add(")
    without = Engine.from_folder(folder, adapters=folders)
    end_id = generate(without, [prompt], SamplingParams(max_tokens=1, temperature=0), ["tuned"])[0].token_ids[0]
    write_template(folders["tuned"], "{% for m in messages %}{{ m.content }}{% endfor %}", [end_id])

    engine = Engine.from_folder(folder, adapters=folders)
    assert engine.end_ids("tuned") == engine.end_ids() | {end_id}
    assert engine.end_ids("plain") == engine.end_ids()
    loop = EngineLoop(engine)
    app = build(
        Serving(engine, loop, PlainChat(), Metrics(loop.counts), "tiny", load_chats(folders, PlainChat())),
        max_body_bytes=20_000,
    )
    listed = send(app, "GET", "/v1/models").json()["data"]
    assert [model["has_chat_template"] for model in listed] == [False, True, False]
    for name in ("tiny", "tuned", "plain"):
        body = {"model": name, "messages": [{"role": "user", "content": "def add("}], "max_tokens": 6}
        sent = send(app, "POST", "/v1/chat/completions", json=body | {"temperature": 0, "logprobs": True}).json()
        assert (sent["usage"]["prompt_tokens"] == len(prompt)) == (name == "tuned")
        if name == "tuned":
            choice = sent["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
            assert len(choice["logprobs"]["content"]) == 1, "the end token is reported"
    loop.close()

    for name, path in folders.items():
        options = ["--prompt", "def add(", "--temperature", "0", "--max-tokens", "6"]
        assert smalti(["chat", folder, "--adapter", path, *options]) == 0
        assert (capsys.readouterr().out == "\n") == (name == "tuned")


def test_end_tokens_of_an_adapter_are_those_of_its_folder(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert load_end_ids({"a": str(tmp_path)}, tokenizer) == {"a": frozenset()}
    tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_end_ids({"a": str(tmp_path)}, tokenizer) == {"a": frozenset({5, 7, tokenizer.eod_id})}
    config = family_config("llama", vocab_size=320, context=96)
    peft.save(tmp_path, drawn(config, CONFIGS[0], 0), config, CONFIGS[0], "base")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 320}')
    with pytest.raises(DataError, match="eos_token_id=320"):
        load({"a": str(tmp_path)}, tmp_path, config)


def test_adapters_of_another_base_and_ambiguous_names_are_refused(tmp_path: Path) -> None:
    assert parse(["a=x", "b=y"], "base") == {"a": "x", "b": "y"}
    for options in (["a"], ["a=x", "a=y"], ["base=x"], ["=x"]):
        with pytest.raises(UserError, match="--adapter"):
            parse(options, "base")
    folder = export(tiny_run(tmp_path))
    config = load_folder(folder).config
    peft.save(tmp_path, drawn(config, CONFIGS[0], 0), config, CONFIGS[0], folder)
    (tmp_path / "export.json").write_text('{"base": {"kind": "folder", "sha256": "0", "init_from": "other"}}')
    with pytest.raises(DataError, match="trained beside other weights"):
        load({"a": str(tmp_path)}, folder, config)
