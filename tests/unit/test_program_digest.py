"""What ranks compare of functions in Python: all that they reach, and nothing of the host."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from typing import Any

import pytest
import torch
from sample import child

from opkiln.cluster.program import Programs

# Two modules. Each <name> is a 2, and a 3 in the program that differs there; or the first and the
# second of these.
WORDS = {"an operator": "+*", "a name": ["real", "imag"], "a function": ["scaled", "constant"]}
BESIDE = """
import os

def scaled(x):
    return _inner(x) * <in a module beside it>

def _inner(x):
    return x * <behind a function of another module>

def late(x):
    return x * <imported when it is called>

def later(x):
    return x * <called by a function within the one that imports it>

def unused(x):
    return x

VALUE = <a value of another module>
device = os.environ["RANK"]
"""
PROGRAM = """
import collections, enum, functools, logging, os, sys, threading
from dataclasses import dataclass, field
from typing import NamedTuple

import beside
from beside import scaled

__version__ = "1.0"
# These differ from rank to rank, and no function computes with them.
rank, device, shape = int(os.environ["RANK"]), os.environ["RANK"], [os.environ["RANK"]]
HERE = os.path.dirname(os.path.abspath(__file__))
logger = logging.getLogger("program")
logger.addHandler(logging.FileHandler(f"{HERE}/{rank}.log"))
lock = threading.Lock()
unused = os.getpid()

CONSTANT = <a constant of the module>
TABLE = [1, {"a": (<in a table>, None)}]
CHOICES = {"f": lambda x: x + <a function in a table>, "g": <beside a function in a table>}
WITHIN = <read by an inner function>
NAMES = {"one", "two", "three", <in a set>}
ARRAY = bytearray([<in an array>])
ORDERED = collections.OrderedDict(a=collections.deque([<in an ordered dictionary>]))

def passed(module):
    return getattr(module, "unused")

def constant(x):
    return x + 0.<a literal>

def nested(x):
    def inner(y, more=<a default of an inner function>):
        return [y + <in an inner function> + WITHIN for _ in range(3)]
    return inner(x)

def make(factor):
    def made(x):
        return x * factor
    return made

closure = make(<what it closes over>)

def defaults(x, factor=<a default>, *, more=<a default by keyword>):
    return x * factor + more

def wrap(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + <in a decorator>
    return wrapper

@wrap
def wrapped(x):
    return x * <behind a decorator>

@functools.lru_cache
def cached(x):
    return x * <behind a decorator of the standard library>

partly = functools.partial(lambda factor, x: x * factor, <an argument that is bound>)

class Base:
    def inherited(self, x):
        return x * <in a base class>

class Scale(Base):
    FACTOR = <an attribute of a class>

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.inherited(x) * self.factor * <in a method>

    @property
    def half(self):
        return <in a property>

    @staticmethod
    def fixed(x):
        return <in a static method>

scale = Scale(<an attribute of an object>)

@dataclass(slots=True)
class Options:
    eps: float = 0
    names: list = field(default_factory=list)

options = Options(<in a slot>)

class Pair(NamedTuple):
    one: int
    other: int

    def sum(self):
        return self.one + <in a method of a tuple>

pair = Pair(1, <in a tuple>)

class Kind(enum.Enum):
    ONE = <in an enumeration>

def recursive(x, depth=0):
    return x if depth > <in a recursion> else mutual(x, depth + 1)

def mutual(x, depth):
    return recursive(x, depth)

def lately(x):
    import beside as again
    from beside import late
    def inner(x):
        return again.later(x)
    return late(again.unused(inner(x))) + passed(beside)

def function(x):
    logger.debug("%s", x.device)
    with lock:
        try:
            x = <a function>(x.reshape(x.shape).<a name> <an operator> x)
        except ValueError:
            x = x + <in a handler>
    x = constant(x) + nested(x) + closure(x) + defaults(x) + wrapped(x) + cached(x) + partly(x)
    x = x + CONSTANT + TABLE[0] + CHOICES["f"](x) + len(NAMES) + beside.VALUE + len(ARRAY)
    x = x + scaled(x) + scale(x) + options.eps + pair.sum() + Kind.ONE.value + recursive(x)
    return lately(x) + ORDERED["a"][0] if os.path.exists(HERE) else 0
"""
PLACES = re.findall("<(.*?)>", BESIDE + PROGRAM)

# Prints the digest of the program, and of each that differs in one place.
READ = """
    import importlib, json, os, sys
    directory, *texts = sys.argv[1:]
    sys.path.insert(0, directory)
    sys.dont_write_bytecode = True
    from opkiln.cluster.program import Programs
    names, places, words = ("beside", "program"), *map(json.loads, texts[2:])
    read = {}
    for place in ["", *places]:
        for name, text in zip(names, texts):
            sys.modules.pop(name, None)
            for each in places:
                text = text.replace(f"<{each}>", words.get(each, "23")[each == place])
            with open(f"{directory}/{name}.py", "w") as file:
                file.write(text)
        importlib.invalidate_caches()
        program = importlib.import_module("program")
        read[place] = Programs().parts("program", [("function", program.function)])
    print(json.dumps(read))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two hosts read of the same programs, in directories of different lengths."""
    started = []
    for rank, name in enumerate(("a", "installed elsewhere")):
        place = str(tmp_path_factory.mktemp(name))
        env = {"RANK": str(rank), "PYTHONHASHSEED": str(rank + 1)}
        texts = (BESIDE, PROGRAM, json.dumps(PLACES), json.dumps(WORDS))
        started.append(child.start(READ, place, *texts, env=env))
    ended = [child.finish(each) for each in started]
    assert [each.returncode for each in ended] == [0, 0], ended
    return [json.loads(each.stdout) for each in ended]


def test_a_program_has_the_same_digest_on_every_host(hosts: list[dict[str, Any]]) -> None:
    assert hosts[0] == hosts[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_program_that_differs_in_one_place_has_another_digest(
    place: str, hosts: list[dict[str, Any]]
) -> None:
    assert hosts[0][place] != hosts[0][""]


def test_the_part_that_differs_has_a_name(hosts: list[dict[str, Any]]) -> None:
    for place, name in (("a constant of the module", "program.CONSTANT"),
                        ("behind a function of another module", "beside._inner")):  # fmt: skip
        same, other = hosts[0][""], hosts[0][place]
        assert [one[0] for one, two in zip(same, other, strict=True) if one != two] == [name]


CATALOGUE = """
import json
from opkiln.cluster import facts
from opkiln.cluster.program import Programs
from opkiln.builder.registry import ALL_OPS, bundled_ops, libraries

programs, found = Programs(), {}
for name in bundled_ops():
    for _, builder in libraries(name, ALL_OPS[name]):
        op = builder().op()
        functions = facts.functions_of(op)
        found[op.spec.name] = facts.digest(facts.function_facts(op, functions, programs))
print(json.dumps(found))
"""


def test_the_catalogue_has_the_same_digests_in_every_process() -> None:
    # Not in this one: pytest rewrites assertions.
    started = [child.start(CATALOGUE, bare=False, forked=forked) for forked in (False, True)]
    one, other = (json.loads(child.finish(each).stdout) for each in started)
    assert one == other
    assert len(one) > 50


# What torch makes of functions and values


def read(text: str, **values: Any) -> Any:
    """The parts of ``function`` in a program of a package that states its version."""
    module: Any = types.ModuleType("with_torch")
    vars(module).update(__version__="1", torch=torch, partial=functools.partial, **values)
    sys.modules["with_torch"] = module
    try:
        exec(text, vars(module))
        return Programs().parts("with_torch", [("function", module.function)])
    finally:
        del sys.modules["with_torch"]


def body(text: str) -> str:
    return f"def function(x):\n    return {text}\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("torch.float16", "torch.bfloat16"),
        ("torch.ops.aten.gelu", "torch.ops.aten.silu"),
        ("torch.sin", "torch.cos"),
        ("torch.tensor([1.0, 2.0])", "torch.tensor([1.0, 3.0])"),
        ("torch.tensor(1).bfloat16()", "torch.tensor(2).bfloat16()"),
        ("torch.zeros(2)", "torch.zeros(1, 2)"),
        ("partial(torch.add, alpha=1)", "partial(torch.add, alpha=2)"),
    ],
)
def test_values_of_torch_count(one: str, other: str) -> None:
    first, same, second = (read(f"VALUE = {each}\n" + body("VALUE")) for each in (one, one, other))
    assert first == same != second


@pytest.mark.parametrize("wrapper", ["@torch.no_grad()", "@torch.vmap"])
def test_what_torch_wraps_counts(wrapper: str) -> None:
    texts = [f"{wrapper}\ndef inner(x):\n    return x + {n}\n" + body("inner(x)") for n in (1, 2)]
    assert read(texts[0]) == read(texts[0])
    assert read(texts[0]) != read(texts[1])


@pytest.mark.parametrize(
    ("base", "used"), [("torch.autograd.Function", "Made.apply"), ("torch.nn.Module", "Made()")]
)
def test_classes_that_torch_calls_count(base: str, used: str) -> None:
    one, same, other = (
        read(f"class Made({base}):\n    def forward(self, x):\n        return x * {n}\n"
             f"made = {used}\n" + body("made(x)"))
        for n in (1, 1, 2)
    )  # fmt: skip
    assert one == same != other


def test_a_device_and_a_tensor_on_one_count_by_their_kind() -> None:
    for one, other in (
        (torch.device("cuda:0"), torch.device("cuda:1")),
        (torch.empty(2, device="meta"), torch.empty(2, device="meta")),
    ):
        assert read(body("VALUE"), VALUE=one) == read(body("VALUE"), VALUE=other)


def test_a_package_that_states_its_version_counts_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = types.ModuleType("other_package")
    exec("def f(x): return x", vars(package))
    monkeypatch.setitem(sys.modules, "other_package", package)
    vars(package)["__version__"] = "1.0"
    before = read(body("f(x)"), f=package.f)
    exec("def f(x): return x + 1", vars(package))
    assert read(body("f(x)"), f=package.f) == before
    vars(package)["__version__"] = "1.1"
    assert read(body("f(x)"), f=package.f) != before
