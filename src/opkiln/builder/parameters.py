"""The compile-time parameters of an op: names, the values that are listed, and macros.

    variants={"HEAD": (64, 128), "T": ("half", "float")}

Each combination of values is one variant of the op, with a library of its own. Its sources see
``HEAD`` and ``T`` as macros. With ``dtypes=`` there is a library for each dtype instead. Nothing
here needs torch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from opkiln.base.lazy import Record
from opkiln.base.model import NATIVE, NO_GRAD, UNSERVED, check_names, texts
from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Value = int | bool | str

_MOST = 1000  # variants of one op; a larger product is a mistake
CPP_KEYWORDS = frozenset((
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break",
    "case", "catch", "char", "char8_t", "char16_t", "char32_t", "class", "co_await", "co_return",
    "co_yield", "compl", "concept", "const", "const_cast", "consteval", "constexpr", "constinit",
    "continue", "decltype", "default", "delete", "do", "double", "dynamic_cast", "else", "enum",
    "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline",
    "int", "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq", "nullptr",
    "operator", "or", "or_eq", "private", "protected", "public", "register", "reinterpret_cast",
    "requires", "return", "short", "signed", "sizeof", "static", "static_assert", "static_cast",
    "struct", "switch", "template", "this", "thread_local", "throw", "true", "try", "typedef",
    "typeid", "typename", "typeof", "union", "unsigned", "using", "virtual", "void", "volatile",
    "wchar_t", "while", "xor", "xor_eq",
))  # fmt: skip
# op.h itself defines the macros whose names are one letter, after all of its headers: such letters
# are the names of template parameters there.
_LETTER = "OPKILN_PARAMETER_"
DTYPE = "dtype"  # what the dtype is called where a library is asked for
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Parameters(Record):
    """What an op may be compiled with. ``chosen`` are chosen from the arguments of a call, by a
    function of the op's author or, if ``by_dtype``, by their dtype, which is the only parameter
    then; ``tuned`` by measuring. ``ahead`` are the values of the variants that are built before a
    call needs them."""

    op: str
    chosen: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    tuned: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    ahead: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    by_dtype: bool = False

    @classmethod
    def of(
        cls,
        op: str,
        variants: Mapping[str, Sequence[Value]],
        tune: Mapping[str, Sequence[Value]],
        dtypes: Sequence[str] = (),
        ahead: Mapping[str, Sequence[Value]] | None = None,
    ) -> Parameters:
        """Raises SpecError."""
        if dtypes:
            if variants or tune or ahead:
                raise SpecError(f"op {op}: dtypes= goes with none of variants=, tune= and ahead=")
            return cls(op, ((DTYPE, _checked_dtypes(op, dtypes)),), by_dtype=True)
        made = cls(
            op,
            _check_values(op, "variants", variants),
            _check_values(op, "tune", tune),
            ahead=_check_values(op, "ahead", ahead or {}),
        )
        if both := sorted(set(variants) & set(tune)):
            raise SpecError(f"op {op}: variants= and tune= both have {', '.join(both)}")
        for name, values in made.ahead:
            if unknown := [each for each in values if each not in dict(made.all).get(name, ())]:
                raise SpecError(
                    f"op {op}: ahead= has {_join_values({name: unknown[0]})}",
                    why=f"it lists some of the values of variants= and tune=: {made.in_words()}",
                )
        count = math.prod(len(values) for _, values in made.all)
        if count > _MOST:
            raise SpecError(f"op {op}: its parameters have {count} combinations, more than {_MOST}")
        names: dict[str, object] = dict.fromkeys(
            ("default", NO_GRAD, UNSERVED, NATIVE), "another overload"
        )
        for values in made.combinations():
            check_names("any", made.library(values))
            other = names.setdefault(made.suffix(values), values)
            if other != values:
                raise SpecError(
                    f"op {op}: {made.suffix(values)} is the name of {values} and {other}"
                )
        return made

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def all(self) -> tuple[tuple[str, tuple[Value, ...]], ...]:
        return (*self.chosen, *self.tuned)

    @property
    def are_overloads(self) -> bool:
        """Whether a variant is an overload of its own. Libraries for dtypes implement the op
        itself."""
        return bool(self) and not self.by_dtype

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.all)

    def combinations(self) -> Iterator[tuple[Value, ...]]:
        """The values of every variant, in the order in which they are listed."""
        return itertools.product(*(values for _, values in self.all))

    def candidates(self) -> Iterator[tuple[Value, ...]]:
        """The combinations of what is chosen by measuring."""
        return itertools.product(*(values for _, values in self.tuned))

    def is_ahead(self, values: Sequence[Value]) -> bool:
        """Whether a variant is built before a call needs it: all are, unless ``ahead`` says."""
        given = self._by_name(values)
        return all(given[name] in listed for name, listed in self.ahead)

    def matching(self, wanted: Mapping[str, Value]) -> list[tuple[Value, ...]]:
        """The combinations that have these values. Raises SpecError if there is none."""
        every = self.combinations()
        found = [each for each in every if wanted.items() <= self._by_name(each).items()]
        if not found:
            raise SpecError(
                f"op {self.op} has no variant with {_join_values(wanted)}", why=self.in_words()
            )
        return found

    def find_values(self, found: Any) -> tuple[tuple[Value, ...], str]:
        """The chosen values in the order of the names, and why no variant has them; empty where one
        does. ``found`` is what the author's function gave. Raises SpecError for other than a dict
        with exactly these names."""
        names = [name for name, _ in self.chosen]
        if not isinstance(found, dict) or set(found) != set(names):
            raise SpecError(
                f"op {self.op}: the function of @{self.op}.variant returns {found!r}",
                why=f"it returns a dict with {', '.join(names)}, or None to run the reference",
            )
        for name, values in self.chosen:
            if found[name] not in values:
                listed = ", ".join(map(str, values))
                if self.by_dtype:
                    dtype = found[name] or "calls without such a tensor"
                    return (), f"it has kernels for {listed}, not {dtype}"
                return (), f"no variant has {name}={found[name]}; variants= lists {listed}"
        return tuple(found[name] for name in names), ""

    def suffix(self, values: Sequence[Value]) -> str:
        """What the names of a variant end with: ``HEAD_64_T_half``, or ``bfloat16``."""
        if self.by_dtype:
            return str(values[0])
        parts = self._by_name(values).items()
        return "_".join(f"{name}_{_text(each).replace('-', 'minus')}" for name, each in parts)

    def library(self, values: Sequence[Value]) -> str:
        """The name of a variant's builder and library: ``attn__HEAD_64_T_half``."""
        return f"{self.op}__{self.suffix(values)}"

    def flags(self, values: Sequence[Value]) -> tuple[str, ...]:
        """The macros of a variant, as every compiler takes them."""
        if self.by_dtype:
            return (f"-DOPKILN_DTYPE={values[0]}",)
        return tuple(
            f"-D{_LETTER if len(name) == 1 else ''}{name}={_text(value)}"
            for name, value in self._by_name(values).items()
        )

    def _by_name(self, values: Sequence[Value]) -> dict[str, Value]:
        return dict(zip(self.names, values, strict=True))

    def in_words(self) -> str:
        return "; ".join(f"{name} is {', '.join(map(_text, values))}" for name, values in self.all)


def _checked_dtypes(op: str, dtypes: Sequence[str]) -> tuple[str, ...]:
    alone = isinstance(dtypes, str)
    dtypes = texts(f"op {op}: dtypes=", dtypes)
    if alone or not set(dtypes) <= set(_DTYPES) or len(set(dtypes)) < len(dtypes):
        raise SpecError(
            f"op {op}: dtypes= is {dtypes!r}",
            why=f"it lists some of {', '.join(_DTYPES)}, each once",
        )
    return dtypes


def _check_values(
    op: str, argument: str, given: Mapping[str, Sequence[Value]]
) -> tuple[tuple[str, tuple[Value, ...]], ...]:
    if not hasattr(given, "items"):
        raise SpecError(f"op {op}: {argument}= is not a dict of names and values: {given!r}")
    for name, values in given.items():
        _check_name(op, argument, name)
        if isinstance(values, str) or not isinstance(values, (list, tuple)) or not values:
            raise SpecError(
                f"op {op}: {argument}= has {values!r} for {name}, not a list of values",
                hint=f'{argument}={{"{name}": (64, 128)}}',
            )
        for place, value in enumerate(values):
            _check_value(op, argument, name, value)
            if value in values[:place]:
                same = values[list(values).index(value)]
                raise SpecError(f"op {op}: {argument}= lists {name}={value!r} twice, as {same!r}")
    return tuple((name, tuple(values)) for name, values in given.items())


def _check_name(op: str, argument: str, name: object) -> None:
    good = isinstance(name, str) and name.isascii() and name.isidentifier()
    small = good and len(str(name)) == 1 and str(name).islower()  # variables of every header
    taken = name in CPP_KEYWORDS or name == "defined"
    if not good or small or taken or str(name).startswith(("_", "OPKILN_")):
        raise SpecError(
            f"op {op}: {argument}= has the name {name!r}",
            why="a name becomes a macro in the sources: a C identifier that is neither a word of "
            "C++ nor one small letter, and does not begin with _ or OPKILN_",
        )


def _check_value(op: str, argument: str, name: str, value: object) -> None:
    text = isinstance(value, str) and value.isascii() and value.isidentifier()
    if not text and not isinstance(value, int):  # a bool is an int
        raise SpecError(
            f"op {op}: {argument}= has the value {value!r} for {name}",
            why="a value is a whole number, True, False, or a C identifier such as 'float'",
        )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _join_values(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in values.items())
