"""One of two ranks, as a program: agrees on ops, of which rank 1 has others, and says what came of
each.

Its one argument is JSON: ``store``, and ``modules``, which declare the ops. Then come the fields of
a declaration, as ``spec.abi``: each has another value on rank 1. Nothing is compiled, since the
ranks want their references. At last the rank declares an op again.
"""

import copy
import importlib
import inspect
import json
import os
import sys

import torch

import opkiln
from opkiln import settings

options = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
said: dict = {}


def ensure(case: str, ops: list) -> None:
    try:
        opkiln.ensure(ops, store=options["store"], rank=rank, world_size=2, lease=20)
        said[case] = ""
    except opkiln.errors.ClusterError as error:
        said[case] = str(error)


def another(field: str, value: object) -> object:
    """Another value of a field, whatever it is."""
    if field == "functions":
        other, built = copy.copy(value), copy.copy(value.declared["built"])
        built.parts = {**built.parts, "reference": lambda *_: "other"}
        other.declared = {"built": built}
        return other
    if field == "root":  # the same sources, by another path
        os.symlink(str(value), f"{value}_other")
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, ("other.cpp", "") if field == "inline" else "other(int x) -> ()")
    return f"{value}_other" if isinstance(value, str) else lambda found: found


def declare_again(text: str) -> str:
    """Load a module that has this text now, and call its op; the error, if there is one."""
    module = sys.modules["again"]
    with open(module.__file__, "w") as file:
        file.write(text)
    importlib.reload(module)
    try:
        module.plain(torch.ones(2))
        return ""
    except opkiln.errors.LoadError as error:
        return str(error)


with settings.override(mode="reference"):
    for each in options["modules"]:
        ensure(each, importlib.import_module(each).OPS)
    op = importlib.import_module("same").Built().op()
    for part in ("", "spec", "registration"):
        record = getattr(op, part) if part else op
        for field, value in record._asdict().items():
            if field in ("spec", "registration"):
                continue
            changed = record._replace(**({field: another(field, value)} if rank == 1 else {}))
            ensure(f"{part}.{field}", [op._replace(**{part: changed}) if part else changed])
    again = importlib.import_module("again")
    ensure("again", [again.plain])
    text = inspect.getsource(again)
    said["declared again"] = declare_again(text)
    said["declared otherwise"] = declare_again(text.replace("grad * 2", "grad * 3"))
print(json.dumps(said), flush=True)
