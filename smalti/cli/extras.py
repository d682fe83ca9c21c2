"""Checks for the optional packages that a verb needs, before its work begins."""


def need_data_extra() -> None:
    """Raise UserError where a package of the extra ``data`` is not installed."""
    need("data", "smalti data", "pyarrow", "daft", "tokenizers")


def need(extra: str, what: str, *packages: str) -> None:
    """Raise a UserError that names the first of ``packages`` that is not installed, and the extra to install."""
    from importlib.util import find_spec

    from smalti.base.errors import missing_extra

    for package in packages:
        if find_spec(package) is None:
            raise missing_extra(package, extra, what)
