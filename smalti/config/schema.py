"""The base of all config models and the kinds of field.

Every config is a frozen pydantic model that refuses unknown keys. A field is *identity* (another value is another run)
unless it is declared with ``placement(...)``: where and how fast the same run is executed.
"""

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class Config(BaseModel):
    """Base of all sections: frozen, refuses unknown keys; a number given for a text field becomes text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema, also with the bounds of fields that may be null, which pydantic writes as ``ge``."""
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema).get("properties", {}).values():
            for member in field.get("anyOf", ()):
                member |= {_BOUNDS[name]: member.pop(name) for name in _BOUNDS.keys() & member.keys()}
        return schema


def placement(default: Any = ..., **kwargs: Any) -> Any:
    """Declare a field that may change between the attempts of a run."""
    return Field(default, json_schema_extra={"kind": "placement"}, **kwargs)


class NotAllowed(ValueError):
    """Error of a validator, with what is allowed and a hint of what to type."""

    def __init__(self, message: str, *, allowed: str, hint: str) -> None:
        super().__init__(message)
        self.allowed = allowed
        self.hint = hint


def is_placement(model: type[BaseModel], name: str) -> bool:
    """Return whether ``name`` of ``model`` was declared with ``placement``."""
    extra = model.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and extra.get("kind") == "placement"


_DURATION = re.compile(r"(?P<amount>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?P<unit>step|tok|run|min|h|s|d)")


def split_duration(text: str) -> tuple[float, str]:
    """Split '2e9tok' into (2e9, 'tok'). Units: step, tok, run (a fraction of the run), s, min, h, d."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a length of time or training; write a number and a unit")
    if not math.isfinite(float(match["amount"])):
        raise ValueError(f"'{text}' is too large a number")
    return float(match["amount"]), match["unit"]


def _duration(units: tuple[str, ...], *, may_be_none: bool = False) -> AfterValidator:
    def check(text: str) -> str:
        amount, unit = split_duration(text)
        if unit not in units:
            raise ValueError(f"'{text}' has the unit '{unit}'; allowed here: {', '.join(units)}")
        if unit == "run" and amount > 1:
            raise ValueError(f"'{text}' is more than the whole run; fractions go from 0run to 1run")
        if unit in ("step", "tok") and amount != int(amount):
            raise ValueError(f"'{text}' must be a whole number of {unit}")
        if amount == 0 and not may_be_none:
            raise ValueError(f"'{text}' is no length; it must be above 0")
        return text.strip()

    return AfterValidator(check)


def _number_from_text(value: Any) -> Any:
    """Convert text that is a number (YAML 1.1 parses ``1e-3`` as text); refuse true and false."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _whole_number(value: Any) -> Any:
    value = int(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+", value) else _number_from_text(value)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _duration_schema(*examples: str) -> WithJsonSchema:
    """Return the JSON Schema of a duration; error messages show the examples too."""
    units = "|".join(sorted({split_duration(example)[1] for example in examples}))
    pattern = rf"^\d+(\.\d+)?([eE][+-]?\d+)?({units})$"
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": list(examples)})


Duration = Annotated[
    str, _duration(("step", "tok", "run"), may_be_none=True), _duration_schema("100step", "2e9tok", "0.8run")
]
"""Length of a part of training: ``100step``, ``2e9tok``, ``0.8run``; 0: no such part."""

Interval = Annotated[str, _duration(("step", "tok", "run")), _duration_schema("100step", "2e9tok", "0.8run")]
"""A distance in training, above 0: ``100step``, ``2e9tok``, ``0.1run``."""

Length = Annotated[str, _duration(("step", "tok")), _duration_schema("600step", "2e9tok")]
"""The length of a whole run: ``600step``, ``2e9tok``."""

Cadence = Annotated[
    str,
    _duration(("step", "tok", "run", "s", "min", "h")),
    _duration_schema("100step", "2e9tok", "0.1run", "30s", "30min", "2h"),
]
"""How often something happens; may be wall-clock time (``30min``), so it is a placement field only."""

WallTime = Annotated[str, _duration(("s", "min", "h")), _duration_schema("10s", "10min", "2h")]
"""A length of time: ``10min``. Placement fields only."""

Period = Annotated[str, _duration(("s", "min", "h", "d")), _duration_schema("10min", "12h", "2d")]
"""A length of time that may be days: ``2d``."""

Real = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number_from_text)]
"""A finite float that also accepts ``1e-3``, which YAML 1.1 parses as text."""

Whole = Annotated[int, BeforeValidator(_whole_number)]
"""An integer that also accepts ``2e9``."""

Count = Annotated[int, Field(ge=1), BeforeValidator(_whole_number)]
"""A whole number of at least 1, for unions, whose members need bounds of their own."""

NotNegative = Annotated[int, Field(ge=0), BeforeValidator(_whole_number)]
"""The same from 0 on."""

BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_number_from_text)]
"""A number from 0 up to, not including, 1; for lists, whose items need bounds of their own."""
