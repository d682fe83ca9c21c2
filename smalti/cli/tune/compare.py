"""``smalti tune compare``: a prompted model beside tuned ones, on the same questions."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smalti.tune.compare.run import Plan
    from smalti.tune.compare.ways import Way


def compare(
    recipe: Recipe,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="A.B=VALUE", help="Changes to the recipe; of one way: lora.train.optimizer.lr=3e-3."),
    ] = None,
    ways: Annotated[str, typer.Option(help="The ways to compare, with commas.")] = "prompt,retrieve,lora,full,continue",
    shots: Annotated[
        int, typer.Option(min=0, help="Training examples in the prompts of prompt (the same) and retrieve (nearest).")
    ] = 4,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Retrieve paragraphs of this .txt, .md or .jsonl file in place of training examples."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Ask at most this many held-out questions.")] = 200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each way would train, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Compare prompting, retrieval, LoRA, full tuning and continued pretraining: quality beside cost.

    All ways answer the held-out examples of the recipe. prompt: the model of init_from, with examples in the prompt;
    retrieve: with those nearest to the question (BM25), or with paragraphs of --documents; lora, full: tuned by 'smalti
    tune sft'; continue: trained on the same conversations with all of their tokens in the loss. Held-out sets of the
    recipe (data.heldout) show what was lost.

    Results: runs/NAME-compare/compare.json and compare.html. The same command again continues; finished ways are not
    repeated.
    """
    from smalti.cli.extras import need
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import print_json
    from smalti.tune.compare.run import run

    need("data", "smalti tune", "pyarrow", "tokenizers")
    plan, commands = _plan(recipe, overrides or [], ways, shots, limit)
    plan = replace(plan, passages=_passages(documents, plan.ways))
    if dry_run:
        print_json(_training_json(plan)) if as_json else print(_plan_text(plan))
        return
    with ProgressLine("tokens") as progress:
        result = run(plan, lambda way: _train(way, commands[way], as_json=as_json), progress)
    print_json(result) if as_json else print(_text(plan, result))


def _passages(documents: str | None, ways: "Sequence[Way]") -> list[str]:
    """Return the paragraphs to retrieve. Raises UserError where nothing is retrieved."""
    from smalti.base.errors import UserError
    from smalti.tune.compare.questions import read_passages

    if documents is None:
        return []
    if "retrieve" not in ways:
        raise UserError(f"--documents {documents} has no effect: --ways {','.join(ways)}", hint="--ways retrieve,lora")
    return read_passages(documents)


def _plan(recipe: str, overrides: list[str], names: str, shots: int, limit: int) -> "tuple[Plan, dict[Way, list[str]]]":
    """Return the plan, and the command of each way that trains. Raises UserError for what cannot be compared."""
    from smalti.base.errors import UserError
    from smalti.cli.train import preflight
    from smalti.cli.working_directory import load_run
    from smalti.config.find import find_recipe
    from smalti.config.run import RunConfig
    from smalti.tune.compare.run import Plan
    from smalti.tune.compare.ways import PROMPTED, changes, parse_ways, split_overrides

    ways = parse_ways(names)
    common, of_way = split_overrides(overrides)
    unused = [way for way in of_way if of_way[way] and way not in ways]
    if unused:
        raise UserError(f"{unused[0]}.{of_way[unused[0]][0]} has no effect: --ways {','.join(ways)}", hint="remove it")
    if "retrieve" in ways and not shots:
        raise UserError("--shots 0 retrieves nothing", hint="--shots 4, or --ways prompt,lora,full,continue")
    if shots and not {*PROMPTED} & {*ways}:
        shots = 0
    if find_recipe(recipe, fields=RunConfig.model_fields).run is not None:
        raise UserError(f"{recipe} is a run", allowed="a recipe of 'smalti tune sft'", hint="its recipe file")
    config: RunConfig = load_run(recipe, common).config
    if config.tune is None:
        raise UserError(
            f"{recipe} has no section 'tune:'", allowed="a recipe for tuning", hint="smalti tune compare instruct"
        )
    if config.tune.has_own_loss:
        raise UserError(
            f"{recipe} is tuned with {config.tune.loss}",
            allowed="a recipe of 'smalti tune sft' with the loss of the answers",
            hint="smalti tune compare instruct, or chat",
        )
    folder = Path(config.run_folder).with_name(f"{config.name}-compare")
    commands: dict[Way, list[str]] = {}
    trained: dict[Way, RunConfig] = {}
    for way in (way for way in ways if way not in PROMPTED):
        named = [f"name={config.name}-compare-{way}", f"folder={folder / way}"]
        arguments = [*common, *changes(way, config), *of_way[way], *named]
        commands[way] = [sys.executable, "-m", "smalti", "tune", "sft", recipe, *arguments]
        loaded = load_run(recipe, arguments)
        config_of_way = loaded.config  # checked before the first way is evaluated
        preflight.check(config_of_way, ranks=config_of_way.train.parallel.ranks, fork=None, origins=loaded.origins)
        preflight.check_machine(config_of_way)
        trained[way] = config_of_way
    return Plan(recipe, config, folder, trained, ways, shots, limit), commands


def _train(way: "Way", command: list[str], *, as_json: bool) -> None:
    """Train a way by ``smalti tune sft``; exit with its code if that is not 0."""
    from smalti.base.errors import ExitCode
    from smalti.cli.children import run_child

    shown = " ".join(["smalti", *command[3:]])
    print(f"\n== {way}\n$ {shown}", file=sys.stderr, flush=True)
    code = run_child(command, stdout=2 if as_json else None)
    if code != ExitCode.DONE:
        print(f"the comparison has stopped: training of {way} exited with code {code}", file=sys.stderr)
        raise typer.Exit(code)


def _training_json(plan: "Plan") -> dict[str, Any]:
    from dataclasses import asdict

    from smalti.tune.compare.ways import training_of

    return {way: asdict(training_of(config)) for way, config in plan.trained.items()}


def _plan_text(plan: "Plan") -> str:
    from smalti.base.units import format_count, format_flops
    from smalti.cli.tables import table
    from smalti.tune.compare.ways import training_of

    rows = []
    for way in plan.ways:
        if way not in plan.trained:
            rows.append((way, "-", "-", "-", "-", f"{plan.shots} examples in each prompt"))
            continue
        config = plan.trained[way]
        training = training_of(config)
        rate = f"lr {config.train.optimizer.lr:g}"
        numbers = (format_count(training.tokens), format_flops(training.flops), format_count(training.params))
        rows.append((way, f"{training.steps:,}", *numbers, rate))
    return f"{plan.folder}\n\n{table(('way', 'steps', 'tokens', 'FLOPs', 'trained', ''), rows)}"


def _text(plan: "Plan", result: dict[str, Any]) -> str:
    from smalti.cli.tables import table
    from smalti.tune.compare import words
    from smalti.tune.compare.run import PAGE

    lines = ["Quality: the right answers, and greedy answers that equal them", ""]
    lines += [table(words.QUALITY, words.quality_rows(result)), "", *words.notes(result), ""]
    lines += ["Cost: once, and for each answer", "", table(words.COST, words.cost_rows(result))]
    if lost := words.lost_rows(result):
        lines += ["", "What was lost: bits per byte of held-out text", "", table(words.LOST, lost)]
    lines += ["", f"plots: {plan.folder / PAGE}", f"read the answers: smalti eval read {plan.folder / plan.ways[-1]}"]
    return "\n".join(lines)
