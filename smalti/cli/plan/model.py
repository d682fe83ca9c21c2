"""The model that a verb of ``smalti plan`` is about: a preset, a recipe, a run, or a folder with a ``config.json``."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.config.hardware import Hardware
    from smalti.config.model import ModelConfig

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset, a recipe, a run folder, or a folder with a config.json."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[A.B=VALUE]...", help="Changes: to the preset's fields, or to the recipe's."),
]
Gpu = Annotated[str | None, typer.Option(help="Only this device (h100-sxm), or a .yaml file of one; absent: all.")]
Usable = Annotated[
    float | None,
    typer.Option(help="Share of a device's memory that may be used; absent: what the system leaves."),
]


def load_model(name: str, overrides: list[str] | None) -> "ModelConfig":
    """The model section that a name stands for; UserError where it stands for none."""
    from pathlib import Path

    from smalti.base.errors import UserError
    from smalti.cli.working_directory import load_run
    from smalti.config.find import find_recipe, hint_of_preset, is_preset, keys_of
    from smalti.config.load import from_dict, load
    from smalti.config.model import ModelConfig

    if (Path(name) / "config.json").is_file():
        from smalti.model.described import open_config

        if overrides:
            raise UserError(
                f"{overrides[0]} would change what {name}/config.json says",
                allowed="changes to a preset or a recipe",
                hint="leave it out: the folder's weights have that shape and no other",
            )
        return open_config(name).config
    if is_preset(name) and not Path(name).exists():
        return from_dict(ModelConfig, {"preset": name}, f"preset {name}", overrides or []).config
    try:
        found = find_recipe(name)
    except UserError as error:
        raise UserError(
            f"'{name}' is no model that is known here",
            allowed="a preset (smalti config show lists them), a recipe, a run folder, a folder with a config.json",
            hint=hint_of_preset(name) or error.hint,
        ) from error
    if keys_of(found.text) & {"model", "init_from"}:
        return load_run(name, overrides or []).config.model
    return load(ModelConfig, name, overrides or []).config


def devices(gpu: str | None) -> "list[Hardware]":
    """The device of that name, or all of the table but those that are CPUs."""
    from smalti.config.hardware import hardware, hardware_names

    if gpu is not None:
        return [hardware(gpu)]
    return [one for one in map(hardware, hardware_names()) if one.kind != "cpu"]


def room(known: "Hardware", usable_frac: float | None, *, reserved_frac: float | None = None) -> float:
    """Bytes of a device that may be used; ``reserved_frac`` of it are left where the system sets no limit."""
    from smalti.base.errors import UserError
    from smalti.plan.serving.devices import RESERVED_FRAC, room_bytes

    if usable_frac is not None and not 0 < usable_frac <= 1:
        raise UserError(f"--usable {usable_frac} is no share", allowed="above 0, up to 1")
    return room_bytes(known, usable_frac, reserved_frac=RESERVED_FRAC if reserved_frac is None else reserved_frac)


def not_enough(gpu: str) -> str:
    """What to say of a device that does not hold it: as many as can work together were tried."""
    from smalti.config.hardware import hardware
    from smalti.plan.serving.devices import most_devices

    known = hardware(gpu)
    most = most_devices(known)
    if most is None:
        return f"no number of {known.name} is enough"
    if most == 1:
        return f"one {known.name} is not enough, and no network that joins several is known"
    return f"a node of {most} {known.name} is not enough, and no network between nodes is known"
