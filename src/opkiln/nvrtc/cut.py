"""Divides a CUDA source into the part that g++ compiles and the part that NVRTC compiles.

g++ gets the *preprocessed* text without the bodies of ``__global__`` and ``__device__`` functions.
So what a macro or a header of the author makes of a function counts, not how it is spelled. A
kernel is only declared there, and its symbol stays undefined. NVRTC gets the source as it is
written, without the functions that are the host's alone. Lines keep their numbers in both.
"""

from __future__ import annotations

import re

from opkiln.nvrtc.tokens import Token, divide

KERNEL, DEVICE, HOST, BOTH = "kernel", "device", "host", "both"

_OPENING = {"(": ")", "[": "]", "{": "}"}
_CLOSING = frozenset(_OPENING.values())
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


class Function:
    """A function's definition: where it is, and whose it is."""

    __slots__ = ("end", "head", "in_class", "internal", "name", "side", "start")

    def __init__(
        self,
        *,
        start: int,
        head: int,
        end: int,
        name: str,
        side: str,
        in_class: bool,
        internal: bool,
    ) -> None:
        self.start = start  # the first token of its declaration, by the place in the text
        self.head = head  # the end of its declaration, before a constructor's initializers
        self.end = end  # after the closing brace of its body
        self.name = name
        self.side = side  # kernel, device, host, both
        self.in_class = in_class
        self.internal = internal  # static, at namespace scope


class Source:
    """A text, divided into tokens and declarations."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(divide(text))
        self.significant = [token for token in self.tokens if not token.blank]
        self.functions: list[Function] = []
        self.variables: list[int] = []  # of device memory, at namespace scope: where each begins
        self.unnamed: list[tuple[int, int]] = []  # the braces of unnamed namespaces
        self.partners = self._paired()
        self.read_scope(0, len(self.significant), in_class=False)

    def place(self, at: int) -> str:
        """``file:line`` of a place in the text, as the line markers of a preprocessor have it."""
        name, line = "", 1
        for token in self.tokens:
            if token.start > at:
                break
            if token.kind == "directive" and (found := _MARKER.match(token.text)):
                name, line = found[2][1:-1], int(found[1]) - 1
            line += self.text.count("\n", token.start, min(token.end, at))
        return f"{name}:{line}" if name else f"line {line}"

    # Finding declarations

    def _paired(self) -> dict[int, int]:
        """The closing partner of each opening bracket, by index."""
        partners: dict[int, int] = {}
        open_: list[int] = []
        for index, token in enumerate(self.significant):
            if token.kind != "mark":
                continue
            if token.text in _OPENING:
                open_.append(index)
            elif token.text in _CLOSING:
                if not open_ or _OPENING[self.word(open_[-1])] != token.text:
                    raise CannotCut(f"{self.place(token.start)}: {token.text!r} closes nothing")
                partners[open_.pop()] = index
        if open_:
            token = self.significant[open_[-1]]
            raise CannotCut(f"{self.place(token.start)}: {token.text!r} is not closed")
        return partners

    def word(self, index: int) -> str:
        token = self.significant[index]
        # Text inside of quotes is never mistaken for a word or a mark.
        return token.text if token.kind in ("name", "mark") else ""

    def read_scope(self, at: int, end: int, *, in_class: bool) -> None:
        while at < end:
            at = self._declaration(at, end, in_class=in_class)

    def _declaration(self, at: int, end: int, *, in_class: bool) -> int:
        """Read one declaration. The index after it."""
        word = self.word(at)
        if word in (";", "}", ":", ",") or (in_class and self._is_access(at)):
            return at + 1
        inner = self._inner_scope(at, end)
        if inner is not None:
            opening, closing = inner
            if self.word(opening - 1) == "namespace":
                braces = self.significant[opening].start, self.significant[closing].start
                self.unnamed.append(braces)
            self.read_scope(opening + 1, closing, in_class=False)
            return closing + 1
        return _Declaration(self, at, end, in_class).read()

    def _is_access(self, at: int) -> bool:
        return self.word(at) in ("public", "private", "protected")

    def _inner_scope(self, at: int, end: int) -> tuple[int, int] | None:
        """The braces of ``namespace a::b {`` or ``extern "C" {``; None for something else."""
        first = at + 1 if self.word(at) == "inline" else at
        if first < end and self.word(first) == "namespace":
            for index in range(first + 1, end):
                if self.word(index) == "{":
                    return index, self.partners[index]
                if self.word(index) in (";", "="):
                    return None
            return None
        if self.word(at) == "extern" and at + 2 < end:
            linkage = self.significant[at + 1]
            if linkage.kind == "string" and self.word(at + 2) == "{":
                return at + 2, self.partners[at + 2]
        return None


class _Declaration:
    """Reads one declaration: of a class, a function, a variable or anything else."""

    def __init__(self, source: Source, at: int, end: int, in_class: bool) -> None:
        self._source = source
        self._start = at
        self._at = at
        self._end = end
        self._in_class = in_class
        self._words: list[str] = []  # at its top level, before its parameters
        self._sides: set[str] = set()
        self._name = ""
        self._parameters = -1  # the index of the closing parenthesis
        self._assigned = False

    def read(self) -> int:
        source = self._source
        self._skip_macros()
        self._skip_templates()
        while self._at < self._end:
            text = source.word(self._at)
            if text == ";":
                self._note_variable()
                return self._at + 1
            if text == "{":
                after = self._brace()
                if after is not None:
                    return after
            elif text in ("(", "["):
                self._group(text)
            elif text == "<" and self._follows_template_name():
                self._at = self._after_angle(self._at)
            elif text == ":" and self._parameters >= 0 and not self._assigned:
                return self._constructor()
            else:
                self._word(text)
        return self._end

    def _skip_macros(self) -> None:
        """A macro call on its own lines, without a semicolon, does not belong to what follows."""
        source = self._source
        while self._at + 2 < self._end:
            name = source.significant[self._at]
            called = name.kind == "name" and source.word(self._at + 1) == "("
            if not called or name.text in _NOT_MACROS:
                return
            closing = source.partners[self._at + 1]
            if closing + 1 >= self._end or source.significant[closing + 1].kind != "name":
                return
            between = source.text[
                source.significant[closing].end : source.significant[closing + 1].start
            ]
            if "\n" not in between:
                return
            self._at = self._start = closing + 1

    def _skip_templates(self) -> None:
        source = self._source
        while source.word(self._at) == "template" and source.word(self._at + 1) == "<":
            self._at = self._after_angle(self._at + 1)
            if self._at < self._end and source.word(self._at) == "requires":
                self._skip_requirement()

    def _skip_requirement(self) -> None:
        """``requires (a && b)``, ``requires Small<T> && Plain<T>``: operands and their joins."""
        source, joins = self._source, ("&", "|", "::", "!", "requires")
        while self._at < self._end:
            text = source.word(self._at)
            if text in ("(", "{"):
                self._at = source.partners[self._at] + 1
            elif text == "<":
                self._at = self._after_angle(self._at)
            elif text in joins or source.word(self._at - 1) in joins:
                self._at += 1
            else:
                return

    def _after_angle(self, at: int) -> int:
        """The index after the ``>`` that closes the ``<`` at this index."""
        source, depth = self._source, 0
        index = at
        while index < self._end:
            text = source.word(index)
            if text in _OPENING:
                index = source.partners[index]
            elif text == "<":
                depth += 1
            elif text == ">>>":
                depth -= 3
            elif text == ">":
                depth -= 1
            elif text in (";", "}"):
                break
            index += 1
            if depth <= 0:
                return index
        return at + 1  # it is a comparison

    def _follows_template_name(self) -> bool:
        previous = self._source.significant[self._at - 1]
        return previous.kind == "name" and previous.text != "operator"

    def _word(self, text: str) -> None:
        source = self._source
        if self._parameters < 0 and not self._assigned:
            self._words.append(text)
        if text in _PLAIN_WORDS:
            self._sides.add(text)
        if text == "operator":
            # operator(), operator=, operator<<: what follows belongs to the name.
            self._name = "operator"
            self._at += 1
            while self._at < self._end and source.word(self._at) != "(":
                self._at += 1
            if source.word(source.partners.get(self._at, self._at) + 1) == "(":
                self._at = source.partners[self._at] + 1
            return
        if text == "=":
            self._assigned = True  # an initializer follows, or default, or delete
        self._at += 1

    def _group(self, text: str) -> None:
        """Parentheses or brackets: parameters, arguments of an attribute, an array's size."""
        source = self._source
        closing = source.partners[self._at]
        before = source.significant[self._at - 1] if self._at > self._start else None
        attribute = before is not None and before.text in _NOT_MACROS
        if text == "(" and not attribute and not self._assigned and self._parameters < 0:
            named = before is not None and (before.kind == "name" or before.text == ">")
            if self._name == "operator" or named:
                self._parameters = closing
                self._name = self._name or self._named_before(self._at)
        self._at = closing + 1

    def _named_before(self, at: int) -> str:
        """The name that parameters follow: ``f`` of ``f(`` and of ``f<float>(``."""
        source, index = self._source, at - 1
        if source.word(index) == ">":
            depth = 0
            while index > self._start:
                depth += {">": 1, "<": -1}.get(source.word(index), 0)
                index -= 1
                if depth == 0:
                    break
        return source.word(index)

    def _brace(self) -> int | None:
        """An opening brace at the top level. The index after the declaration, if that ends it."""
        source, opening = self._source, self._at
        closing = source.partners[opening]
        classes = _CLASSES & set(self._words)
        if self._parameters >= 0 and not self._assigned and not (classes and self._is_class()):
            return self._function(opening)
        if classes and not self._assigned and "enum" not in self._words:
            source.read_scope(opening + 1, closing, in_class=True)
            self._words = [each for each in self._words if each not in _CLASSES]
        elif not self._words:
            raise CannotCut(
                f"{source.place(source.significant[opening].start)}: a block that belongs to no "
                "declaration"
            )
        self._at = closing + 1
        return None

    def _is_class(self) -> bool:
        """Whether what looks like parameters is a macro's call: ``struct ALIGNED(16) Pair {``."""
        source = self._source
        between = range(self._parameters + 1, self._at)
        words = [source.word(index) for index in between]
        return bool(words) and words[0] not in _QUALIFIERS

    def _constructor(self) -> int:
        """The initializers of a constructor, then its body. Or, in a class, a bit field."""
        source, head = self._source, self._at
        self._at += 1
        while self._at < self._end:
            text = source.word(self._at)
            if text == ";":
                return self._at + 1
            if text == "{":
                previous = source.significant[self._at - 1]
                if previous.text in (")", "}"):
                    return self._function(self._at, head)
                self._at = source.partners[self._at] + 1
            elif text in ("(", "["):
                self._at = source.partners[self._at] + 1
            elif text == "<":
                self._at = self._after_angle(self._at)
            else:
                self._at += 1
        return self._end

    def _function(self, opening: int, head: int = -1) -> int:
        source = self._source
        closing = source.partners[opening]
        while closing + 1 < self._end and source.word(closing + 1) == "catch":
            body = closing + 1
            while body < self._end and source.word(body) != "{":
                body += 1
            closing = source.partners[body]
        first = source.significant[self._start]
        last = source.significant[(head if head >= 0 else opening) - 1]
        source.functions.append(
            Function(
                start=first.start,
                head=last.end,
                end=source.significant[closing].end,
                name=self._name,
                side=self._side(),
                in_class=self._in_class,
                internal="static" in self._words and not self._in_class,
            )
        )
        return closing + 1

    def _side(self) -> str:
        if "__global__" in self._sides:
            return KERNEL
        if "__device__" in self._sides:
            return BOTH if "__host__" in self._sides else DEVICE
        return BOTH if "constexpr" in self._words or "consteval" in self._words else HOST

    def _note_variable(self) -> None:
        if self._in_class or self._parameters >= 0 or not self._sides & _VARIABLES:
            return
        source = self._source
        if not _LINKAGE & set(self._words):
            source.variables.append(source.significant[self._start].start)


# The host's part


class HostPart:
    """What g++ compiles, and which functions of it are kernels or may run on the device."""

    def __init__(self, preprocessed: str, unnamed: str) -> None:
        """``unnamed`` is the name that unnamed namespaces get if one of them has a kernel: g++
        warns about an internal function that is declared and not defined. Raises CannotCut."""
        source = Source(preprocessed)
        self.kernels = frozenset(each.name for each in source.functions if each.side == KERNEL)
        self.internal = frozenset(each.name for each in source.functions if each.internal)
        self.on_device = frozenset(each.name for each in source.functions if each.side != HOST)
        self.text = _HostText(source, unnamed).written()


class _HostText:
    """Writes a source without the bodies of device functions and without CUDA's words."""

    def __init__(self, source: Source, unnamed: str) -> None:
        self._source = source
        self._cut = sorted(
            (each for each in source.functions if each.side in (KERNEL, DEVICE)),
            key=lambda each: each.start,
        )
        self._variables = frozenset(source.variables)
        self._unnamed = self._renamed(unnamed)
        self._previous = ""  # the last token that is not blank
        self._skip_to = 0

    def _renamed(self, name: str) -> dict[int, str]:
        """What follows the word ``namespace``, by the place of the brace after it."""
        source = self._source
        kernels = [each.start for each in self._cut if each.side == KERNEL]
        if not any(start < at < end for start, end in source.unnamed for at in kernels):
            return {}
        hidden = f' {name} __attribute__((__visibility__("hidden"))) '
        return {start: hidden for start, _ in source.unnamed}

    def written(self) -> str:
        out: list[str] = []
        functions = iter(self._cut)
        current = next(functions, None)
        for index, token in enumerate(self._source.tokens):
            while current is not None and token.start >= current.end:
                current = next(functions, None)
            inside = current if current is not None and token.start >= current.start else None
            if inside is not None and token.start >= inside.head:
                if token.end >= inside.end:
                    out.append(";")
                elif token.kind == "directive" and _MARKER.match(token.text):
                    out.append(token.text)
                else:
                    out.append("\n" * token.text.count("\n"))
            elif token.start >= self._skip_to:
                out.append(self._token(index, inside))
            if not token.blank:
                self._previous = token.text
        return "".join(out)

    def _token(self, index: int, cut: Function | None) -> str:
        """A token as g++ gets it."""
        token = self._source.tokens[index]
        text = token.text
        if token.kind == "mark":
            return self._mark(token)
        if token.kind == "system":
            return _WORDS_OF_SYSTEM.sub("", text).replace("__forceinline__", "inline")
        before = ""
        if token.start in self._variables:
            before = "static __attribute__((__unused__)) "
        if token.kind != "name":
            return before + text
        if text == "namespace" and self._opens_unnamed(index):
            return "inline namespace"
        return before + self._word(index, text, cut)

    def _opens_unnamed(self, index: int) -> bool:
        following = (each for each in self._source.tokens[index + 1 :] if not each.blank)
        return next(following).start in self._unnamed

    def _mark(self, token: Token) -> str:
        if token.text == "<<<" and self._previous != "operator":
            raise CannotCut(
                f"{self._source.place(token.start)}: kernel<<<...>>>(...) is nvcc's own syntax; "
                "opk::launch(kernel, grid, block, shared, ...) launches a kernel everywhere"
            )
        return self._unnamed.get(token.start, "") + token.text

    def _word(self, index: int, text: str, cut: Function | None) -> str:
        if text in _PLAIN_WORDS:
            if text == "__device__" and self._previous == "]":
                where = self._source.place(self._source.tokens[index].start)
                raise CannotCut(f"{where}: a __device__ lambda needs nvcc")
            return ""
        if text in _WORDS_WITH_ARGUMENTS:
            self._skip_to = self._after_arguments(index)
            return ""
        if text == "__noinline__" and self._previous not in ("(", ","):  # not of an attribute
            return ""
        # g++ would ask where an internal or an inline function is defined.
        if cut is not None and (text in _INLINE or (text == "static" and not cut.in_class)):
            return ""
        return "inline" if text in _INLINE else text

    def _after_arguments(self, index: int) -> int:
        tokens, depth = self._source.tokens, 0
        for token in tokens[index + 1 :]:
            if token.kind == "mark" and token.text in "()":
                depth += 1 if token.text == "(" else -1
                if depth == 0:
                    return token.end
            elif depth == 0 and not token.blank:
                break
        return tokens[index].end


# The device's part


def device_text(written: str, on_device: frozenset[str]) -> str:
    """What NVRTC compiles: the source as written, without the host's own functions.

    ``on_device`` has the names of functions that are the device's after preprocessing: a macro may
    stand for ``__device__``. Raises CannotCut.
    """
    source = Source(written)
    parts: list[str] = []
    at = 0
    for function in sorted(source.functions, key=lambda each: each.start):
        if function.side != HOST or function.in_class or function.name in on_device:
            continue
        parts.append(written[at : function.start])
        parts.append(re.sub(r"[^\n]+", "", written[function.start : function.end]))
        at = function.end
    parts.append(written[at:])
    return "".join(parts)
