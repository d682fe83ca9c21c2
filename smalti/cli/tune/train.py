"""``smalti tune sft``: tokenizes the examples of a recipe, then trains as ``smalti train``."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Overrides, Recipe

if TYPE_CHECKING:
    from smalti.config.run import RunConfig

DryRun = Annotated[bool, typer.Option("--dry-run", help="Tokenize, check config and data, print the plan, and exit.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the config with the origin of each value, and exit.")
]


def sft(
    recipe: Recipe, overrides: Overrides = None, print_config: PrintConfig = False, dry_run: DryRun = False
) -> None:
    """Tune a model on chats or instructions: the loss is that of the answers. The same command again resumes.

    The examples (tune.examples) are tokenized first, unless an earlier command has; 'smalti tune show' prints them.
    Then it trains as 'smalti train', with the same options of a recipe: ranks, meshes, evaluations, checkpoints.
    train.duration may be given in epochs (3ep).
    """
    start(recipe, overrides or [], print_config=print_config, dry_run=dry_run)


def start(recipe: str, overrides: list[str], *, print_config: bool, dry_run: bool) -> None:
    """Train with the recipe. Raises UserError for a recipe without ``tune``."""
    from smalti.base.errors import UserError
    from smalti.cli.train.app import train
    from smalti.cli.working_directory import load_run

    config: RunConfig = load_run(recipe, overrides).config
    if config.tune is None:
        raise UserError(
            f"{recipe} has no section 'tune:'",
            allowed="a recipe for tuning",
            hint=f"smalti train {recipe}, or the recipes instruct and chat: smalti config show",
        )
    train(recipe, overrides, print_config=print_config, dry_run=dry_run)
