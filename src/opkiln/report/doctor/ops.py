"""The ops: each can be imported, and the installed libraries can be used here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from opkiln.base.model import CARRIED, PACKAGE, SHARED
from opkiln.builder.registry import ALL_OPS, bundled_ops, declared_ops, distribution
from opkiln.decision import terms
from opkiln.decision.prebuilt import PREBUILT
from opkiln.errors import SpecError
from opkiln.report.commands import interpreter, pip_command
from opkiln.report.doctor.terms import Diagnosis, Facts, ask_child, join, passed, skipped, warned
from opkiln.settings import LAYOUT
from opkiln.store.inventory import list_names

# Runs in a child: an op's module is its author's code. It may import torch, or end the process.
_ASK_OP = """
from opkiln.decision.terms import Refuse, Request
from opkiln.errors import OpkilnError, SpecError
from opkiln.loading import loader
from opkiln.builder.registry import ALL_OPS
answer = ''
try:
    builder = ALL_OPS[sys.argv[1]]()
    try:
        builder.FUNCTIONS.import_module()
    except ModuleNotFoundError as error:
        if (error.name or '').partition('.')[0] == builder.distribution:
            raise  # not torch or another package, which may well be missing here
    for each in builder.variants() or (type(builder),):
        outcome = loader.look(Request(each().op()))
        if isinstance(outcome, Refuse) and isinstance(outcome.error, SpecError):
            raise outcome.error  # such as sources that are not there
except OpkilnError as error:
    answer = '; '.join([error.what, *error.why.splitlines()])
"""


def ops(_: Facts) -> Diagnosis:
    """Every op can be imported, fits its schema, and has a library or sources."""
    own = bundled_ops()
    broken: dict[str, str] = {}
    for name in own:
        try:
            ALL_OPS[name]
        except (ImportError, SpecError) as error:
            broken[name] = str(error)
    others = declared_ops()
    for name in others:
        found, died = ask_child(_ASK_OP, name)
        if reason := died or found:
            broken[name] = reason if f"op {name}" in reason else f"op {name}: {reason}"
    if broken:
        imports = dict.fromkeys(others[name].module for name in broken if name in others)
        commands = [f"{interpreter()} -c {shlex.quote(f'import {each}')}" for each in imports]
        return warned(join(*broken.values()), "; ".join(commands))
    owners = {**dict.fromkeys(own, "opkiln"), **{n: distribution(e) for n, e in others.items()}}
    shared = [
        f"{entry.name} is the op of {owners[entry.name]}; that of {distribution(entry)} is {name}"
        for name, entry in others.items()
        if name != entry.name
    ]
    counted = f"{len(others)} of other packages" if others else ""
    bundled_here = f"{len(own)} bundled: {', '.join(own)}" if own else "none is bundled"
    return passed(join(bundled_here, counted, *shared))


# Prebuilt libraries

# Runs in a child: a declaration is its author's code, and checking a library opens others.
_ASK_DECISION = """
from opkiln.builder.registry import ALL_OPS
from opkiln.report import operators
kind = ALL_OPS[sys.argv[1]]
answer = operators.backend_status(kind, kind().backend)._asdict()
"""


def prebuilt(_: Facts) -> Diagnosis:
    """The installed libraries are used: none is stale, damaged or for another machine."""
    found = dict(_installed_ops())
    if not found:
        return passed("no package was installed with prebuilt ops")
    if not terms.uses_installed():
        return skipped(f"OPKILN_MODE=source: {', '.join(found)} is installed but not used")
    serving, instead, refused, commands = [], [], [], []
    for op, brought_by in found.items():
        answer, died = ask_child(_ASK_DECISION, op)
        if died:
            continue  # the check `ops` reports that
        mine = [each[1:3] for each in answer["candidates"] if each[0] == PREBUILT]
        reasons = "; ".join(dict.fromkeys(reason for verdict, reason in mine if verdict != "taken"))
        if answer["installed"]:
            serving.append(op)
        elif reasons and answer["cached"]:
            instead.append(f"{op} is refused, and a cached build is used: {reasons}")
        elif reasons:
            refused.append(f"{op} is refused: {reasons}")
            damaged = "damaged: " in reasons
            again = pip_command("install", "--force-reinstall", "--no-deps", brought_by)
            commands.append(again if damaged else f"opkiln build {op}")
    facts = join(f"used: {', '.join(serving)}" if serving else "", *instead)
    if refused:
        return warned(join(*refused, facts), " && ".join(dict.fromkeys(commands)))
    return passed(facts or f"{', '.join(found)}: none is for the backend that serves here")


def _installed_ops() -> Iterator[tuple[str, str]]:
    """(op, the distribution that has a library of it), for each declared op.

    Looks where ``decision.decide`` looks. No package is imported.
    """
    shared = [os.path.join(each, SHARED) for each in sys.path if os.path.isabs(each)]
    layers = [(name, os.path.join(each, name)) for each in shared for name in list_names(each)]
    for name, owner, package in _declared_packages():
        op = name.rpartition(":")[2]
        told: set[str] = set()
        for brought_by, layer in [(owner, os.path.join(package, CARRIED)), *layers]:
            ops = os.path.join(layer, LAYOUT, "ops")
            libraries = {found for each in list_names(ops) for found in list_names(f"{ops}/{each}")}
            for found in sorted(libraries - told):
                if found == op or found.startswith(f"{op}__"):  # one of its variants
                    told.add(found)
                    yield f"{name.removesuffix(op)}{found}", brought_by


def _declared_packages() -> Iterator[tuple[str, str, str]]:
    """(the op's name in ALL_OPS, its distribution, the directory of its package) of every op."""
    yield from ((op, "opkiln", PACKAGE) for op in bundled_ops())
    for name, entry in declared_ops().items():
        top = entry.module.partition(".")[0]
        found = PathFinder.find_spec(top)
        if found and found.submodule_search_locations:
            yield name, distribution(entry) or top, next(iter(found.submodule_search_locations))
