"""Planning a fork against a run folder: what is accepted, what is kept, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from random_tokens import write_source

from smalti.base.errors import UserError
from smalti.config.fork import Fork
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.stream.fork import plan_fork
from smalti.data.stream.stream import Stream
from smalti.track.run import RunFolder

TREE: dict[str, Any] = {
    "name": "t",
    "model": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2},
    "data": {"sources": {}, "seq_len": 16,
             "stages": [{"until": "10step", "weights": {"code": 1, "prose": 2}}, {"weights": {"math": 1}}]},
    "train": {"duration": "20step", "global_batch_tokens": 160, "optimizer": {"lr": 1e-3}},
}  # fmt: skip


class Run:
    """A run folder after some steps, and forks of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, name in enumerate(("code", "prose", "math", "more")):
            write_source(root / name, 40, seed=seed)
        self.folder = RunFolder(root / "run")

    def config(self, *overrides: str) -> RunConfig:
        tree = json.loads(json.dumps(TREE))
        tree["folder"] = str(self.root / "run")
        tree["data"]["sources"] = {name: str(self.root / name) for name in ("code", "prose", "math")}
        return from_dict(RunConfig, tree, "recipe", overrides).config

    def train(self, config: RunConfig, step: int, fork: Fork | None = None) -> None:
        """As if ``config`` had been trained until ``step``."""
        opened = RunFolder.open(config, {}, argv=["smalti"], fork=fork)
        config = opened.with_history(fork.after if fork else config)
        stream = Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=16)
        checkpoint = opened.checkpoint(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "train_state.json").write_text(json.dumps({"step": step, "stream": stream.state(step)}))
        (checkpoint / "COMPLETE").write_text("")
        (opened.path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        opened.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.train(run.config(), 6)
    return run


def refused(run: Run, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_fork(run.config(*overrides))
    return str(caught.value)


def test_a_fork_keeps_the_past_and_lists_the_changes(run: Run) -> None:
    wanted = run.config("data.stages=[{weights: {code: 1}}]", "train.duration=30step", "data.seq_len=32")
    fork = plan_fork(wanted)
    assert fork is not None
    assert fork.at_step == 6
    changed = {".".join(line.partition(":")[0].split(".")[:2]) for line in fork.changes}
    assert changed == {"train.duration", "data.seq_len", "data.stages"}
    (past,) = fork.after.data.history
    assert (past.at_step, past.duration, past.seq_len, past.lr) == (6, "20step", 16, 1e-3)
    assert set(fork.after.data.sources) == {"code", "prose", "math"}, "what was read stays"
    before = Stream(fork.before.data, seed=17, length=fork.before.length, microbatch_tokens=16)
    after = Stream(fork.after.data, seed=17, length=fork.after.length, microbatch_tokens=16)
    assert after.order_hash(0, 6) == before.order_hash(0, 6)

    run.train(wanted, 9, fork)
    assert run.folder.config() == fork.after
    assert run.folder.attempt_config(0) == fork.before
    assert [event["step"] for event in run.folder.events() if event["event"] == "forked"] == [6]
    run.folder.require_identity(wanted)  # the recipe knows no history, and is the same run
    assert plan_fork(wanted) is None, "the same command again resumes"

    again = plan_fork(run.config("data.stages=[{weights: {prose: 1}}]", "data.seq_len=32", "train.duration=30step"))
    assert again is not None
    assert [one.at_step for one in again.after.data.history] == [6, 9]


@pytest.mark.slow
def test_a_fork_that_never_made_a_step_leaves_no_trace(run: Run) -> None:
    first = plan_fork(run.config("train.duration=30step"))
    RunFolder.open(run.config(), {}, argv=["smalti"], fork=first).close()
    assert plan_fork(run.config("train.duration=30step")) is None, "the same command again resumes"
    second = plan_fork(run.config("train.duration=40step"))
    assert second is not None
    (past,) = second.after.data.history
    assert (past.at_step, past.duration) == (6, "20step")


@pytest.mark.slow
def test_a_fork_accepts_one_future_also_before_its_first_checkpoint(run: Run) -> None:
    """A list of takedowns that the next command forgets, or a source that changes, is not the future accepted."""
    listed = run.root / "a.jsonl"
    listed.write_text(json.dumps({"source": "code", "document": 3}))
    wanted = (f"data.takedowns={listed}", "train.duration=30step")
    fork = plan_fork(run.config(*wanted))
    assert fork is not None
    RunFolder.open(run.config(), {}, argv=["smalti"], fork=fork).close()
    saved = json.loads((run.folder.checkpoint(6) / "train_state.json").read_text())["stream"]
    math = f"data.sources.math={run.root}/more"
    assert plan_fork(run.config(*wanted)) is None
    for overrides in (wanted[1:], (*wanted, math)):
        (stream,) = streams(run.folder.with_history(run.config(*overrides)))
        with pytest.raises(UserError, match="have changed since this run was saved"):
            stream.check(saved, 6)
        again = plan_fork(run.config(*overrides))
        assert again is not None
        (stream,) = streams(again.after)
        stream.check(saved, 6)


def test_a_new_source_and_one_that_was_not_read_yet_may_come(run: Run) -> None:
    fork = plan_fork(run.config(f"data.sources.more={run.root}/more", "data.stages=[{weights: {more: 1}}]"))
    assert fork is not None
    other = plan_fork(run.config(f"data.sources.math={run.root}/more"))
    assert other is not None, "another content before it is read"
    (line,) = other.changes
    assert line.startswith("content of source 'math': digest ")


def test_takedowns_do_not_depend_on_the_place_of_the_list(run: Run) -> None:
    first, moved, longer = (run.root / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    for path, documents in ((first, [3]), (moved, [3]), (longer, [3, 5])):
        path.write_text("".join(json.dumps({"source": "code", "document": n}) + "\n" for n in documents))
    fork = plan_fork(run.config(f"data.takedowns={first}"))
    assert fork is not None
    (line,) = fork.changes
    assert line.startswith("data.takedowns: digest None -> ")
    run.train(run.config(), 7, fork)
    assert run.folder.config().data.takedowns == str(first)
    run.folder.require_identity(run.config(f"data.takedowns={moved}"))
    assert plan_fork(run.config(f"data.takedowns={moved}")) is None, "the same documents"
    saved = json.loads((run.folder.checkpoint(7) / "train_state.json").read_text())["stream"]
    now, grown = streams(*(run.folder.with_history(run.config(f"data.takedowns={p}")) for p in (moved, longer)))
    now.check(saved, 7)
    with pytest.raises(UserError, match=r"data\.takedowns: digest"):
        grown.check(saved, 7)
    assert plan_fork(run.config(f"data.takedowns={longer}")) is not None


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["--fork would change nothing", "omit --fork"]),
        (["seed=3"], ["seed: 17 -> 3", "init_from"]),
        (["model.hidden_size=64", "train.duration=30step"], ["model.hidden_size: 32 -> 64"]),
        (["data.shuffle.mode=window"], ["data.shuffle"]),
        (["data.mask_documents=false"], ["data.mask_documents"]),
        (["train.duration=6step", "data.stages=[{weights: {code: 1}}]"], ["6 steps were done", "more than 6step"]),
        (["data.skip=[[0, 5]]"], ["data.skip before position 60"]),
        (["data.sources.code=ROOT/more"], ["the first 6 steps", "content of source 'code'"]),
        (["name=u", "folder=ROOT/u"], ["there is no run in", "omit --fork to start it"]),
        (["data.sources.more=ROOT/more", "train.duration=30step"], ["source 'more' has no weight in any stage"]),
    ],
)  # fmt: skip
def test_what_no_fork_can_do_is_refused(run: Run, overrides: list[str], words: list[str]) -> None:
    text = refused(run, *(override.replace("ROOT", str(run.root)) for override in overrides))
    for word in words:
        assert word in text
    assert run.folder.config() == run.config()


ACROSS = "data.skip=[[10, 150]]"
OTHER = "data.stages=[{until: 10step, weights: {code: 1, prose: 2}}, {weights: {code: 5, math: 1}}]"


def streams(*configs: RunConfig) -> list[Stream]:
    return [Stream(config.data, seed=17, length=config.length, microbatch_tokens=16) for config in configs]


@pytest.mark.slow
def test_a_skip_over_the_fork_keeps_the_past(tmp_path: Path) -> None:
    """The skips of earlier steps were counted with a mixture that is never used."""
    run = Run(tmp_path)
    run.train(run.config(ACROSS), 6)
    fork = plan_fork(run.config(ACROSS, OTHER))
    assert fork is not None
    before, after = streams(fork.before, fork.after)
    assert after.order_hash(0, 6) == before.order_hash(0, 6)
    run.train(run.config(ACROSS, OTHER), 8, fork)
    assert plan_fork(run.config(ACROSS, OTHER, "train.duration=30step")) is not None


def test_a_skip_into_an_edited_stage_is_another_past(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before, after = streams(run.config(ACROSS), run.config(ACROSS, OTHER))
    assert before.order_hash(0, 6) != after.order_hash(0, 6)
    with pytest.raises(UserError, match="the first 6 steps of this run were trained on other data"):
        after.check(before.state(6), 6)


def test_skips_ahead_are_a_new_future(run: Run) -> None:
    fork = plan_fork(run.config("data.skip=[[70, 90]]"))
    assert fork is not None
    assert fork.changes == ("data.skip: [] -> [[70, 90]]",)


def test_a_run_without_a_checkpoint_has_nothing_to_fork(tmp_path: Path) -> None:
    run = Run(tmp_path)
    RunFolder.open(run.config(), {}, argv=["smalti"]).close()
    (run.folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "has no checkpoint yet" in refused(run, "train.duration=30step")


def test_a_folder_that_went_on_is_not_forked(run: Run) -> None:
    fork = plan_fork(run.config("train.duration=30step"))
    run.train(run.config(), 8)
    with pytest.raises(UserError, match="was trained further while it was being forked"):
        RunFolder.open(run.config(), {}, argv=["smalti"], fork=fork)


def test_another_recipe_for_a_forked_run_is_refused_in_its_own_words(run: Run) -> None:
    run.train(run.config(), 9, plan_fork(run.config("train.duration=30step")))
    with pytest.raises(UserError) as caught:
        run.folder.require_identity(run.config())
    text = str(caught.value)
    assert "train.duration: 30step -> 20step" in text
    assert "history" not in text
    assert "resumes it" in text


def test_changes_of_completed_steps_are_refused_and_changes_are_listed(run: Run) -> None:
    first = "{until: 5step, weights: {code: 5, prose: 1}}"
    same = "{until: 10step, weights: {code: 2, prose: 4}}"
    for stages in (f"[{first}, {same}, {{weights: {{math: 3}}}}]", f"[{same}, {{weights: {{math: 1}}}}]"):
        with pytest.raises(UserError, match="would change nothing: 6 steps"):
            plan_fork(run.config(f"data.stages={stages}"))
    with pytest.raises(UserError, match="would change nothing"):
        plan_fork(run.config("train.duration=3200tok"))
    found = plan_fork(
        run.config(f"data.stages=[{same}, {{until: 15step, weights: {{math: 1}}}}, {{weights: {{code: 1}}}}]")
    )
    assert found is not None
    assert found.changes == (
        "data.stages.0.weights.code: 1.0 -> 2.0",
        "data.stages.0.weights.prose: 2.0 -> 4.0",
        "data.stages.1.until: 1run -> 15step",
        "data.stages.2: absent -> {until: 1run, weights: {code: 1.0}, weights_end: null, seq_len: null}",
    )


def hashes(stream: Stream) -> list[str]:
    return [stream.order_hash(step, 1) for step in range(stream.schedule.total_steps)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("overrides", "same_until"),
    [
        (["train.optimizer.lr=0.002"], 20),
        (["train.schedule.warmup=0step", "train.schedule.decay=0.5run"], 20),
        (["data.heldout.h=ROOT/more"], 20),
        (["train.duration=30step"], 20),
        (["data.stages=[{until: 10step, weights: {code: 1, prose: 2}}, {weights: {code: 1}}]"], 10),
    ],
)
def test_a_fork_keeps_the_order_that_it_does_not_change(tmp_path: Path, overrides: list[str], same_until: int) -> None:
    """After 7 steps of 10 sequences the shares are no whole numbers, and counting them anew would show."""
    run = Run(tmp_path)
    run.train(run.config(), 7)
    wanted = run.config(*(override.replace("ROOT", str(tmp_path)) for override in overrides))
    fork = plan_fork(wanted)
    assert fork is not None
    assert fork.order_continues
    before, after = streams(run.config(), fork.after)
    assert hashes(after)[:same_until] == hashes(before)[:same_until]
    assert hashes(after)[same_until:20] != hashes(before)[same_until:] or same_until == 20
    run.train(wanted, 9, fork)
    assert plan_fork(wanted) is None, "the same command again resumes"
    again = plan_fork(run.config("train.optimizer.lr=0.003", "train.duration=25step"))
    assert again is not None
    assert hashes(streams(again.after)[0])[:10] == hashes(before)[:10]


def test_a_fork_that_would_have_begun_otherwise_counts_shares_anew(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(run.config(), 7)
    fork = plan_fork(run.config("data.stages=[{weights: {code: 1, math: 1}}]"))
    assert fork is not None
    assert not fork.order_continues


def test_a_run_that_was_forked_by_an_older_version_resumes_with_the_order_of_then(tmp_path: Path) -> None:
    """Its config does not know ``order_continues``; hash and digest are those that the older version gave."""
    run = Run(tmp_path)
    run.train(run.config(), 7)
    fork = plan_fork(run.config("train.optimizer.lr=0.002"))
    assert fork is not None
    tree = fork.after.model_dump(mode="json")
    del tree["data"]["history"][0]["order_continues"]
    tree["data"]["history"][0]["accepted"] = ""
    old = from_dict(RunConfig, tree).config
    (stream,) = streams(old)
    assert stream.order_hash(0, 20) == "adab8b8b01d1ed81f68c747106527a3ce5baa31878614b9b5be1e864aef8d3bf"
    assert stream.schedule.digest == "6cb38aae0d77bb702f8bea5147d3d8eb9a219badfaf614fd9250c36d029104e7"
    assert hashes(stream)[:7] == hashes(streams(run.config())[0])[:7]

    run.train(old, 9, Fork(fork.before, old, 7, ()))
    wanted = run.config("train.optimizer.lr=0.002")
    (resumed,) = streams(run.folder.with_history(wanted))
    assert resumed.order_hash(0, 20) == stream.order_hash(0, 20)
    assert plan_fork(wanted) is None, "the same command again, with --fork, resumes it too"
    again = plan_fork(run.config("train.optimizer.lr=0.004"))
    assert again is not None
    assert [past.order_continues for past in again.after.data.history] == [False, True]
    assert hashes(streams(again.after)[0]) == hashes(stream), "a new fork of it keeps the order that it has"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("at_step", "until", "told"),
    [
        (7, "0.5run", ["stage 0 ends at step 10 -> 15", "the order of the data stays, but for these changes"]),
        (
            12,
            "0.5run",
            ["stage 0 ends at step 10 -> 15", "the order of the data changes: shares of sources are counted anew"],
        ),
        (16, "0.5run", ["the order of the data changes: shares of sources are counted anew"]),
        (7, "10step", ["the order of the data stays, but for these changes"]),
    ],
)
def test_a_fork_with_another_length_names_the_stages_that_end_elsewhere(
    tmp_path: Path, at_step: int, until: str, told: list[str]
) -> None:
    run = Run(tmp_path)
    stages = f"data.stages=[{{until: {until}, weights: {{code: 1, prose: 2}}}}, {{weights: {{math: 1}}}}]"
    run.train(run.config(stages), at_step)
    fork = plan_fork(run.config(stages, "train.duration=30step"))
    assert fork is not None
    assert fork.lines() == ["train.duration: 20step -> 30step", *told]
    before, after = streams(run.config(stages), fork.after)
    assert (hashes(after)[:20] == hashes(before)) == (len(told) == 1)
