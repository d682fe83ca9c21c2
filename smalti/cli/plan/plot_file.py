"""Checks the file name of ``--plot``."""


def require_svg(path: str | None) -> None:
    """Raise UserError for a ``--plot`` that does not name an .svg file."""
    from smalti.base.errors import UserError

    if path is not None and not path.endswith(".svg"):
        raise UserError(f"--plot {path} is not an .svg file", allowed="a file whose name ends with .svg")
