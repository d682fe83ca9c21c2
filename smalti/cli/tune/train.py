"""``smalti tune sft|preference|reward``: tokenizes the examples of a recipe, then trains as ``smalti train``."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Overrides, Recipe

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.config.tune import Kind

DryRun = Annotated[bool, typer.Option("--dry-run", help="Tokenize, check config and data, print the plan, and exit.")]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print the config with the origin of each value without tokenizing, and exit."),
]
Fork = Annotated[
    bool, typer.Option("--fork", help="Continue from the newest checkpoint with other data, length or learning rate.")
]
Trial = Annotated[
    int | None, typer.Option("--try", min=1, help="Train only this many steps, as a trial in runs/.try/NAME.")
]


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    fork: Fork = False,
    dry_run: DryRun = False,
    trial: Trial = None,
) -> None:
    """Tune a model on chats or instructions: the loss is that of the answers. The same command again resumes.

    The examples (tune.examples) are tokenized first, unless an earlier command has; 'smalti tune show' prints them.
    Then it trains as 'smalti train', with the same options of a recipe: ranks, meshes, evaluations, checkpoints.
    train.duration may be given in epochs (3ep).
    """
    start("sft", recipe, overrides or [], print_config=print_config, fork=fork, dry_run=dry_run, trial=trial)


def preference(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    fork: Fork = False,
    dry_run: DryRun = False,
    trial: Trial = None,
) -> None:
    """Tune a model on preferences: DPO, IPO, SimPO, KTO. The same command again resumes.

    The examples (tune.examples) are pairs of a chosen and a rejected answer, or for KTO answers with a label. The
    log-probabilities of the reference, init_from, are computed with them, once. Then it trains as 'smalti train'.
    """
    start("preference", recipe, overrides or [], print_config=print_config, fork=fork, dry_run=dry_run, trial=trial)


def reward(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    fork: Fork = False,
    dry_run: DryRun = False,
    trial: Trial = None,
) -> None:
    """Train a reward model on pairs of a chosen and a rejected answer. The same command again resumes.

    The model of init_from gets a score in place of its logits. 'smalti export' writes it as a model for sequence
    classification, which transformers loads.
    """
    start("reward", recipe, overrides or [], print_config=print_config, fork=fork, dry_run=dry_run, trial=trial)


def start(
    kind: "Kind",
    recipe: str,
    overrides: list[str],
    *,
    print_config: bool,
    fork: bool,
    dry_run: bool,
    trial: int | None,
) -> None:
    """Train with the recipe. Raises UserError for a recipe without ``tune``, or of another kind of tuning."""
    from smalti.base.errors import UserError
    from smalti.cli.train.app import train
    from smalti.cli.working_directory import load_run

    config: RunConfig = load_run(recipe, overrides, tokenize=False).config
    if config.tune is None:
        raise UserError(
            f"{recipe} has no section 'tune:'",
            allowed="a recipe for tuning",
            hint=f"smalti train {recipe}, or the recipes instruct, chat, dpo, kto and reward: smalti config show",
        )
    if config.tune.kind != kind:
        section = f"with a section tune.{config.tune.kind}" if config.tune.kind != "sft" else "for answers"
        raise UserError(
            f"{recipe} is a recipe {section}, not for 'smalti tune {kind}'",
            allowed=f"smalti tune {config.tune.kind}",
            hint=f"smalti tune {config.tune.kind} {recipe}",
        )
    train(recipe, overrides, print_config=print_config, fork=fork, dry_run=dry_run, trial=trial)
