"""Loading: precedence, origins, presets, base, round trip, and the error of every bad input."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config import find
from smalti.config.curate import CurateConfig
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength, check_schedule
from smalti.config.load import dump, from_dict, json_schema, load, show
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.config.tune import TuneRecipe
from smalti.config.yaml_lines import parse, to_yaml

RECIPE = """\
name: t1
model: {preset: mpt-125m, vocab_size: 4096}
data:
  sources: {no: data/a, b: data/b}
  seq_len: 256
  stages:
  - until: 0.8run
    weights: {no: 1, b: 2}
  - weights: {b: 1}
train:
  duration: 100step
  global_batch_tokens: 16384
  optimizer:
    lr: 1e-3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return str(path)


def refused(path: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(RunConfig, path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_values_and_their_origins(recipe):
    loaded = load(RunConfig, recipe, ["train.optimizer.betas=[0.9, 0.99]", "data.stages.1.weights.b=3", "seed=2"])
    assert loaded.config.model.hidden_size == 768
    assert loaded.config.model.vocab_size == 4096
    assert loaded.config.train.optimizer.lr == 1e-3
    assert loaded.config.train.optimizer.betas == (0.9, 0.99)
    assert loaded.config.data.stages[1].weights == {"b": 3.0}
    assert loaded.path == recipe
    expected = {
        "seed": "command line",
        "model.vocab_size": f"{recipe}:2",
        "model.hidden_size": "preset mpt-125m:4",
        "model.rope_theta": "default",
        "data.sources.no": f"{recipe}:4",
        "data.stages.0.until": f"{recipe}:7",
        "data.stages.1.until": "default",
        "data.stages.1.weights.b": "command line",
        "train.optimizer.betas": "command line",
        "train.optimizer.lr": f"{recipe}:14",
    }
    assert {key: loaded.origins[key] for key in expected} == expected


def test_the_origin_of_a_path_that_replaces_a_short_source_is_the_command_line(recipe):
    loaded = load(RunConfig, recipe, ["data.sources.no.path=elsewhere"])
    assert loaded.config.data.sources["no"].path == "elsewhere"
    assert loaded.origins["data.sources.no"] == "command line"


def test_base_is_merged_by_key_and_lists_replace(recipe, tmp_path):
    (tmp_path / "child.yaml").write_text("base: r.yaml\nname: t2\ndata:\n  stages:\n  - weights: {no: 1, b: 5}\n")
    loaded = load(RunConfig, str(tmp_path / "child.yaml"))
    assert loaded.config.name == "t2"
    assert len(loaded.config.data.stages) == 1
    assert loaded.config.train.optimizer.lr == 1e-3
    assert loaded.origins["train.optimizer.lr"] == f"{recipe}:14"
    assert loaded.origins["data.stages.0.weights.b"] == f"{tmp_path}/child.yaml:5"


def test_a_base_may_not_have_a_base(recipe, tmp_path):
    (tmp_path / "child.yaml").write_text("base: r.yaml\n")
    (tmp_path / "grandchild.yaml").write_text("base: child.yaml\n")
    text = refused(str(tmp_path / "grandchild.yaml"))
    assert f"{tmp_path}/grandchild.yaml:1: base = child.yaml has a base itself (r.yaml)" in text
    assert "hint: 'smalti config show child.yaml > FILE' writes it out" in text
    (tmp_path / "moe.yaml").write_text("base: demo-moe\nname: mine\n")
    assert f"{tmp_path}/moe.yaml:1: base = demo-moe has a base itself (demo.yaml)" in refused(
        str(tmp_path / "moe.yaml")
    )
    (tmp_path / "extended.yaml").write_text("extends: demo\n")
    text = refused(str(tmp_path / "extended.yaml"))
    assert "unknown key extends = demo" in text
    assert "hint: did you mean base?" in text
    (tmp_path / "lost.yaml").write_text("base: nowhere.yaml\n")
    assert f"{tmp_path}/lost.yaml:1: base: there is no file 'nowhere.yaml'" in refused(str(tmp_path / "lost.yaml"))


def test_dump_and_show_load_back_equal(recipe, tmp_path):
    loaded = load(RunConfig, recipe, ["train.optimizer.lr=1e-20", "name=1e3"])
    for number, text in enumerate((dump(loaded.config), show(loaded))):
        (tmp_path / f"{number}.yaml").write_text(text)
        assert load(RunConfig, str(tmp_path / f"{number}.yaml")).config == loaded.config
    assert "lr: 1.0e-20" in show(loaded)
    assert "# command line" in show(loaded)


def test_a_run_folder_is_loaded_by_its_config(recipe, tmp_path):
    config = load(RunConfig, recipe).config
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(RunConfig, str(tmp_path)).config == config


def _past(more: str = "skip: []", *, at_step: int = 30) -> str:
    return (
        f"data.history=[{{at_step: {at_step}, duration: 40step, global_batch_tokens: 16384, seq_len: 256, lr: 1e-3, "
        f"stages: [{{weights: {{a: 1}}}}], {more}}}]"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optimizer.learning_rate=3", ["command line: unknown key train.optimizer.learning_rate = 3",
                                             "name, lr, betas", "did you mean train.optimizer.lr?"]),
        ("train.lr=3", ["unknown key train.lr", "did you mean train.optimizer.lr=3?"]),
        ("lr=3e-4", ["unknown key lr = 0.0003", "did you mean train.optimizer.lr=0.0003?"]),
        ("device=cuda", ["did you mean train.parallel.device=cuda?"]),
        ("optimizer={lr: 1}", ["did you mean train.optimizer?"]),
        ("nonsense=1", ["hint: delete it"]),
        ("train.optimizer.betas=" + "[" * 60 + "]" * 60, ["nested too deeply", "allowed: 50 levels"]),
        ("train.optimizer.betas=" + "[" * 20_000, ["[[...: lists and sections are nested too deeply"]),
        ("train.optimizer.betas=" + "{a: " * 20_000, ["nested too deeply"]),
        ("a." * 20_000 + "b=1", ["has 20001 levels", "up to 50"]),
        ("batch_size=3", ["did you mean train.global_batch_tokens?"]),
        ("track.consol=no", ["did you mean track.console='no'?"]),
        ("train.optimizer.lr=abc", ["train.optimizer.lr = abc is not allowed", "a number above 0"]),
        ("train.restart.budget={oom: 2}", ["restart.budget = {oom: 2} is not allowed", "a mapping of killed"]),
        ("train.optimizer.lr=.inf", ["train.optimizer.lr = .inf"]),
        ("train.optimizer.lr=true", ["true is not a number"]),
        ("model.num_hidden_layers=1e9", ["a whole number at least 1 and at most 10000"]),
        ("train.parallel.ranks=0", ["a whole number at least 1"]),
        ("model.head_dim=1", ["a whole number at least 2, or null"]),
        ("data.stages=[]", ["data.stages = [] is not allowed", "a list of at least one, each item"]),
        ("evals={suite: ../mine, tasks: [copy_64]}", ["text that matches ^[A-Za-z0-9]"]),
        ("train.parallel.ranks=1.5", ["train.parallel.ranks = 1.5", "a whole number"]),
        ("train.parallel.threads=many", ["threads = many", "auto"]),
        ("train.parallel.device=cudo", ["auto, cpu, cuda", "did you mean 'cuda'?"]),
        ("train.parallel.threads=0", ["parallel.threads = 0 is not allowed", "a whole number at least 1, or auto"]),
        ("train.microbatch_tokens=0", ["microbatch_tokens = 0 is not allowed", "a whole number at least 1, or auto"]),
        ("train.microbatch_tokens=-320", ["microbatch_tokens = -320 is not allowed"]),
        ("train.optimizer.betas=[1.5, 0.95]", ["betas.0 = 1.5 is not allowed", "a number at least 0 and below 1"]),
        ("train.optimizer.betas=[0.9, 1]", ["betas.1 = 1 is not allowed"]),
        ("train.duration=0step", ["train.duration = 0step: '0step' is no length; it must be above 0", "600step"]),
        ("train.duration=1e999tok", ["'1e999tok' is too large a number"]),
        ("train.checkpoint.every=0tok", ["'0tok' is no length"]),
        ("train.eval_every=0run", ["'0run' is no length"]),
        ("train.log_every=0step", ["'0step' is no length"]),
        ("train.log_every=0.0s", ["'0.0s' is no length"]),
        ("train.parallel.timeout=0min", ["'0min' is no length"]),
        ("train.schedule.warmup=200step",
         ["command line (train.schedule.warmup=200step): train",
          "train.schedule.warmup=200step is 200 steps; the run, train.duration=100step, has 100 steps",
          "allowed: at most 100step", "hint: train.schedule.warmup=0.02run"]),
        ("train.schedule.warmup=1638401tok", ["schedule.warmup=1638401tok is 100 steps; the run"]),
        ("train.schedule.decay=0.99run",
         ["schedule.warmup=0.02run and train.schedule.decay=0.99run are 2 + 99 steps",
          "allowed: together at most 100step"]),
        ("train.duration=120steps", ["train.duration = 120steps", "hint: did you mean '120step'?"]),
        ("train.eval_every=2 hours", ["hint: did you mean '2h'?"]),
        ("train.optimizer.lr=.nan", ["train.optimizer.lr = .nan is not allowed", "allowed: a finite number"]),
        ("train.optimizer.weight_decay=.inf", ["allowed: a finite number at least 0"]),
        ("train.duration=3min", ["'3min' has the unit 'min'", "600step"]),
        ("train.optimizer=null", ["a section with the keys name, lr"]),
        ("train.optimizer.betas=[1]", ["train.optimizer.betas.1 is missing"]),
        ("data.sources.b=null",
         ["stage 0 has a weight for 'b', which is not in data.sources", "allowed: names of data.sources: ",
          "hint: data.stages.0.weights.b=null removes the weight; a recipe that removes 'b' from its base must have"]),
        ("data.heldout={a b: x}", ["source 'a b' cannot be part of a metric name"]),
        ("data.stages.0.weights.x=1", ["stage 0 has a weight for 'x'"]),
        ("data.stages=[{weights: {a: 1, b: 0}, weights_end: {a: 2, b: 0}}]",
         ["weight of 'b' is 0 at both ends of the stage; it must be above 0; remove the source instead"]),
        ("data.stages=[{weights: {a: 1, x: 0}, weights_end: {a: 2}}]", ["weight of 'x' is 0 at both ends"]),
        ("data.stages=[{weights: {a: 1, b: 0}}]", ["weight of 'b' is 0.0; it must be above 0"]),
        ("data.stages=[{weights: {a: 1}, weights_end: {a: 1, b: -1}}]", ["weight of 'b' is -1.0; it must be above 0"]),
        (_past("skip: [[5, 3]]"), ["data.history[0].skip[0] is [5, 3]; it must be [begin, end), 0 <= begin < end"]),
        (_past("skip: [[-1, 3]]"), ["data.history[0].skip[0] is [-1, 3]"]),
        (_past(at_step=41), ["data.history[0].at_step is 41, but its run had 40 steps (duration 40step)"]),
        ("data.stages.7.until=1run", ["'7' is not an item of data.stages", "0 to 1"]),
        ("data.seq_len=100", ["the nearest are 16300 and 16400"]),
        ("train.global_batch_tokens=100", ["the least is 256"]),
        ("data.fetch.prefetch=-3s", ["write a number and a unit", "allowed: a length such as 10s, 10min, 2h"]),
        ("data.stages=[{weights: {}}]",
         ["line: data.stages.0.weights = {} is not allowed\nallowed: a mapping of at least one"]),
        ("model.hidden_size=100", ["hidden_size=100 is not a multiple"]),
        ("model.preset=dbrxx", ["command line: model.preset = 'dbrxx'", "did you mean the preset 'dbrx'?"]),
        ("model.preset=7", ["model.preset = 7 is not allowed"]),
        ("model.moe.num_experts=4", ["model.moe.num_experts_per_tok is missing"]),
        ("name=a/b", ["name: 'a/b' cannot be a folder name\nallowed: 1 to 100 letters, ", "hint: name=a-b"]),
        ("name={a: b", ["command line: name={a: b: not valid YAML"]),
        ("--train.lr=3", ["'--train.lr=3' is not an override", "hint: write 'train.lr=3'"]),
        ("train.optimizer", ["'train.optimizer' is not an override"]),
    ],
)  # fmt: skip
def test_bad_overrides_are_answered(recipe, override, words):
    text = refused(recipe, override)
    for word in words:
        assert word in text


MIXTURE = """\
model: {family: dbrx, norm: layernorm, vocab_size: 512, hidden_size: 128, intermediate_size: 192, num_hidden_layers: 3,
        num_attention_heads: 4, moe: {num_experts: 8, num_experts_per_tok: 2}}
"""


@pytest.mark.parametrize("name", ["moe-1b", "mpt-7b", "llama-3-1b"])
def test_a_typed_preset_takes_the_place_of_a_model_that_is_spelled_out(tmp_path, name):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("model: {preset: mpt-125m, vocab_size: 4096}\n", MIXTURE))
    loaded = load(RunConfig, str(path), ["model.num_hidden_layers=2", f"model.preset={name}"])
    alone = from_dict(ModelConfig, {"preset": name}, overrides=["num_hidden_layers=2"]).config
    assert loaded.config.model == alone
    assert loaded.origins["model.hidden_size"].startswith(f"preset {name}:")
    assert loaded.origins["model.num_hidden_layers"] == "command line"
    assert loaded.origins["train.optimizer.lr"].startswith(str(path))
    assert load(RunConfig, str(path), [f"model={{preset: {name}, num_hidden_layers: 2}}"]).config.model == alone
    (tmp_path / "m.yaml").write_text(to_yaml(yaml.safe_load(MIXTURE)["model"]))
    overrides = [f"preset={name}", "num_hidden_layers=2"]
    assert load(ModelConfig, str(tmp_path / "m.yaml"), overrides).config == alone


def test_a_hint_is_not_the_value_that_was_refused(recipe):
    assert "hint" not in refused(recipe, "train.restart.hang_floor=0s")


def test_a_typed_preset_takes_the_place_of_a_name_and_the_fields_beside_it_stay(recipe):
    loaded = load(RunConfig, recipe, ["model.preset=mpt-350m"])
    assert (loaded.config.model.hidden_size, loaded.config.model.vocab_size) == (1024, 4096)
    assert loaded.origins["model.vocab_size"] == f"{recipe}:2"


def test_a_depth_preset_on_the_command_line_keeps_the_train_section_of_the_recipe():
    loaded = load(RunConfig, "demo", ["model.preset=depth-12"])
    assert (loaded.config.model.family, loaded.config.model.num_hidden_layers) == ("llama", 12)
    assert loaded.config.train == load(RunConfig, "demo").config.train


def test_a_schedule_may_fill_the_run_and_have_no_part(recipe):
    for warmup, decay in (("0step", "0run"), ("0.3run", "0.7run"), ("1638400tok", "0run")):
        overrides = (f"train.schedule.warmup={warmup}", f"train.schedule.decay={decay}")
        schedule = load(RunConfig, recipe, overrides).config.train.schedule
        assert (schedule.warmup, schedule.decay) == (warmup, decay)


@given(st.integers(1, 10_000), st.integers(0, 100))
def test_shares_that_sum_to_one_always_fit(steps, percent):
    length = RunLength(steps, ((0, 7),))
    check_schedule(length, f"{steps}step", f"{percent / 100}run", f"{(100 - percent) / 100}run")


def test_all_problems_are_reported_with_their_lines(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE.replace("seq_len: 256", "seq_len: -1").replace("lr: 1e-3", "learning: 1"))
    text = refused(str(path))
    assert f"{path}: 3 problems" in text
    assert f"{path}:5: data.seq_len = -1 is not allowed" in text
    assert f"{path}:14: unknown key train.optimizer.learning = 1" in text
    assert f"{path}:13: train.optimizer.lr is missing" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nseed: 1\nname: b\n", ["bad.yaml:3: the key name is written twice (first at", "bad.yaml:1"]),
        ("train:\n  duration: 1step\n  duration: 2step\n", ["bad.yaml:3: the key train.duration is written twice"]),
        ("a: [1, 2\nb: 3\n", ["bad.yaml:2: not valid YAML"]),
        ("a: &x 1\nb: *x\n", ["repeats an anchor"]),
        ("- a\n- b\n", ["the file contains [a, b]"]),
        ("", ["name is missing"]),
        ("{[1]: 2}\n", ["a key of the file is a list"]),
    ],
)
def test_bad_files_are_answered(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    answer = refused(str(tmp_path / "bad.yaml"))
    for word in words:
        assert word in answer


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 20_000, "a: " + "{b: " * 20_000, "".join(f"{' ' * n}a:\n" for n in range(2000)), "- " * 20_000],
)
def test_a_file_that_is_nested_too_deeply_is_a_usage_error(tmp_path, text):
    (tmp_path / "deep.yaml").write_text(text)
    assert "lists and sections are nested too deeply\nallowed: 50 levels" in refused(str(tmp_path / "deep.yaml"))


def test_what_parse_takes_is_not_too_deep_for_the_rest(recipe):
    text = refused(recipe, "train.optimizer.betas=" + "[" * 40 + "]" * 40, "data.x=" + "{a: " * 40 + "}" * 40)
    assert "train.optimizer.betas.0 = [[" in text
    assert "unknown key data.x" in text


def test_a_file_that_is_missing_or_no_text(tmp_path):
    assert "there is no recipe file or recipe named" in refused(str(tmp_path / "none"))
    assert "the recipe comes first, its changes follow: RECIPE init_from=x" in refused("init_from=x")
    assert f"there is no file '{tmp_path / 'none.yaml'}'" in refused(str(tmp_path / "none.yaml"))
    assert "'smalti config show demo-dense' prints an example" in refused(str(tmp_path / "demo-dens.yaml"))
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    assert f"did you mean '{tmp_path / 'mine.yaml'}'?" in refused(str(tmp_path / "mien.yaml"))


def test_a_folder_without_config_has_the_hint_of_attempts_only_where_it_has_logs(tmp_path):
    (tmp_path / "half").mkdir()
    assert "has no config.yaml" in refused(str(tmp_path / "half"))
    assert "logs/attempt-N" not in refused(str(tmp_path / "half"))
    (tmp_path / "half/logs").mkdir()
    assert "logs/attempt-N" in refused(str(tmp_path / "half"))
    names = "chat, dbrx-132b, demo, demo-chat, demo-continue, demo-dense, demo-moe, dpo, instruct, kto, lora, "
    assert f"one of: {names}qlora, reward, storywriter\n" in refused("nosuch")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(str(tmp_path / "b.yaml"))


def test_yaml_is_12_and_not_11():
    value = parse("a: no\nb: 1e-3\nc: 2024-01-01\nd: 012\ne: 1:30\nf: 'x'\non: ~\ng: -.inf\n", "t").value
    expected = {"a": "no", "b": 1e-3, "c": "2024-01-01", "d": 12, "e": "1:30", "f": "x", "on": None, "g": float("-inf")}
    assert value == expected


_TRICKY = ["no", "1e3", "~", "", " x", "a: b", "- a", "#", "2024-01-01", "0x1F", "'", "é\n"]
_leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12), st.sampled_from(_TRICKY)
)
_tree = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(_tree)
def test_to_yaml_reads_back_equal(value):
    again = parse(to_yaml({"k": value}), "t").value["k"]
    assert again == value
    assert repr(again) == repr(value) or again == value


@pytest.mark.parametrize("name", find.preset_names())
def test_every_preset_is_a_model(name):
    assert from_dict(ModelConfig, {"preset": name}).config.vocab_size > 0


def test_dbrx_has_the_published_size():
    model = from_dict(ModelConfig, {"preset": "dbrx"}).config
    assert model.moe is not None
    experts = model.moe.num_experts * 3 * model.hidden_size * model.intermediate_size * model.num_hidden_layers
    attention = 2 * model.hidden_size * (model.hidden_size + model.kv_heads * model.width_per_head)
    total = experts + attention * model.num_hidden_layers + 2 * model.vocab_size * model.hidden_size
    assert total == pytest.approx(131.6e9, rel=0.001)


def test_what_an_empty_recipe_lacks_is_written_at_the_top_level(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    text = refused(str(tmp_path / "empty.yaml"))
    assert "write 'name:' at the top level of the recipe, or give name=VALUE" in text
    assert "in that section" not in text


def test_every_recipe_of_a_run_loads():
    loaded = []
    for name in find.recipe_names():
        keys = yaml.safe_load(find.find_recipe(name).text)
        if "train" in keys or "base" in keys:
            tunes = "tune" in keys or keys.get("base") == "instruct"
            loaded.append(load(TuneRecipe if tunes else RunConfig, name, origin_model=demo_model).config.name)
    runs = ["dbrx-132b", "demo", "demo-chat", "demo-continue", "demo-dense", "demo-moe"]
    assert loaded == ["chat", *runs, "dpo", "instruct", "kto", "lora", "qlora", "reward", "storywriter"]


def demo_model(source):
    """The model of ``smalti demo``, which recipes start from."""
    assert source == "runs/demo/export"
    return load(RunConfig, "demo").config.model


def test_storywriter_takes_any_model_by_its_name():
    loaded = load(RunConfig, "storywriter", origin_model=demo_model)
    assert loaded.config.model.max_position_embeddings == 1024
    assert loaded.config.model.rope_scaling.original_max_position_embeddings == 256
    assert loaded.origins["model.hidden_size"] == "init_from: runs/demo/export"

    llama = from_dict(ModelConfig, {"preset": "llama-2-7b"}).config
    long = ["init_from=llama", "data.seq_len=4096", "data.stages.0.seq_len=8192", "data.stages.1.seq_len=16384",
            "train.global_batch_tokens=16384"]  # fmt: skip
    model = load(RunConfig, "storywriter", long, origin_model=lambda source: llama).config.model
    assert (model.max_position_embeddings, model.rope_scaling.original_max_position_embeddings) == (16384, 4096)

    mpt = from_dict(ModelConfig, {"preset": "mpt-7b"}).config
    of_mpt = ["init_from=mpt", "model.rope_scaling=null", "model.max_position_embeddings=65536"]
    model = load(RunConfig, "storywriter", of_mpt, origin_model=lambda source: mpt).config.model
    assert model == mpt.model_copy(update={"max_position_embeddings": 65536})


def test_schema_offers_base_and_preset_and_descriptions():
    schema = json_schema(RunConfig)
    assert "base" in schema["properties"]
    named, dialled = schema["$defs"]["ModelConfig"]["properties"]["preset"]["anyOf"]
    assert "dbrx" in named["enum"]
    assert re.search(dialled["pattern"], "depth-12-moe")
    assert not re.search(dialled["pattern"], "depth-N")
    assert schema["properties"]["seed"]["description"]
    assert "required" not in schema
    assert schema["$defs"]["TrainConfig"]["properties"]["duration"]["examples"] == ["600step", "2e9tok"]
    assert "base" in json_schema(CurateConfig)["properties"]


def test_from_dict_takes_overrides_and_leaves_its_argument():
    value = {"sources": {"a": {"path": "x"}}, "output": "o"}
    loaded = from_dict(CurateConfig, value, "demo", ["sources.a.path=y"])
    assert loaded.config.sources["a"].path == "y"
    assert loaded.origins["output"] == "demo"
    assert value["sources"]["a"]["path"] == "x"


@pytest.mark.slow
def test_presets_are_found_inside_a_zipped_package(tmp_path):
    root = Path(find.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "smalti.zip", "w") as archive:
        for room in ("base", "config"):
            for path in sorted((root / "smalti" / room).rglob("*")):
                if path.suffix in (".py", ".yaml"):
                    archive.write(path, path.relative_to(root))
        archive.write(root / "smalti/__init__.py", "smalti/__init__.py")
    code = (
        "from smalti.config import find, load; from smalti.config.model import ModelConfig; import smalti\n"
        "assert '.zip' in smalti.__file__\n"
        "print(load.from_dict(ModelConfig, {'preset': 'dbrx'}).config.hidden_size, *find.preset_names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'smalti.zip')!r})\n{code}"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["6144", *find.preset_names()]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"retain": {"c": 0.02}}, ["data.retain has 'c'", "names of data.heldout: a, b"]),
        ({"retain": {"a": 2}}, ["data.retain.a is 2", "a fraction above 0, at most 1", "data.retain.a=0.02 is 2 %"]),
        ({"retain": {"a": 0}}, ["data.retain.a is 0"]),
    ],
)
def test_what_is_to_be_retained_is_held_out_and_a_share(changes, words):
    data = {"sources": {"a": "x"}, "heldout": {"a": "x", "b": "y"}, "seq_len": 8, "stages": [{"weights": {"a": 1}}]}
    with pytest.raises(UserError) as caught:
        from_dict(DataConfig, data | changes)
    for word in words:
        assert word in str(caught.value)


def test_retain_needs_a_model_to_start_from():
    loaded = load(RunConfig, "demo-continue").config
    assert loaded.data.retain == {"code": 0.02}
    with pytest.raises(UserError, match=r"data\.retain has no effect without init_from"):
        load(RunConfig, "demo", ["data.retain={code: 0.02}"])


def test_null_takes_a_source_out_of_a_base_and_of_a_recipe(tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text(
        "base: demo\ndata:\n  sources: {code: null}\n  heldout: {code: null}\n  stages: [{weights: {prose: 1}}]\n"
    )
    loaded = load(RunConfig, str(child))
    assert (set(loaded.config.data.sources), set(loaded.config.data.heldout)) == ({"prose"}, {"prose"})
    assert "data.sources.code" not in loaded.origins
    typed = ["data.sources.code=null", "data.stages.0.weights.code=null", "data.stages.1.weights.code=null"]
    config = load(RunConfig, "demo", typed).config
    assert set(config.data.sources) == {"prose"}
    assert [set(stage.weights) for stage in config.data.stages] == [{"prose"}, {"prose"}]


def test_null_for_a_missing_or_required_key_is_refused_and_is_a_value_elsewhere():
    for override in ("data.sources.cod=null", "train.optimizer.lr=null", "data.sources=null"):
        with pytest.raises(UserError, match="= null is not allowed"):
            load(RunConfig, "demo", [override])
    assert load(RunConfig, "demo", ["data.tokenizer=null"]).config.data.tokenizer is None
