"""Divides a CUDA source into the part that g++ compiles and the part that NVRTC compiles.

g++ gets the *preprocessed* text without the bodies of ``__global__`` and ``__device__`` functions.
So macros and headers of the author have taken effect before a function is judged. A kernel is only
declared there, and its symbol stays undefined. NVRTC gets the source as it is written, without the
functions that are only for the host. Lines keep their numbers in both.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from opkiln.machine.nvrtc.tokens import divide

KERNEL, DEVICE, HOST, BOTH = "kernel", "device", "host", "both"

_OPENING = {"(": ")", "[": "]", "{": "}"}
_CLOSING = frozenset(_OPENING.values())
_ACCESS = ("public", "private", "protected")
_CLASSES = frozenset(("class", "struct", "union"))
# CUDA's words that g++ does not know, and those of them with arguments.
_PLAIN_WORDS = frozenset(
    ("__global__", "__device__", "__host__", "__constant__", "__managed__", "__shared__",
     "__grid_constant__", "__nv_pure__", "__cudart_builtin__", "__device_builtin__")
)  # fmt: skip
_WORDS_WITH_ARGUMENTS = frozenset(
    ("__launch_bounds__", "__cluster_dims__", "__block_size__", "__maxnreg__")
)
_WORDS_OF_SYSTEM = re.compile(rf"\b(?:{'|'.join(sorted(_PLAIN_WORDS))})\b")
_INLINE = frozenset(("inline", "__forceinline__"))
_VARIABLES = frozenset(("__constant__", "__device__", "__managed__"))
_LINKAGE = frozenset(("static", "extern", "inline"))
# A name and arguments that may begin a declaration. Others are macros.
_NOT_MACROS = frozenset(
    ("decltype", "__attribute__", "__attribute", "alignas", "explicit", "noexcept", "typeof",
     "__typeof__", "__typeof", "requires", "__align__", "__builtin_align__", "asm",
     "__asm__", "static_assert",
     *_WORDS_WITH_ARGUMENTS)
)  # fmt: skip
_QUALIFIERS = frozenset(
    ("const", "volatile", "noexcept", "override", "final", "->", "&", "requires", "try", "[",
     "throw", "__attribute__", "mutable")
)  # fmt: skip
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+("(?:\\.|[^"\\])*")((?:\s+\d)*)\s*\Z')


class CannotCut(Exception):
    """The text has something that only nvcc can compile; the message says where and what."""


class SourceFunction(NamedTuple):
    """A function's definition: the indices of its tokens, and the side that it is for."""

    first: int  # of its declaration
    head: int  # after its declaration: its body, or a constructor's initializers
    last: int  # the closing brace of its body
    name: str
    side: str  # kernel, device, host, both
    in_class: bool
    internal: bool  # static, at namespace scope


class Source:
    """A text, divided into tokens and declarations. Raises CannotCut."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(divide(text))
        self.significant = [token for token in self.tokens if not token.blank]
        # Text inside of quotes is never mistaken for a word or a mark. One word follows the last.
        plain = ("name", "mark")
        self.words = [token.text if token.kind in plain else "" for token in self.significant]
        self.words += ["", ""]
        self.functions: list[SourceFunction] = []
        self.variables: list[int] = []  # of device memory, at namespace scope: where each begins
        self.unnamed: list[int] = []  # the opening braces of unnamed namespaces
        self.partners = self._pair_brackets()
        self.read_scope(0, len(self.significant), in_class=False)

    def place(self, index: int) -> str:
        """``file:line`` of a token, as the line markers of a preprocessor have it."""
        at = self.significant[index].start
        name, line = "", 1
        for token in self.tokens:
            if token.start > at:
                break
            if token.kind == "directive" and (found := _MARKER.match(token.text)):
                name, line = found[2][1:-1], int(found[1]) - 1
            line += self.text.count("\n", token.start, min(token.end, at))
        return f"{name}:{line}" if name else f"line {line}"

    def _pair_brackets(self) -> dict[int, int]:
        """The closing partner of each opening bracket, by index."""
        partners: dict[int, int] = {}
        open_: list[int] = []
        for index, word in enumerate(self.words):
            if word in _OPENING:
                open_.append(index)
            elif word in _CLOSING:
                if not open_ or _OPENING[self.words[open_[-1]]] != word:
                    raise CannotCut(f"{self.place(index)}: {word!r} closes nothing")
                partners[open_.pop()] = index
        if open_:
            raise CannotCut(f"{self.place(open_[-1])}: {self.words[open_[-1]]!r} is not closed")
        return partners

    def read_scope(self, at: int, end: int, *, in_class: bool) -> None:
        """Read the declarations between two indices."""
        while at < end:
            if self.words[at] in (";", "}", ":", ",") or (in_class and self.words[at] in _ACCESS):
                at += 1
            elif opening := self._inner_scope(at, end):
                if self.words[opening - 1] == "namespace":
                    self.unnamed.append(opening)
                self.read_scope(opening + 1, self.partners[opening], in_class=False)
                at = self.partners[opening] + 1
            else:
                at = SourceDeclaration(self, at, end, in_class).read()

    def _inner_scope(self, at: int, end: int) -> int:
        """The opening brace of ``namespace a::b {`` or ``extern "C" {``; 0 for something else."""
        words = self.words
        first = at + 1 if words[at] == "inline" else at
        if first < end and words[first] == "namespace":
            ends = (index for index in range(first + 1, end) if words[index] in ("{", ";", "="))
            index = next(ends, 0)
            return index if words[index] == "{" else 0
        linkage = words[at] == "extern" and at + 2 < end and words[at + 2] == "{"
        return at + 2 if linkage and self.significant[at + 1].kind == "string" else 0


class SourceDeclaration:
    """Reads one declaration: of a class, a function, a variable or anything else."""

    def __init__(self, source: Source, at: int, end: int, in_class: bool) -> None:
        self._source = source
        self._words = source.words
        self._partners = source.partners
        self._start = at
        self._at = at
        self._end = end
        self._in_class = in_class
        self._top: list[str] = []  # the words at its top level, before its parameters
        self._sides: set[str] = set()
        self._name = ""  # the last one that may be the function's
        self._parameters = -1  # the index of the closing parenthesis
        self._initializers = -1  # the index of the colon before a constructor's
        self._assigned = False

    def read(self) -> int:
        """The index after it."""
        self._skip_macros()
        self._skip_templates()
        while self._at < self._end:
            text = self._words[self._at]
            if text == ";":
                self._note_variable()
                return self._at + 1
            if text == "{":
                if self._is_body():
                    return self._function()
                self._block()
            elif text in ("(", "["):
                self._group(text)
            elif text == "<" and self._follows_template_name():
                self._at = self._skip_angle(self._at)
            elif text == ":" and self._may_have_body() and self._initializers < 0:
                self._initializers = self._at  # or, in a class, a bit field's width
                self._at += 1
            else:
                self._word(text)
        return self._end

    def _skip_macros(self) -> None:
        """Skip macro calls on their own lines, without a semicolon."""
        tokens = self._source.significant
        while self._at + 2 < self._end:
            name = tokens[self._at]
            if name.kind != "name" or name.text in _NOT_MACROS or self._words[self._at + 1] != "(":
                return
            after = self._partners[self._at + 1] + 1
            if after >= self._end or tokens[after].kind != "name":
                return
            if "\n" not in self._source.text[tokens[after - 1].end : tokens[after].start]:
                return
            self._at = self._start = after

    def _skip_templates(self) -> None:
        while self._words[self._at : self._at + 2] == ["template", "<"]:
            self._at = self._skip_angle(self._at + 1)
            if self._at < self._end and self._words[self._at] == "requires":
                self._skip_requirement()

    def _skip_requirement(self) -> None:
        """Skip ``requires (a && b)`` or ``requires Small<T> && Plain<T>``."""
        joins = ("&", "|", "::", "!", "requires")
        while self._at < self._end:
            text = self._words[self._at]
            if text in ("(", "{"):
                self._at = self._partners[self._at] + 1
            elif text == "<":
                self._at = self._skip_angle(self._at)
            elif text in joins or self._words[self._at - 1] in joins:
                self._at += 1
            else:
                return

    def _skip_angle(self, at: int) -> int:
        """The index after the ``>`` that closes the ``<`` at this index."""
        index, depth = at, 0
        while index < self._end:
            text = self._words[index]
            if text in (";", "}"):
                break
            depth += {"<": 1, ">": -1, ">>>": -3}.get(text, 0)
            index = self._partners.get(index, index) + 1
            if depth <= 0:
                return index
        return at + 1  # it is a comparison

    def _follows_template_name(self) -> bool:
        previous = self._source.significant[self._at - 1]
        return previous.kind == "name" and previous.text != "operator"

    def _may_have_body(self) -> bool:
        return self._parameters >= 0 and not self._assigned

    def _word(self, text: str) -> None:
        if self._parameters < 0 and not self._assigned:
            self._top.append(text)
            if self._source.significant[self._at].kind == "name" and self._name != "operator":
                self._name = text
        if text in _PLAIN_WORDS:
            self._sides.add(text)
        if text == "=":
            self._assigned = True  # an initializer follows, or default, or delete
        self._at += 1
        if text == "operator":
            # operator(), operator=, operator<<: what follows belongs to the name.
            self._name = "operator"
            while self._at < self._end and self._words[self._at] != "(":
                self._at += 1
            after = self._partners.get(self._at, self._at) + 1
            if self._words[after] == "(":
                self._at = after

    def _group(self, text: str) -> None:
        """Parentheses or brackets: parameters, arguments of an attribute, an array's size."""
        closing = self._partners[self._at]
        if text == "(" and self._at > self._start and self._parameters < 0 and not self._assigned:
            before = self._source.significant[self._at - 1]
            named = self._name == "operator" or before.kind == "name" or before.text == ">"
            if named and before.text not in _NOT_MACROS:
                self._parameters = closing
        self._at = closing + 1

    def _is_body(self) -> bool:
        """Whether the brace here opens a function's body."""
        if not self._may_have_body():
            return False
        if self._initializers >= 0:
            return self._words[self._at - 1] in (")", "}")  # else it initializes a member
        # What looks like parameters may be a macro's call: ``struct ALIGNED(16) Pair {``.
        between = self._words[self._parameters + 1 : self._at]
        is_class = _CLASSES.intersection(self._top) and between and between[0] not in _QUALIFIERS
        return not is_class

    def _block(self) -> None:
        """Read braces at the top level that are not a function's body."""
        closing = self._partners[self._at]
        is_class = _CLASSES.intersection(self._top) and "enum" not in self._top
        if is_class and not self._assigned and self._initializers < 0:
            self._source.read_scope(self._at + 1, closing, in_class=True)
            self._top = [each for each in self._top if each not in _CLASSES]
        elif not self._top:
            where = self._source.place(self._at)
            raise CannotCut(f"{where}: a block that belongs to no declaration")
        self._at = closing + 1

    def _function(self) -> int:
        last = self._partners[self._at]
        while self._words[last + 1] == "catch":
            last = self._partners[self._words.index("{", last)]
        function = SourceFunction(
            first=self._start,
            head=self._initializers if self._initializers >= 0 else self._at,
            last=last,
            name=self._name,
            side=self._side(),
            in_class=self._in_class,
            internal="static" in self._top and not self._in_class,
        )
        self._source.functions.append(function)
        return last + 1

    def _side(self) -> str:
        if "__global__" in self._sides:
            return KERNEL
        if "__device__" in self._sides:
            return BOTH if "__host__" in self._sides else DEVICE
        return BOTH if "constexpr" in self._top or "consteval" in self._top else HOST

    def _note_variable(self) -> None:
        at_namespace_scope = not self._in_class and self._parameters < 0
        if at_namespace_scope and self._sides & _VARIABLES and not _LINKAGE.intersection(self._top):
            self._source.variables.append(self._start)


# The host's part


class HostPart:
    """The text for g++, and its functions that are kernels or may run on the device."""

    def __init__(self, preprocessed: str, unnamed: str) -> None:
        """``unnamed`` is the name that unnamed namespaces get if one of them has a kernel: g++
        warns about an internal function that is declared and not defined. Raises CannotCut."""
        source = Source(preprocessed)
        self.kernels = frozenset(each.name for each in source.functions if each.side == KERNEL)
        self.internal = frozenset(each.name for each in source.functions if each.internal)
        self.on_device = frozenset(each.name for each in source.functions if each.side != HOST)
        self.text = _host_text(source, unnamed)


def _host_text(source: Source, unnamed: str) -> str:
    """The text without the bodies of device functions and without CUDA's words."""
    cut = [each for each in source.functions if each.side in (KERNEL, DEVICE)]
    bodies = {index for each in cut for index in range(each.head, each.last + 1)}
    ends = {each.last for each in cut}
    changed = _changed_words(source, bodies)
    for function in cut:
        # g++ would ask where an internal or an inline function is defined.
        unwanted = _INLINE if function.in_class else _INLINE | {"static"}
        heading = range(function.first, function.head)
        changed |= {index: "" for index in heading if source.words[index] in unwanted}
    for index in source.variables:
        token = source.significant[index]
        if token.kind != "mark":
            word = changed.get(index, token.text)
            changed[index] = f"static __attribute__((__unused__)) {word}"
    kernels = [each.first for each in cut if each.side == KERNEL]
    if any(
        opening < each < source.partners[opening] for opening in source.unnamed for each in kernels
    ):
        for opening in source.unnamed:
            changed[opening - 1] = "inline namespace"
            changed[opening] = f' {unnamed} __attribute__((__visibility__("hidden"))) {{'
    out: list[str] = []
    index = 0  # of the next significant token
    for token in source.tokens:
        is_marker = token.kind == "directive" and _MARKER.match(token.text)
        if index in bodies and not is_marker:
            is_end = index in ends and not token.blank
            out.append(";" if is_end else "\n" * token.text.count("\n"))
        elif token.kind == "system":
            plain = _WORDS_OF_SYSTEM.sub("", token.text)
            out.append(plain.replace("__forceinline__", "inline"))
        else:
            out.append(token.text if token.blank else changed.get(index, token.text))
        index += not token.blank
    return "".join(out)


def _changed_words(source: Source, bodies: set[int]) -> dict[int, str]:
    """The replacements of CUDA's words for g++, by their indices. Raises CannotCut."""
    changed: dict[int, str] = {}
    for index, word in enumerate(source.words):
        previous = source.words[index - 1]
        if index in bodies:
            continue
        if word == "<<<" and previous != "operator":
            raise CannotCut(
                f"{source.place(index)}: kernel<<<...>>>(...) is nvcc's own syntax; "
                "opk::launch(kernel, grid, block, shared, ...) launches a kernel everywhere"
            )
        if word == "__device__" and previous == "]":
            raise CannotCut(f"{source.place(index)}: a __device__ lambda needs nvcc")
        if word in _WORDS_WITH_ARGUMENTS:
            end = source.partners[index + 1] if source.words[index + 1] == "(" else index
            changed |= dict.fromkeys(range(index, end + 1), "")
        elif word in _PLAIN_WORDS or (word == "__noinline__" and previous not in ("(", ",")):
            changed[index] = ""
        elif word in _INLINE:
            changed[index] = "inline"
    return changed


# The device's part


def device_text(written: str, on_device: frozenset[str]) -> str:
    """The text for NVRTC: the source as written, without functions that are only for the host.
    ``on_device`` has the names of functions that are for the device after preprocessing: a macro
    may stand for ``__device__``. Raises CannotCut."""
    source = Source(written)
    parts: list[str] = []
    at = 0
    for function in sorted(source.functions):
        if function.side != HOST or function.in_class or function.name in on_device:
            continue
        start = source.significant[function.first].start
        end = source.significant[function.last].end
        parts += [written[at:start], "\n" * written.count("\n", start, end)]
        at = end
    return "".join([*parts, written[at:]])
