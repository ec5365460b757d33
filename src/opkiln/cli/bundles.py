"""The sub-commands of ``opkiln cache`` that move entries to other machines, and sign them."""

from __future__ import annotations

import os
import re

import click

from opkiln.cli import output
from opkiln.cli.options import complete_op, entries_of, json_option, writable_root
from opkiln.errors import StoreError
from opkiln.report.layout import columns, count, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.store.inventory import Entry


def _digest(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise click.BadParameter(f"{text!r} is not a SHA-256 as sha256sum prints it")
    return text or ""


def chosen(ops: tuple[str, ...]) -> list[Entry]:
    """The newest entry of each op and target; of these ops, or of all. Raises StoreError."""
    from opkiln.store import inventory
    from opkiln.store.layers import Store

    wanted = {op: entries_of(op) for op in ops}
    found = [each for layer in Store().own for each in inventory.newest(layer.root)]
    missing = {op for op, its in wanted.items() if not any(map(its, found))}
    entries = [each for each in found if not ops or any(its(each) for its in wanted.values())]
    if missing or not entries:
        names = ", ".join(sorted(missing)) or "--all"
        raise StoreError(
            f"the store has no entry of {names}" if missing else "the store has no entries",
            hint=f"opkiln build {names.replace(',', '')}",
        )
    return entries


@click.command("export", short_help="Write entries to one file, a bundle.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--op", "ops", multiple=True, metavar="OP", shell_complete=complete_op,
    help="Only this op's entries. May be given several times.",
)  # fmt: skip
@json_option
def export(file: str, ops: tuple[str, ...], as_json: bool) -> None:
    """Write the newest entry of each op and target to FILE, for other machines.

    There, `opkiln cache import FILE` puts them into the store, or OPKILN_STORE_LAYERS=FILE reads
    them from the file. FILE contains no paths and no times of this machine.
    """
    from opkiln.bundles import layer
    from opkiln.bundles.bundle import write_bundle
    from opkiln.store import publish

    payloads = [each.payload for each in chosen(ops)]
    with publish.scratch("export") as stage:
        layer.export(payloads, stage)
        written = write_bundle(stage, file)
    output.answer(as_json, written._asdict(), f"{written.sha256}  {written.path}")
    if not as_json:
        output.say(f"{count(written.entries, 'entry', 'entries')}, {size(written.size)}")


@click.command("import", short_help="Import entries from a bundle.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--sha256", callback=_digest, metavar="DIGEST",
    help="Refuse FILE unless it has this digest.",
)  # fmt: skip
@json_option
def import_(file: str, sha256: str, as_json: bool) -> None:
    """Put the entries in FILE into the store, after every byte of it was checked.

    An entry is used if its sources are the installed ones and this machine can run its code, even
    if there is a compiler. A FILE that is damaged is refused, and nothing is imported. If
    OPKILN_TRUSTED_KEYS is set, so is a FILE that none of these keys has signed.
    """
    from opkiln.bundles.bundle import unpack

    taken = unpack(file, writable_root(), sha256=sha256)
    rows = [("op", "package", "status", "path")]
    for each in taken:
        status = "new" if each.new else "already there"
        rows.append((each.op, each.distribution, status, each.directory))
    output.answer(as_json, {"entries": taken}, columns(rows))


@click.command("keygen", short_help="Make a pair of keys to sign bundles with.")
@click.argument("file", type=click.Path(dir_okay=False))
@json_option
def keygen(file: str, as_json: bool) -> None:
    """Write a new private key to FILE, and its public key to FILE.pub.

    Prints the public key, which others put into OPKILN_TRUSTED_KEYS. Nothing is overwritten. FILE
    is a PEM file that OpenSSL can read. Keep it only where bundles are made.
    """
    from opkiln.bundles import signing

    made = signing.generate(file)
    output.answer(as_json, made._asdict(), made.key)
    if not as_json:
        output.say(f"wrote {made.private} and {made.public}")


@click.command("sign", short_help="Sign a bundle.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--key", "key_file", required=True, type=click.Path(dir_okay=False), metavar="KEY",
    help="The private key, as `opkiln cache keygen` makes it.",
)  # fmt: skip
@json_option
def sign(file: str, key_file: str, as_json: bool) -> None:
    """Sign FILE, a bundle, after every byte of it was checked, and print its new SHA-256.

    The signature becomes part of FILE. A file can be signed with several keys, one after the other;
    it is accepted if one of them is trusted.
    """
    from opkiln.bundles import signing

    done = signing.sign(file, key_file)
    output.answer(as_json, done._asdict(), f"{done.sha256}  {done.path}")
    if not as_json:
        output.say(f"signed by {', '.join(done.keys)}")


@click.command(
    "record", short_help="Record which ops a command loads.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)  # fmt: skip
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(file: str, command: tuple[str, ...]) -> int:
    """Run COMMAND and record in FILE which ops it loads, and for which devices.

    Every process that COMMAND starts adds to FILE, so several runs can share it. `opkiln build
    --recorded FILE` builds these ops. The exit code is that of COMMAND. If something else starts
    COMMAND, set OPKILN_RECORD=FILE instead.
    """
    from opkiln.loading.recording import read
    from opkiln.ship import prebuild

    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise click.UsageError("there is no command to run after --")
    status = prebuild.run_recorded(argv, file, **output.child_variables())
    noted = len(read(file)) if os.path.exists(file) else 0
    output.say(f"{file}: {count(noted, 'op')} recorded" if noted else "no op was loaded")
    return status if status >= 0 else 128 - status
