"""``opkiln cache``: shows the store, checks it, and makes it smaller."""

from __future__ import annotations

import os
import time

import click

from opkiln.cli import bundles, output, remote
from opkiln.cli.arguments import (
    EntriesOf,
    complete_op,
    json_option,
    package_option,
    parse_size_option,
    target_option,
    writable_root,
)
from opkiln.errors import LoadError, StoreError
from opkiln.report.layout import age, columns, size
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.inventory import Fault


def _entries(number: int) -> str:
    return f"{number} entry" if number == 1 else f"{number} entries"


class _Progress:
    """Prints the progress of a command: a store may have a hundred thousand entries."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __call__(self, done: str) -> None:
        number = self._counts[done] = self._counts.get(done, 0) + 1
        if number % 5_000 == 0:
            output.say(f"{number} entries {done}")


@click.group("cache")
def command() -> None:
    """Show the store, check it, make it smaller, and move entries to other machines.

    Everything in the store can be rebuilt, and may be removed while other processes use it.
    """


for _each in (
    bundles.export, bundles.import_, bundles.keygen, bundles.sign, bundles.record, remote.push,
    remote.pull,
):  # fmt: skip
    command.add_command(_each)


@command.command("path")
def path() -> None:
    """Print the store's directory."""
    output.data(os.path.dirname(writable_root()))


@command.command("key", short_help="Print the key under which CI can keep the store.")
@click.argument("ops", nargs=-1, shell_complete=complete_op)
@package_option
@target_option(multiple=True)
@json_option
def key(ops: tuple[str, ...], package: str | None, target: tuple[str, ...], as_json: bool) -> None:
    """Print the key under which a CI service can keep the store with OPS from one run to the next.

    It changes with what their builds depend on: sources, headers beside them, flags, compilers, the
    target, opkiln. Nothing is built. All keys begin with the same prefix, by which a service finds
    the newest store where it has none for the key.
    """
    from opkiln.cli.build import requests, wanted_targets
    from opkiln.ship.cache_key import PREFIX, cache_key

    if bool(ops) == (package is not None):
        raise click.UsageError("give names of ops, or --package")
    asked = requests(ops, False, package, wanted_targets(target))
    for each in asked.refused:
        if each.error is not None:
            raise each.error
    found = cache_key(asked.requests)
    if as_json:
        where = os.path.dirname(writable_root())
        output.data_json({"schema": 1, "key": found, "prefix": PREFIX, "path": where})
    else:
        output.data(found)


@command.command("list", short_help="List the entries.")
@click.option("--objects", is_flag=True, help="Also list the compiled objects.")
@json_option
def list_(objects: bool, as_json: bool) -> None:
    """List the entries: op, package, target CPU, compiler, size, time since the last use, path."""
    from opkiln.store import inventory

    found = [(each, inventory.details(each)) for each in inventory.entries(writable_root())]
    found = [pair for pair in found if objects or pair[0].kind == inventory.OP]
    if as_json:
        rows = [
            {**each._asdict(), "for": more.made_for, "compiler": more.compiler,
             "source": more.source, "damaged": more.damaged}
            for each, more in found
        ]  # fmt: skip
        output.data_json({"schema": 1, "entries": rows})
        return
    now = time.time()
    table = [("op", "package", "for", "compiler", "size", "used", "path")]
    for each, more in found:
        name = each.name if each.kind == inventory.OP else f"object of {more.source or each.name}"
        table.append(
            (name, each.distribution or "-", more.made_for or "-",
             more.compiler or ("damaged" if more.damaged else "-"),
             size(each.size), age(now - each.used), each.directory)
        )  # fmt: skip
    output.data(columns(table))


@command.command("size")
@json_option
def size_(as_json: bool) -> None:
    """Print the size of the store."""
    from opkiln.store import inventory

    found = inventory.sizes(writable_root())
    if as_json:
        output.data_json({"schema": 1, **found._asdict(), "total_bytes": found.total})
        return
    rows = [
        ("ops", str(found.ops), size(found.op_bytes)),
        ("objects", str(found.objects), size(found.object_bytes)),
        ("other", "", size(found.other_bytes)),
        ("total", "", size(found.total)),
    ]
    output.data(columns(rows))


@command.command("verify", short_help="Re-hash every entry; exit with 5 if one is damaged.")
@click.argument(
    "files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False)
)
@click.option("--remove", is_flag=True, help="Remove the damaged entries of the writable store.")
@json_option
def verify(files: tuple[str, ...], remove: bool, as_json: bool) -> int:
    """Re-hash every entry of every layer; exit with 5 if one is damaged.

    A damaged entry is never loaded, and the next build of its op replaces it. An entry that is
    refused because of its owner or mode is not used either, but other users may use it.

    With FILEs (wheels or bundles), these are checked instead of the store.
    """
    if files and remove:
        raise click.UsageError("--remove is for the store, not for files")
    total, faults, removed = _check_files(files) if files else _check_store(remove)
    damaged = [fault for fault in faults if fault.damaged]
    if as_json:
        rows = [{**fault._asdict(), "removed": fault.directory in removed} for fault in faults]
        output.data_json({"schema": 1, "entries": total, "faults": rows})
    else:
        for fault in faults:
            word = "removed" if fault.directory in removed else "refused"
            word = "damaged" if fault.damaged and word == "refused" else word
            output.data(f"{word}  {fault.directory}: {fault.reason}")
        output.data(f"{_entries(total)} checked, {len(damaged)} damaged")
        if len(damaged) > len(removed) and not files:
            output.say("hint: opkiln cache verify --remove")
    return StoreError.exit_code if damaged or (files and faults) else 0


def _check_store(remove: bool) -> tuple[int, list[Fault], list[str]]:
    """(entries, what is wrong, what was removed)."""
    from opkiln.observing import observer
    from opkiln.store import gc, inventory
    from opkiln.store.layers import Store

    store = Store()
    total = 0
    faults: list[Fault] = []
    removed: list[str] = []
    progress = _Progress()
    for layer in store.location.layers:
        if layer.bundle:
            found_in, fault = _check_bundle(layer.root)
            total += found_in
            faults += [fault] if fault else []
            continue
        for path in observer.damaged(os.path.join(layer.root, "toolchains")):
            faults.append(inventory.Fault(path, "the observer has another digest", damaged=True))
            if remove and layer.root == store.root:
                os.unlink(path)
                removed.append(path)
        for found, fault in inventory.verify(layer.root, listed=layer.listed):
            total += 1
            progress("checked")
            if fault is None:
                continue
            faults.append(fault)
            if remove and fault.damaged and layer.root == store.root:
                gc.discard(layer.root, found)
                removed.append(fault.directory)
    return total, faults, removed


def _check_files(files: tuple[str, ...]) -> tuple[int, list[Fault], list[str]]:
    """(entries, what is wrong, an empty list: files are not removed)."""
    total, faults = 0, []
    for path in files:
        found_in, fault = (_check_wheel if path.endswith(".whl") else _check_bundle)(path)
        total += found_in
        faults += [fault] if fault else []
    return total, faults, []


def _check_wheel(path: str) -> tuple[int, Fault | None]:
    """(entries in a wheel, what is wrong with it)."""
    from opkiln.ship.wheel_check import verify_wheel
    from opkiln.store.inventory import Fault

    try:
        return verify_wheel(path), None
    except LoadError as error:
        return 0, Fault(path, error.what.removeprefix(f"{path} is refused: "), True)


def _check_bundle(path: str) -> tuple[int, Fault | None]:
    """(entries in a bundle, what is wrong with it)."""
    from opkiln.bundles.bundle import read_bundle
    from opkiln.store.inventory import Fault
    from opkiln.store.signatures import Untrusted

    try:
        return len(read_bundle(path)), None
    except Untrusted as error:
        return 0, Fault(path, error.what.removeprefix(f"{path} is refused: "), False)
    except StoreError as error:
        return 0, Fault(path, error.what.removeprefix(f"{path} is "), True)


@command.command("gc", short_help="Remove old entries and leftovers.")
@click.option(
    "--max-size", callback=parse_size_option, metavar="SIZE",
    help="Shrink to SIZE, such as 512M or 4G, instead of OPKILN_CACHE_MAX_SIZE.",
)  # fmt: skip
@click.option("--now", is_flag=True, help="Also remove entries that were used within the last day.")
@json_option
def gc_(max_size: int | None, now: bool, as_json: bool) -> None:
    """Remove the entries that have not been used for the longest time, and leftovers of dead
    processes.

    An entry that a process on this host has loaded is never removed. One that was used within the
    last day is kept, too: another host may have it loaded. The last use is the time when the entry
    was published or, if the file system records that, last read.
    """
    from opkiln.store import gc

    limit = settings.cache_max_size if max_size is None else max_size
    done = gc.collect(writable_root(), limit, now=now, tell=_Progress())
    if as_json:
        removed = [each._asdict() for each in done.removed]
        output.data_json({"schema": 1, **done._asdict(), "removed": removed, "freed": done.freed})
        return
    for each in done.removed:
        output.data(f"removed  {each.directory} ({each.kind} {each.name}, {size(each.size)})")
    for leftover in done.swept:
        output.data(f"swept  {leftover}")
    output.data(
        f"{_entries(len(done.removed))} removed, {size(done.freed)} freed, "
        f"{size(done.after)} of at most {size(limit)} left"
    )
    if done.after > limit:
        output.say(f"kept: {done.in_use} loaded by processes here, {done.recent} used within a day")
        if done.recent:
            output.say("hint: opkiln cache gc --now")


@command.command("clear")
@click.option("--op", metavar="OP", shell_complete=complete_op, help="Only this op's entries.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(op: str | None, yes: bool, as_json: bool) -> None:
    """Remove all entries, or those of one op. Processes that have loaded them can go on."""
    from opkiln.store import gc

    root = writable_root()
    if not yes:
        what = "everything" if op is None else f"op {op}"
        click.confirm(f"Remove {what} from {os.path.dirname(root)}?", abort=True, err=True)
    removed = gc.clear(root, EntriesOf(op) if op is not None else None)
    freed = sum(each.size for each in removed)
    if as_json:
        rows = [each._asdict() for each in removed]
        output.data_json({"schema": 1, "removed": rows, "freed": freed})
    else:
        output.data(f"{_entries(len(removed))} removed, {size(freed)} freed")
