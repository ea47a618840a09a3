"""`prepare_schema`: a JSON schema as llguidance takes it, with everything refused that it could not
honour.

Refusals come at compile time and name the keyword and where it stands. What is honoured was probed:
documents drawn at random are checked against the schema in the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoserve_adapters.grammar.one_of import are_exclusive
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uuid",
        "int32",
        "int64",
        "float",
        "double",
    }
)
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:0\d|1[0-2]):[0-5]\d)"
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[a-z0-9]+(?:[._+-][a-z0-9]+)*@[a-z0-9]+(?:[.-][a-z0-9]+)*\.[a-z]{2,8}$",
    "uri": r"^https?://[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z0-9]+(?:-[a-z0-9]+)*)*\.[a-z]{2,8}"
    r"(?:/[A-Za-z0-9._~-]*)*(?:\?[A-Za-z0-9._~=&-]*)?$",
}
"""In place of formats that llguidance takes too widely (29 February of any year, a 60th second) or
that libraries take more narrowly than the standard."""

# Where schemas stand inside a schema.
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_JOINED = ("allOf", "anyOf", "oneOf")
_IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("items", "additionalProperties", "additionalItems")

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class UnsupportedSchema(UnsupportedOption):
    """A JSON schema, or a grammar, that cannot be honoured: names the keyword and its place."""

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        super().__init__(
            f"{keyword} at {path} of the schema is not served in structured output: {reason}. "
            "Expected keywords that a grammar can honour. Leave it out, and check it after parsing."
        )
        self.keyword = keyword
        self.path = path


def prepare_schema(schema: Mapping[str, Any], *, root: str = "#") -> dict[str, Any]:
    """A copy of ``schema`` with closed objects and exact formats.

    ``root``: where it will stand in a larger schema; references are moved there. Raises
    `UnsupportedSchema`.
    """
    prepared = _Preparation(schema, root).of(dict(schema), "#")
    assert isinstance(prepared, dict), "a mapping stays one"
    return prepared


class _Preparation:
    """Of one whole schema: what its references point to, and where it will stand."""

    def __init__(self, whole: Mapping[str, Any], root: str) -> None:
        self._whole = whole
        self._root = root

    def of(self, schema: Any, path: str, *, is_open: bool = False) -> Any:  # noqa: ANN401 - JSON
        """``is_open``: an object here is one part of several and lets in what the others bring."""
        if not isinstance(schema, dict):
            return schema  # true or false
        _check(schema, path)
        made = {key: value for key, value in schema.items() if key != "discriminator"}
        self._prepare_parts(made, path, is_open=is_open)
        if not is_open:
            _close_object(made)
        _narrow_format(made)
        _bound_integer(made)
        if isinstance(made.get("$ref"), str):
            made["$ref"] = self._root + made["$ref"][1:]
        if made.get("uniqueItems") is False:
            del made["uniqueItems"]
        if "oneOf" in made:
            self._replace_one_of(made, schema["oneOf"], path)
        return made

    def _prepare_parts(self, made: dict[str, Any], path: str, *, is_open: bool) -> None:
        is_shared = is_open or "properties" in made or len(made.get("allOf", ())) > 1
        for key in _IN_LIST:
            if isinstance(made.get(key), list):
                made[key] = [
                    self.of(part, f"{path}/{key}/{index}", is_open=is_shared and key in _JOINED)
                    for index, part in enumerate(made[key])
                ]
        for key in _IN_MAPPING:
            if isinstance(made.get(key), dict):
                made[key] = {
                    name: self.of(part, f"{path}/{key}/{name}") for name, part in made[key].items()
                }
        for key in _IN_PLACE:
            if isinstance(made.get(key), dict):
                made[key] = self.of(made[key], f"{path}/{key}")

    def _replace_one_of(self, made: dict[str, Any], schemas: list[Any], path: str) -> None:
        """llguidance sees few unions as what they are."""
        if "anyOf" in made or not are_exclusive(schemas, self._whole):
            raise UnsupportedSchema("oneOf", path, "a value might match two of its schemas")
        made["anyOf"] = made.pop("oneOf")


def _close_object(schema: dict[str, Any]) -> None:
    """Unless another part of the same schema may bring further properties."""
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
    brings = any(isinstance(part, dict) and {"properties", "$ref"} & part.keys() for part in parts)
    if _is_object(schema) and not brings and "$ref" not in schema:
        schema.setdefault("additionalProperties", False)


def _is_object(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", ())
    return "properties" in schema or "object" in ([kinds] if isinstance(kinds, str) else kinds)


def _narrow_format(schema: dict[str, Any]) -> None:
    if schema.get("format") in PATTERNS:
        schema["pattern"] = PATTERNS[schema.pop("format")]


def _bound_integer(schema: dict[str, Any]) -> None:
    """A model that cannot stop would write digits for ever, and Python reads at most 4,300."""
    if schema.get("type") == "integer" and not {"enum", "const"} & schema.keys():
        if not {"minimum", "exclusiveMinimum"} & schema.keys():
            schema["minimum"] = min(-(10**15), schema.get("maximum", 0) - 10**15)
        if not {"maximum", "exclusiveMaximum"} & schema.keys():
            schema["maximum"] = max(10**15, schema.get("minimum", 0) + 10**15)


def _check(schema: dict[str, Any], path: str) -> None:
    for keyword in schema.keys() & REFUSED:
        raise UnsupportedSchema(keyword, path, f"{schema[keyword]!r} cannot be put in a grammar")
    for keyword, (is_wrong, reason) in _CONDITIONS.items():
        if keyword in schema and is_wrong(schema):
            raise UnsupportedSchema(keyword, path, f"{schema[keyword]!r} {reason}")


def _has_free_keys(schema: dict[str, Any]) -> bool:
    """Keys may repeat then, and a repeated key counts once."""
    is_open = schema.get("additionalProperties", "properties" not in schema) is not False
    is_counted = schema.get("minProperties", 0) > len(schema.get("required", ()))
    return is_counted and (is_open or "patternProperties" in schema)


def _is_unknown_format(schema: dict[str, Any]) -> bool:
    return schema["format"] not in FORMATS


def _is_remote(schema: dict[str, Any]) -> bool:
    return not str(schema["$ref"]).startswith("#")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_CONDITIONS: dict[str, tuple[Callable[[dict[str, Any]], bool], str]] = {
    "uniqueItems": (lambda schema: schema["uniqueItems"] is not False, "needs a memory of items"),
    "minProperties": (_has_free_keys, "cannot be counted where keys are free"),
    "format": (_is_unknown_format, f"is none of {', '.join(sorted(FORMATS))}"),
    "pattern": (
        lambda schema: schema.get("format") in PATTERNS,
        "together with this format would need both at once",
    ),
    "$ref": (_is_remote, "points outside the schema"),
    "exclusiveMinimum": (lambda schema: _is_bool(schema["exclusiveMinimum"]), "is no bound"),
    "exclusiveMaximum": (lambda schema: _is_bool(schema["exclusiveMaximum"]), "is no bound"),
}
