"""TypeScript types of what the API takes and answers, from its OpenAPI document: web/src/api/schema.ts."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}
HEAD = "// Made by `make docs` from the control plane's OpenAPI document: change it there.\n"


def typescript(document: Mapping[str, Any]) -> str:
    """One exported type for each schema, by name. What we answer has all its fields; what we are sent may lack those
    with a default."""
    schemas = document["components"]["schemas"]
    asked = _reached(document["paths"], schemas)
    return HEAD + "".join(
        _declared(name, schemas[name], is_answer=name not in asked) for name in sorted(schemas)
    )


def _reached(paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    """Names of the schemas that requests are made of."""
    todo = [method.get("requestBody", {}) for path in paths.values() for method in path.values()]
    found: set[str] = set()
    while todo:
        names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(todo.pop()))) - found
        found |= names
        todo += [schemas[name] for name in names]
    return found


def _declared(name: str, schema: Mapping[str, Any], *, is_answer: bool) -> str:
    told = _remark(schema.get("description", ""), "")
    if schema.get("type") == "object" and "properties" in schema:
        required = schema["properties"] if is_answer else schema.get("required", ())
        lines = "".join(_fields({**schema, "required": list(required)}))
        return f"\n{told}export interface {_name(name)} {{\n{lines}}}\n"
    return f"\n{told}export type {_name(name)} = {_type(schema)}\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, each in schema["properties"].items():
        mark = "" if name in required else "?"
        yield f"{_remark(each.get('description', ''), '  ')}  {_key(name)}{mark}: {_type(each)}\n"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _name(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "allOf" in schema:
        return " & ".join(dict.fromkeys(_type(each) for each in schema["allOf"]))
    return _by_kind(schema)


def _by_kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": each}) for each in kind)
    if kind == "array":
        return f"({_type(schema['items'])})[]" if schema.get("items") else "unknown[]"
    if kind == "object":
        return _object(schema)
    return PLAIN.get(str(kind), "unknown")


def _object(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return "{\n" + "".join(_fields(schema)) + "}"
    values = schema.get("additionalProperties")
    return f"Record<string, {_type(values) if isinstance(values, dict) else 'unknown'}>"


def _name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_$][\w$]*", name) else json.dumps(name)


def _remark(text: str, indent: str) -> str:
    said = " ".join(text.split()).replace("*/", "")
    return f"{indent}/** {said} */\n" if said else ""
