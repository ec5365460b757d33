"""Compares the schema of a function with the signature of its C++ function.

A library that is written with ``opkiln/op.h`` describes each function in the words of schemas:
``(Tensor, Tensor(!), int[], float) -> Tensor``. This module makes the same text from a schema, and
lists the differences. Pure functions over texts; a hit calls them, so they import nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opkiln.base.lazy import Record
from opkiln.base.model import DISPATCH_KEYS, OpSpec, function_name

# The C++ types of op.h. A tensor's depends on whether it is written; lists and optionals are
# templates of these.
_CPP = {
    "Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool", "str": "opk::String",
    "ScalarType": "opk::DType", "Device": "opk::Device",
}  # fmt: skip
_BY_VALUE = ("int64_t", "double", "bool", "opk::DType", "opk::Device")


class NativeFunction(Record):
    """A function of a library, as the library describes it."""

    name: str
    device: str  # cpu, cuda, xpu
    signature: str


def fits(spec: OpSpec, functions: Sequence[NativeFunction]) -> bool:
    """Whether a library has every function that it must have, and no undeclared one."""
    schemas = {function_name(each): each for each in spec.schemas}
    there = {each.name for each in functions if each.device in devices(spec)}
    wanted = {each.partition("::")[2] for each in spec.kernels}
    return bool(wanted) and wanted <= there and all(
        each.name in schemas and canonical_signature(schemas[each.name]) == each.signature
        for each in functions
    )  # fmt: skip


def devices(spec: OpSpec) -> tuple[str, ...]:
    """The devices for which a library of this op may have functions, in the words of op.h."""
    return tuple([key.lower() for key in DISPATCH_KEYS[spec.backend]])


def canonical_signature(schema: str) -> str:
    """The canonical signature of a ``torch.library`` schema."""
    given = ", ".join(canonical(each) for each, _ in arguments(schema))
    return f"({given}) -> {results_of(schema)}"


def argument_names(schema: str) -> tuple[str, ...]:
    """The names of a schema's arguments, in its order."""
    return tuple([name for _, name in arguments(schema)])


def differences(schema: str, signature: str) -> list[str]:
    """The differences between a schema and the signature of a C++ function, a line for each."""
    declared = [(canonical(kind), name) for kind, name in arguments(schema)]
    inside, _, results = signature.rpartition(" -> ")
    given = list(_split(inside[1:-1]))
    found = []
    if len(given) != len(declared):
        found.append(
            f"the schema has {_count(len(declared))}, the C++ function has {_count(len(given))}"
        )
    else:
        for (kind, name), other in zip(declared, given, strict=True):
            if kind != other:
                found.append(f"{name} is {kind} in the schema, {other} in C++")
    if (expected := results_of(schema)) != results:
        found.append(f"the result is {expected} in the schema, {results} in C++")
    return found


def cpp(schema: str) -> str:
    """The C++ declaration that fits a schema; empty if op.h has no type for a part of it."""
    given = [(_cpp_argument(canonical(kind)), name) for kind, name in arguments(schema)]
    text = results_of(schema)
    results = [_cpp(each) for each in (_split(text[1:-1]) if text.startswith("(") else [text])]
    if not all(results) or not all(kind for kind, _ in given):
        return ""
    result = "void" if not results else results[0]
    if len(results) > 1:
        result = f"opk::tuple<{', '.join(results)}>"
    inside = ", ".join(f"{kind} {name}" for kind, name in given)
    return f"{result} {function_name(schema)}({inside})"


def canonical(kind: str) -> str:
    """A type as C++ sees it: ``Tensor(a!)`` is ``Tensor(!)``, ``Tensor(a)``
    is ``Tensor``, ``SymInt`` is ``int``, ``int[2]`` is ``int[]``."""
    if "(" not in kind and "[" not in kind:
        return kind.replace("SymInt", "int")
    text = ""
    while kind:
        start = min((at for at in (kind.find("("), kind.find("[")) if at >= 0), default=len(kind))
        text += kind[:start].strip()
        if start == len(kind):
            break
        end = kind.find(")" if kind[start] == "(" else "]", start)
        if kind[start] == "[":
            text += "[]"
        elif "!" in kind[start:end]:
            text += "(!)"
        kind = kind[end + 1 :] if end >= 0 else ""
    return text.replace("SymInt", "int")


def _count(count: int) -> str:
    return "1 argument" if count == 1 else f"{count} arguments"


def arguments(schema: str) -> Iterator[tuple[str, str]]:
    """The type and the name of each argument."""
    schema = _remove_texts(schema)
    inside = schema[schema.find("(") + 1 : schema.rfind(")", 0, _arrow(schema))]
    for part in _split(inside):
        if part != "*":  # only says that the others are given by name
            declared = part.partition("=")[0].strip()
            # `Tensor(a! -> *) x`: the name is what follows the last space outside of parentheses
            space = declared.rfind(" ", declared.rfind(")") + 1)
            yield declared[:space].strip(), declared[space + 1 :].strip()


def _remove_texts(schema: str) -> str:
    """A schema without the texts that are defaults: they may contain parentheses and commas."""
    if "'" not in schema and '"' not in schema:
        return schema
    kept, quote, escaped = "", "", False
    for char in schema:
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        else:
            kept += char
    return kept


def _arrow(schema: str) -> int:
    """The place of the arrow before the results: the one outside of all parentheses."""
    at = schema.rfind("->")
    while at >= 0 and schema.count("(", at) != schema.count(")", at):
        at = schema.rfind("->", 0, at)
    return at if at >= 0 else len(schema)


def results_of(schema: str) -> str:
    schema = _remove_texts(schema)
    text = schema[_arrow(schema) + 2 :].strip()
    inside = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    kinds = []
    for part in _split(inside):
        kind = part.strip()
        space = kind.find(" ", kind.find(")") + 1)  # `Tensor(a!) out`: results may have names
        kinds.append(canonical(kind if space < 0 else kind[:space]).replace("(!)", ""))
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _split(text: str) -> Iterator[str]:
    """The parts between commas that nothing encloses."""
    whole = ""
    for part in text.split(","):
        whole = f"{whole},{part}" if whole else part
        if whole.count("(") == whole.count(")") and whole.count("[") == whole.count("]"):
            if whole.strip():
                yield whole.strip()
            whole = ""


def _cpp_argument(kind: str) -> str:
    plain = _cpp(kind.replace("(!)", ""))
    if not plain:
        return ""
    if "(!)" in kind:
        return f"{plain}&"
    return plain if plain in _BY_VALUE else f"const {plain}&"


def _cpp(kind: str) -> str:
    """``List<int64_t>`` for ``int[]``; empty for a type that op.h does not have."""
    if kind.endswith("?"):
        inner = _cpp(kind[:-1])
        return inner and f"opk::optional<{inner}>"
    if kind.endswith("[]"):
        inner = _cpp(kind[:-2])
        return inner and f"opk::List<{inner}>"
    return _CPP.get(kind, "")
