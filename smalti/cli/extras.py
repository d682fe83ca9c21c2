"""Optional packages that a verb cannot do without, looked for before its work begins."""


def need_data_extra() -> None:
    """The packages of the extra ``data`` are checked by name, so that a missing one is a hint and not a traceback."""
    from importlib.util import find_spec

    from smalti.base.errors import missing_extra

    for package in ("pyarrow", "daft", "tokenizers"):
        if find_spec(package) is None:
            raise missing_extra(package, "data", "smalti data")
