"""Errors: message, allowed values and hint, exit codes, the nearest allowed word."""

import pytest

from smalti.base import errors
from smalti.base.errors import (
    CheckFailed,
    DataError,
    ExitCode,
    InjectedError,
    Interrupted,
    Preempted,
    RetryableError,
    SmaltiError,
    UserError,
    missing_extra,
    nearest,
)

CODES = {
    SmaltiError: 1, UserError: 2, DataError: 2, CheckFailed: 3, RetryableError: 75, Preempted: 75, Interrupted: 130,
    InjectedError: 1,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_exit_codes(kind: type[SmaltiError], code: int) -> None:
    assert kind("x").exit_code == code


def test_every_kind_has_a_code_of_the_table() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SmaltiError)]
    assert set(kinds) == set(CODES)
    assert {int(code) for code in ExitCode} == {0, 1, 2, 3, 75, 93, 130, 143}


def test_message_allowed_hint_stand_on_their_lines() -> None:
    assert str(UserError("a is 3", allowed="1 or 2", hint="a=2")) == "a is 3\nallowed: 1 or 2\nhint: a=2"
    assert str(UserError("a is 3", hint="a=2")) == "a is 3\nhint: a=2"
    assert str(UserError("a is 3")) == "a is 3"


def test_nearest() -> None:
    assert nearest("hiden_size", ["hidden_size", "head_dim"]) == "hidden_size"
    assert nearest("zzz", ["hidden_size"]) is None
    assert nearest("x", []) is None


def test_the_error_of_a_missing_extra_has_the_command_to_install_it() -> None:
    error = missing_extra("daft", "data", "smalti data curate")
    assert isinstance(error, UserError)
    assert "'daft'" in str(error)
    assert error.hint == "pip install 'smalti[data]'"


@pytest.mark.parametrize("package", ["obstore", "python-snappy"])
def test_an_extra_whose_import_fails_inside_is_not_called_missing(package: str) -> None:
    module = package.removeprefix("python-")
    absent = missing_extra(package, "x", "this", ModuleNotFoundError("No module named", name=f"{module}.store"))
    assert "which is not installed" in str(absent)
    for inner in (
        ModuleNotFoundError("No module named 'regex'", name="regex"),
        ImportError("cannot import name 'a'", name=module),
        ImportError("libx.so: cannot open shared object file"),
    ):
        failed = missing_extra(package, "x", "this", inner)
        assert "not installed" not in str(failed)
        assert f"'{package}', whose import failed: {type(inner).__name__}: {inner}" in str(failed)
