"""``opkiln cache``: shows the store, checks it, and makes it smaller. And ``opkiln tuned``."""

from __future__ import annotations

import os
import time
from collections import Counter

import click

from opkiln.cli import carry, options, output
from opkiln.errors import LoadError, StoreError
from opkiln.report.layout import age, columns, count, fields, size
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.store.inventory import Fault
    from opkiln.store.tuned import TunedChoice


def _count_entries(number: int) -> str:
    return count(number, "entry", "entries")


def _progress() -> Callable[[str], None]:
    """A function that prints the progress of a command, one line per 5,000 entries."""
    counts: Counter[str] = Counter()

    def tell(done: str) -> None:
        counts[done] += 1
        if counts[done] % 5_000 == 0:
            output.say(f"{counts[done]} entries {done}")

    return tell


@click.group("cache")
def command() -> None:
    """Show the store, check it, make it smaller, and move entries to other machines.

    Everything in the store can be rebuilt, and may be removed while other processes use it.
    """


for _each in (
    carry.export, carry.import_, carry.keygen, carry.sign, carry.record, carry.push, carry.pull,
):  # fmt: skip
    command.add_command(_each)


@command.command("path")
def path() -> None:
    """Print the store's directory."""
    output.data(os.path.dirname(options.writable_root()))


@command.command("key", short_help="Print the key under which CI can keep the store.")
@options.ops_argument
@options.package_option
@options.target_option(multiple=True)
@options.json_option
def key(ops: tuple[str, ...], package: str | None, target: tuple[str, ...], as_json: bool) -> None:
    """Print the key under which a CI service can keep the store with OPS from one run to the next.

    It changes with what their builds depend on: sources, headers beside them, flags, compilers, the
    target, opkiln. Nothing is built. All keys begin with the same prefix, by which a service finds
    the newest store where it has none for the key.
    """
    from opkiln.cli.build import requests, wanted_targets
    from opkiln.ship.prebuild import KEY_PREFIX, cache_key

    if bool(ops) == (package is not None):
        raise click.UsageError("give names of ops, or --package")
    asked = requests(ops, False, package, wanted_targets(target))
    for each in asked.refused:
        if each.error is not None:
            raise each.error
    found = cache_key(asked.requests)
    where = os.path.dirname(options.writable_root()) if as_json else ""
    output.answer(as_json, {"key": found, "prefix": KEY_PREFIX, "path": where}, found)


@command.command("list", short_help="List the entries.")
@click.option("--objects", is_flag=True, help="Also list the compiled objects.")
@options.json_option
def list_(objects: bool, as_json: bool) -> None:
    """List the entries: op, package, target CPU, compiler, size, time since the last use, path.

    What other programs built is listed by program and module, with the directory of the newest.
    """
    from opkiln.store import inventory

    document, now = [], time.time()
    table = [("op", "package", "for", "compiler", "size", "used", "path")]
    for each in inventory.entries(options.writable_root()):
        if each.kind != inventory.OP and not objects:
            continue
        more = inventory.details(each)
        document.append(
            {**each._asdict(), "for": more.made_for,
             **fields(more, "compiler source damaged host group rebuilt")}
        )  # fmt: skip
        name = each.name if each.kind == inventory.OP else f"object of {more.source or each.name}"
        table.append(
            (name, each.distribution or " ".join((more.host, more.group)).strip() or "-",
             more.made_for or "-",
             more.compiler or ("damaged" if more.damaged else "-"),
             size(each.size), age(now - each.used), each.directory)
        )  # fmt: skip
    modules = inventory.host_modules(inventory.entries(options.writable_root()))
    for module in () if objects else modules:
        name = f"{count(module.entries, 'object')} of {module.group or module.newest}"
        where = module.directory or "-"
        table.append(
            (name, module.host, "-", "-", size(module.size), age(now - module.used), where)
        )
    hosts = [module._asdict() for module in modules]
    output.answer(as_json, {"entries": document, "hosts": hosts}, columns(table))


@command.command("size")
@options.json_option
def size_(as_json: bool) -> None:
    """Print the size of the store."""
    from opkiln.store import inventory

    found = inventory.sizes(options.writable_root())
    rows = [
        ("ops", str(found.ops), size(found.op_bytes)),
        ("objects", str(found.objects), size(found.object_bytes)),
        ("other", "", size(found.other_bytes)),
        ("total", "", size(found.total)),
    ]
    document = {**found._asdict(), "total_bytes": found.total}
    output.answer(as_json, document, columns(rows))


@command.command("verify", short_help="Re-hash every entry; exit with 5 if one is damaged.")
@click.argument(
    "files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False)
)
@click.option("--remove", is_flag=True, help="Remove the damaged entries of the writable store.")
@options.json_option
def verify(files: tuple[str, ...], remove: bool, as_json: bool) -> int:
    """Re-hash every entry of every layer; exit with 5 if one is damaged.

    A damaged entry is never loaded, and the next build of its op replaces it. An entry that is
    refused because of its owner or mode is not used either, but other users may use it.

    With FILEs (wheels or bundles), these are checked instead of the store.
    """
    if files and remove:
        raise click.UsageError("--remove is for the store, not for files")
    total, lines = 0, []
    faults: list[Fault] = []
    for number, fault in map(_check_file, files) if files else _check_store(remove):
        total += number
        if fault:
            faults.append(fault)
            word = "removed" if fault.removed else "damaged" if fault.damaged else "refused"
            lines.append(f"{word}  {fault.directory}: {fault.reason}")
    damaged = [fault for fault in faults if fault.damaged]
    lines.append(f"{_count_entries(total)} checked, {len(damaged)} damaged")
    left = not files and not all(fault.removed for fault in damaged)
    hint = "hint: opkiln cache verify --remove" if left else ""
    output.answer(as_json, {"entries": total, "faults": faults}, "\n".join(lines), hint)
    return StoreError.exit_code if damaged or (files and faults) else 0


def _check_store(remove: bool) -> Iterator[tuple[int, Fault | None]]:
    """(the number of entries, the fault or None), for each entry, bundle and observer."""
    from opkiln.building.observing import observer
    from opkiln.store import gc, inventory
    from opkiln.store.layers import Store

    store, progress = Store(), _progress()
    for layer in store.location.layers:
        if layer.bundle:
            yield _check_file(layer.root, bundle=True)
            continue
        own = remove and layer.root == store.root
        for path in observer.find_damaged(os.path.join(layer.root, "toolchains")):
            if own:
                os.unlink(path)
            yield 0, inventory.Fault(path, "the observer has another digest", True, own)
        for found, wrong in inventory.verify(layer.root, listed=layer.listed):
            progress("checked")
            removed = wrong is not None and wrong.damaged and own
            if removed:
                gc.discard(layer.root, found)
            yield 1, wrong and wrong._replace(removed=removed)


def _check_file(path: str, *, bundle: bool = False) -> tuple[int, Fault | None]:
    """(the number of entries, the fault or None) of a wheel or a bundle. It is never removed."""
    from opkiln.ship.wheel_check import verify_wheel
    from opkiln.store.bundle import read_bundle
    from opkiln.store.inventory import Fault
    from opkiln.store.signatures import Untrusted

    try:
        if path.endswith(".whl") and not bundle:
            return verify_wheel(path), None
        return len(read_bundle(path)), None
    except (LoadError, Untrusted) as error:
        reason = error.what.removeprefix(f"{path} is refused: ")
        return 0, Fault(path, reason, isinstance(error, LoadError))
    except StoreError as error:
        return 0, Fault(path, error.what.removeprefix(f"{path} is "), True)


@command.command("gc", short_help="Remove old entries and leftovers.")
@click.option(
    "--max-size", callback=options.parse_size_option, metavar="SIZE",
    help="Shrink to SIZE, such as 512M or 4G, instead of OPKILN_CACHE_MAX_SIZE.",
)  # fmt: skip
@click.option("--now", is_flag=True, help="Also remove entries that were used within the last day.")
@options.json_option
def gc_(max_size: int | None, now: bool, as_json: bool) -> None:
    """Remove the entries that have not been used for the longest time, and leftovers of dead
    processes.

    An entry that a process on this host has loaded is never removed. One that was used within the
    last day is kept, too: another host may have it loaded. The last use is the time when the entry
    was published or, if the file system records that, last read.
    """
    from opkiln.store import gc

    limit = settings.cache_max_size if max_size is None else max_size
    done = gc.collect(options.writable_root(), limit, now=now, tell=_progress())
    if as_json:
        output.data_json({**done._asdict(), "freed": done.freed})
        return
    for each in done.removed:  # line by line: they may be very many
        output.data(f"removed  {each.directory} ({each.kind} {each.name}, {size(each.size)})")
    for leftover in done.swept:
        output.data(f"swept  {leftover}")
    gone = f"{_count_entries(len(done.removed))} removed, {size(done.freed)} freed"
    output.data(f"{gone}, {size(done.after)} of at most {size(limit)} left")
    if done.after > limit:
        output.say(f"kept: {done.in_use} loaded by processes here, {done.recent} used within a day")
        if done.recent:
            output.say("hint: opkiln cache gc --now")


@command.command("clear")
@click.option(
    "--op", metavar="OP", shell_complete=options.complete_op, help="Only this op's entries."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@options.json_option
def clear(op: str | None, yes: bool, as_json: bool) -> None:
    """Remove all entries, or those of one op. Processes that have loaded them can go on."""
    from opkiln.store import gc

    root = options.writable_root()
    if not yes:
        what = "everything" if op is None else f"op {op}"
        click.confirm(f"Remove {what} from {os.path.dirname(root)}?", abort=True, err=True)
    removed = gc.clear(root, options.match_entries(op) if op is not None else None)
    freed = sum(each.size for each in removed)
    text = f"{_count_entries(len(removed))} removed, {size(freed)} freed"
    output.answer(as_json, {"removed": removed, "freed": freed}, text)


# `opkiln tuned`: the choices that ops with `tune=` made by measuring


@click.group("tuned", short_help="Show and forget what ops measured for themselves.")
def tuned_command() -> None:
    """Show what ops with tune= measured, and forget it.

    A choice is for one op, one device model and one class of shapes. It is measured at the first
    such call and kept in the store. opkiln.ensure gives the choices of rank 0 to all ranks.
    """


@tuned_command.command("list")
@click.argument("ops", nargs=-1)
@options.json_option
def list_tuned(ops: tuple[str, ...], as_json: bool) -> None:
    """List the choices of OPS, or all: op, device, shapes, choice, and what was measured."""
    found = _choices(ops)
    if not found and not as_json:
        output.say("nothing was measured yet")
        return
    document, rows = [], [("op", "device", "for", "choice", "measured")]
    for asked, choice, times in found:
        document.append({**asked._asdict(), "choice": choice, "microseconds": times})
        measured = ", ".join(f"{name}: {value:g} us" for name, value in times.items())
        for_ = f"{asked.values} {asked.shape}".strip()
        rows.append((f"{asked.distribution}:{asked.op}", asked.device, for_, choice, measured))
    output.answer(as_json, {"tuned": document}, columns(rows))


@tuned_command.command("clear")
@click.argument("ops", nargs=-1)
def clear_tuned(ops: tuple[str, ...]) -> None:
    """Forget the choices of OPS, or all: the next call measures again."""
    from opkiln.store import tuned

    found = _choices(ops)
    root = options.writable_root()
    for each in found:
        try:
            tuned.remove(root, each)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            raise StoreError(f"{root} cannot be written", why=str(error)) from error
    output.say(f"forgot {count(len(found), 'choice')}")


def _choices(ops: tuple[str, ...]) -> list[TunedChoice]:
    """The choices of the ops, or all, sorted. An op is OP, or DISTRIBUTION:OP."""
    from opkiln.store import tuned

    root = options.writable_root()
    found = list(tuned.read_choices(root)) if os.path.isdir(root) else []
    if ops:
        names = ((each, each.question.op, each.question.distribution) for each in found)
        found = [each for each, op, owner in names if op in ops or f"{owner}:{op}" in ops]
    return sorted(found)
