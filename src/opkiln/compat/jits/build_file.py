"""Reads the build files that tvm-ffi, FlashInfer and SGLang write for ninja: variables, rules,
build statements, ``subninja``. Not the whole language: of a file that has more, nothing is known.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# Of a path in a command, what a shell reads as it stands.
_PLAIN = re.compile(r"[\w+,./@%=-]+\Z")
_WORD = re.compile(r"(?:[^\s$:|]|\$[ :$]|\$\w+|\$\{[\w.-]+\})+|[:|]+")
_VARIABLE = re.compile(r"\$(?:([\w-]+)|\{([\w.-]+)\}|([ :$]))")
_KNOWN = {"command", "depfile", "deps", "description"}


class Edge(NamedTuple):
    """A command, and the files that it makes and needs."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    command: str


class NotKnown(Exception):
    """A build file has something that is not read here."""


def read(path: str) -> list[Edge]:
    """All edges of a build file and of those that it names, in their order.

    Raises NotKnown, OSError.
    """
    return list(_File(path, {}).edges)


def levels(edges: list[Edge]) -> list[list[Edge]]:
    """The edges in groups; what one needs is made by an earlier group. Raises NotKnown."""
    made = {output for edge in edges for output in edge.outputs}
    groups = []
    while edges:
        ready = [edge for edge in edges if not made.intersection(edge.inputs)]
        if not ready:
            raise NotKnown("a cycle")
        groups.append(ready)
        made.difference_update(*(edge.outputs for edge in ready))
        edges = [edge for edge in edges if edge not in ready]
    return groups


class _File:
    """One file. Variables are those of the file that names it, and its own."""

    def __init__(self, path: str, variables: dict[str, str]) -> None:
        self.edges: list[Edge] = []
        self._variables = dict(variables)
        self._rules: dict[str, dict[str, str]] = {}
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"(?<!\$)((?:\$\$)*)\$\n[ ]*", r"\1", file.read())
        blocks: list[tuple[str, dict[str, str]]] = []
        for line in text.split("\n"):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if line[0] != " ":
                blocks.append((line, {}))
            elif not blocks or "=" not in line:
                raise NotKnown(line)
            else:
                name, _, value = line.partition("=")
                blocks[-1][1][name.strip()] = value.lstrip()
        for line, below in blocks:
            self._take(line, below)

    def _take(self, line: str, below: dict[str, str]) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "build":
            self.edges.append(self._edge(rest, below))
        elif kind == "rule":
            if not below.keys() <= _KNOWN:
                raise NotKnown(line)
            self._rules[rest.strip()] = below
        elif kind == "subninja":
            self.edges += _File(_expand(rest.strip(), self._variables), self._variables).edges
        elif kind != "default":
            name, equals, value = line.partition("=")
            if not equals or " " in name.strip() or below:
                raise NotKnown(line)
            self._variables[name.strip()] = _expand(value.lstrip(), self._variables)

    def _edge(self, text: str, below: dict[str, str]) -> Edge:
        own = {name: _expand(value, self._variables) for name, value in below.items()}
        values = {**self._variables, **own}
        words = _WORD.findall(text)
        if ":" not in words or re.sub(r"\s", "", text) != re.sub(r"\s", "", "".join(words)):
            raise NotKnown(text)
        middle = words.index(":")
        outputs = [_expand(word, values) for word in words[:middle]]
        named = words[middle + 2 :]
        explicit = named[: named.index("|")] if "|" in named else named
        inputs = [_expand(word, values) for word in explicit]
        implicit = [_expand(word, values) for word in named[len(inputs) + 1 :] if word != "||"]
        rule = self._rules.get(words[middle + 1], {})
        if "command" not in rule or "|" in outputs or not all(map(_PLAIN.match, outputs + inputs)):
            raise NotKnown(text)
        values.update({"in": " ".join(inputs), "out": " ".join(outputs)})
        return Edge(tuple(outputs), (*inputs, *implicit), _expand(rule["command"], values))


def _expand(text: str, values: dict[str, str]) -> str:
    def one(found: re.Match[str]) -> str:
        return found[3] or values.get(found[1] or found[2], "")

    return _VARIABLE.sub(one, text)


def full_path(directory: str, path: str) -> str:
    """Where a path of a build file leads."""
    return os.path.normpath(os.path.join(directory, path))
