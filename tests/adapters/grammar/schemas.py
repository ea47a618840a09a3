"""Ten schemas as users write them, with what checks a document of each besides jsonschema."""

from __future__ import annotations

from datetime import date, datetime, time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyHttpUrl, BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Mapping


class Color(Enum):
    """An enumeration of strings."""

    RED = "red"
    DARK_GREEN = "dark green"


class Person(BaseModel):
    """The schema of most examples."""

    name: str
    age: Annotated[int, Field(ge=0, le=150)]
    email: str | None = None


class Address(BaseModel):
    """Bounded strings and a pattern."""

    street: Annotated[str, Field(min_length=3, max_length=20)]
    zip_code: Annotated[str, Field(pattern=r"^\d{5}(-\d{4})?$")]
    country: Literal["DE", "FR", "PT"]


class Company(BaseModel):
    """Nested, with lists."""

    title: Annotated[str, Field(max_length=12)]
    address: Address
    staff: Annotated[list[Person], Field(min_length=1, max_length=3)]
    colors: Annotated[list[Color], Field(max_length=4)]


class Event(BaseModel):
    """Formats, which pydantic checks more narrowly than the standard says."""

    uid: UUID
    day: date
    begins: datetime
    opens: time
    page: AnyHttpUrl


class Tree(BaseModel):
    """Recursive."""

    value: int
    children: list[Tree]


class Chain(BaseModel):
    """Recursive by an alternative."""

    label: Annotated[str, Field(max_length=4)]
    next: Chain | None


class Cat(BaseModel):
    """One of a union."""

    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    """The other one, whose shortest form is much longer."""

    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=10)]
    tricks: Annotated[list[str], Field(min_length=2)]


class Owner(BaseModel):
    """A discriminated union, which comes as oneOf."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Measurement(BaseModel):
    """Numbers within bounds."""

    share: Annotated[float, Field(gt=0, lt=1)]
    count: Annotated[int, Field(gt=24, multiple_of=5)]
    anything: float
    is_valid: bool


MODELS: dict[str, type[BaseModel]] = {
    "person": Person,
    "address": Address,
    "company": Company,
    "event": Event,
    "tree": Tree,
    "chain": Chain,
    "owner": Owner,
    "measurement": Measurement,
}
SCHEMAS: dict[str, Mapping[str, Any]] = {
    **{name: model.model_json_schema() for name, model in MODELS.items()},
    "mixed": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "minLength": 4, "maxLength": 8},
            "code": {"type": "string", "pattern": "^[A-Z]{2}\\d{3}$"},
            "tags": {"type": "array", "items": {"enum": ["a", "bb", 3, None]}, "maxItems": 3},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"const": "unknown"}]},
            "extra": {"type": "object", "additionalProperties": {"type": "string"}},
            "at": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}]},
        },
        "required": ["id", "code", "tags", "size", "extra"],
    },
    "anything": {"type": "object", "additionalProperties": True},
}
