"""``opkiln cache export``, ``import``, ``keygen``, ``sign``: entries as one file, and back."""

from __future__ import annotations

import re

import click

from opkiln.cli import output
from opkiln.cli.op_name import Stored, complete
from opkiln.errors import StoreError
from opkiln.report.layout import columns, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.store.inventory import Entry

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _digest(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise click.BadParameter(f"{text!r} is no SHA-256 as sha256sum prints it")
    return text or ""


@click.command("export", short_help="Write entries to one file.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--op", "ops", multiple=True, metavar="OP", shell_complete=complete,
    help="Only this op's entries. May be given several times.",
)  # fmt: skip
@_JSON
def export(file: str, ops: tuple[str, ...], as_json: bool) -> None:
    """Write the newest entry of each op and target to FILE, for other machines.

    There `opkiln cache import FILE` takes them into the store, or OPKILN_STORE_LAYERS=FILE reads
    them where they are. FILE holds nothing of this machine: no paths, no times.
    """
    from opkiln.ship import layer
    from opkiln.ship.bundle import write_bundle
    from opkiln.store import publish
    from opkiln.store.layers import Store

    roots = [each.root for each in Store().location.layers if not each.listed]
    chosen = {op: Stored(op) for op in ops}
    found = [each for root in roots for each in _newest(root)]
    missing = {op for op, its in chosen.items() if not any(map(its, found))}
    payloads = [
        each.payload for each in found if not ops or any(its(each) for its in chosen.values())
    ]
    if missing or not payloads:
        names = ", ".join(sorted(missing)) or "--all"
        raise StoreError(
            f"the store has no entry of {names}" if missing else "the store has no entries",
            hint=f"opkiln build {names.replace(',', '')}",
        )
    with publish.scratch("export") as stage:
        layer.export(payloads, stage)
        written = write_bundle(stage, file)
    if as_json:
        output.data_json({"schema": 1, **written._asdict()})
    else:
        output.data(f"{written.sha256}  {written.path}")
        noun = "entry" if written.entries == 1 else "entries"
        output.say(f"{written.entries} {noun}, {size(written.size)}")


def _newest(root: str) -> Iterator[Entry]:
    """The newest entry for each op and intent, unless it is damaged."""
    from opkiln.store import inventory

    newest: dict[tuple[str, ...], Entry] = {}
    for found in inventory.entries(root):
        if found.kind != inventory.OP or not found.payload:
            continue
        intent = tuple(found.directory.split("/")[-5:-2])
        if intent not in newest or newest[intent].published < found.published:
            newest[intent] = found
    for found in newest.values():
        if not inventory.details(found).damaged:
            yield found


@click.command("import", short_help="Take entries from such a file.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--sha256", callback=_digest, metavar="DIGEST",
    help="Refuse FILE unless it has this digest, from whoever gave it to you.",
)  # fmt: skip
@_JSON
def import_(file: str, sha256: str, as_json: bool) -> None:
    """Take the entries in FILE into the store, after every byte of it was checked.

    They serve where their sources are the installed ones and this machine runs their code, also
    beside a compiler. A FILE that is not as it was written is refused, and nothing is taken; so is
    one that is not signed by a key in OPKILN_TRUSTED_KEYS, where that is set.
    """
    from opkiln.cli.cache import writable_root
    from opkiln.ship.bundle import unpack

    taken = unpack(file, writable_root(), sha256=sha256)
    if as_json:
        output.data_json({"schema": 1, "entries": [each._asdict() for each in taken]})
        return
    rows = [("op", "package", "status", "path")]
    rows += [
        (each.op, each.distribution, "new" if each.new else "there already", each.directory)
        for each in taken
    ]
    output.data(columns(rows))


@click.command("keygen", short_help="Make a pair of keys to sign bundles with.")
@click.argument("file", type=click.Path(dir_okay=False))
@_JSON
def keygen(file: str, as_json: bool) -> None:
    """Make a private key in FILE, for you alone, and the public one in FILE.pub, for everybody.

    Prints the public one: what others put into OPKILN_TRUSTED_KEYS. Nothing is overwritten. FILE is
    a PEM file that OpenSSL reads, too; keep it where bundles are made, and nowhere else.
    """
    from opkiln.ship import signing

    made = signing.generate(file)
    if as_json:
        output.data_json({"schema": 1, **made._asdict()})
    else:
        output.data(made.key)
        output.say(f"wrote {made.private} and {made.public}")


@click.command("sign", short_help="Sign such a file.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--key", "key_file", required=True, type=click.Path(dir_okay=False), metavar="KEY",
    help="The private key, as `opkiln cache keygen` makes it.",
)  # fmt: skip
@_JSON
def sign(file: str, key_file: str, as_json: bool) -> None:
    """Sign FILE, a bundle, after every byte of it was checked, and print its new SHA-256.

    The signature is put into FILE. A file can be signed with several keys, one after the other; it
    is taken where one of them is trusted.
    """
    from opkiln.ship import signing

    done = signing.sign(file, key_file)
    if as_json:
        output.data_json({"schema": 1, **done._asdict()})
    else:
        output.data(f"{done.sha256}  {done.path}")
        output.say(f"signed by {', '.join(done.keys)}")
