"""Commands that carry ops to other machines: bundles, remote tiers, lock files, records of use."""

from __future__ import annotations

import os
import re
import sys
import time

import click

from opkiln.base import forks
from opkiln.cli import options, output
from opkiln.errors import StoreError, UsageError
from opkiln.report.layout import columns, count, fields, size
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.remote.fetch import PullResult
    from opkiln.remote.lockfile import LockRow
    from opkiln.store.inventory import StoreEntry


def _parse_digest(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise click.BadParameter(f"{text!r} is not a SHA-256 as sha256sum prints it")
    return text or ""


def newest_entries(ops: tuple[str, ...]) -> list[StoreEntry]:
    """The newest entry of each op and target; of these ops, or of all. Raises StoreError."""
    from opkiln.store import inventory
    from opkiln.store.layers import Store

    wanted = {op: options.match_entries(op) for op in ops}
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
@options.file_argument
@click.option(
    "--op", "ops", multiple=True, metavar="OP", shell_complete=options.complete_op,
    help="Only this op's entries. May be given several times.",
)  # fmt: skip
@options.json_option
def export(file: str, ops: tuple[str, ...], as_json: bool) -> None:
    """Write the newest entry of each op and target to FILE, for other machines.

    There, `opkiln cache import FILE` puts them into the store, or OPKILN_STORE_LAYERS=FILE reads
    them from the file. FILE contains no paths and no times of this machine.
    """
    from opkiln.store import layer, publish
    from opkiln.store.bundle import write_bundle

    payloads = [each.payload for each in newest_entries(ops)]
    with publish.scratch("export") as stage:
        layer.export(payloads, stage)
        written = write_bundle(stage, file)
    note = f"{count(written.entries, 'entry', 'entries')}, {size(written.size)}"
    output.answer(as_json, written._asdict(), f"{written.sha256}  {written.path}", note)


@click.command("import", short_help="Import entries from a bundle.")
@options.file_argument
@click.option(
    "--sha256",
    callback=_parse_digest,
    metavar="DIGEST",
    help="Refuse FILE unless it has this digest.",
)
@options.json_option
def import_(file: str, sha256: str, as_json: bool) -> None:
    """Put the entries in FILE into the store, after every byte of it was checked.

    An entry is used if its sources are the installed ones and this machine can run its code, even
    if there is a compiler. A FILE that is damaged is refused, and nothing is imported. If
    OPKILN_TRUSTED_KEYS is set, so is a FILE that none of these keys has signed.
    """
    from opkiln.store.bundle import unpack

    taken = unpack(file, options.writable_root(), sha256=sha256)
    rows = [("op", "package", "status", "path")]
    for each in taken:
        status = "new" if each.new else "already there"
        rows.append((each.op, each.distribution, status, each.directory))
    output.answer(as_json, {"entries": taken}, columns(rows))


@click.command("keygen", short_help="Make a pair of keys to sign bundles with.")
@options.file_argument
@options.json_option
def keygen(file: str, as_json: bool) -> None:
    """Write a new private key to FILE, and its public key to FILE.pub.

    Prints the public key, which others put into OPKILN_TRUSTED_KEYS. Nothing is overwritten. FILE
    is a PEM file that OpenSSL can read. Keep it only where bundles are made.
    """
    from opkiln.store import signing

    made = signing.generate(file)
    note = f"wrote {made.private} and {made.public}"
    output.answer(as_json, made._asdict(), made.key, note)


@click.command("sign", short_help="Sign a bundle.")
@options.file_argument
@options.file_option(
    "--key", "key_file", required=True, metavar="KEY",
    help="The private key, as `opkiln cache keygen` makes it.",
)  # fmt: skip
@options.json_option
def sign(file: str, key_file: str, as_json: bool) -> None:
    """Sign FILE, a bundle, after every byte of it was checked, and print its new SHA-256.

    The signature becomes part of FILE. A file can be signed with several keys, one after the other;
    it is accepted if one of them is trusted.
    """
    from opkiln.store import signing

    done = signing.sign(file, key_file)
    note = f"signed by {', '.join(done.keys)}"
    output.answer(as_json, done._asdict(), f"{done.sha256}  {done.path}", note)


@click.command(
    "record", short_help="Record which ops a command loads.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)  # fmt: skip
@options.file_argument
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


# Remote tiers and lock files


_url_option = click.option(
    "--remote", "urls", multiple=True, metavar="URL",
    help="This tier instead of those in OPKILN_REMOTES.",
)  # fmt: skip


def _parse_tiers(urls: tuple[str, ...]) -> tuple[str, ...]:
    from opkiln.base.setting_values import urls as parse

    try:
        found: tuple[str, ...] = parse(" ".join(urls)) if urls else settings.remotes
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not found:
        raise UsageError("there is no remote tier", hint="export OPKILN_REMOTES=oci://host/prefix")
    return found


@click.command("lock", short_help="Write ops.lock: the digests of built ops.")
@options.ops_argument
@options.file_option(
    "-o", "--output", "file", default="ops.lock", show_default=True, help="The file to write."
)
@options.json_option
def lock_command(ops: tuple[str, ...], file: str, as_json: bool) -> None:
    """Write the digest of the newest entry of each op and target to a lock file; of OPS, or of all
    that are built here.

    Check the file into your repository. `opkiln cache push` publishes the same artifacts, and
    `opkiln cache pull --lock FILE` fetches them. With OPKILN_LOCK=FILE a load takes them, and no
    others, without signatures.
    """
    from opkiln.base.digest import replace
    from opkiln.remote import lockfile
    from opkiln.remote.push import open_publication

    rows = []
    for each in newest_entries(ops):
        with open_publication(each.payload) as (_, row):
            rows.append(row)
    replace(file, lockfile.write(rows).encode())
    note = f"wrote {file}: {count(len(rows), 'artifact')}"
    output.answer(as_json, {"file": file, "artifacts": rows}, _format_rows(rows), note)


def _format_rows(rows: list[LockRow]) -> str:
    head = ("op", "package", "for", "size", "sha256")
    told = [(r.op, r.package, r.target, size(r.size), r.sha256) for r in sorted(rows)]
    return columns([head, *told])


@click.command("push", short_help="Publish entries to a remote tier.")
@options.ops_argument
@_url_option
@options.file_option(
    "--key", "key_file", metavar="KEY",
    help="Sign with this private key, as `opkiln cache keygen` makes it.",
)  # fmt: skip
@options.json_option
def push(ops: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, as_json: bool) -> None:
    """Publish the newest entry of each op and target; of OPS, or of all that are built here.

    Only the first tier of OPKILN_REMOTES is published to. Without a signature, others take the
    artifacts only by a lock file. OPKILN_PUSH=KEY publishes whatever a process compiles.
    """
    from opkiln.remote import tiers
    from opkiln.remote.push import push as publish

    url = _parse_tiers(urls)[0]
    tiers.forget(options.writable_root())
    rows = []
    for each in newest_entries(ops):
        rows.append(publish(each.payload, url, key_file))
        output.say(f"published {each.name} for {rows[-1].target} to {url}")
    output.answer(as_json, {"url": url, "artifacts": rows}, _format_rows(rows))


@click.command("pull", short_help="Fetch what a lock file names.")
@options.file_option(
    "--lock", "lock_file",
    help="The lock file, as `opkiln lock` writes it.  [default: OPKILN_LOCK, else ops.lock]",
)  # fmt: skip
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op.")
@click.option("--fitting", is_flag=True, help="Only what this machine can run.")
@_url_option
@options.json_option
def pull(
    lock_file: str | None, ops: tuple[str, ...], fitting: bool, urls: tuple[str, ...], as_json: bool
) -> int:
    """Fetch the artifacts of a lock file into the store, several at once; exit with 5 if one is
    missing.

    Each is checked against its digest in the lock file. A download that was interrupted is
    resumed, and what is there already is not fetched again.
    """
    from opkiln.remote import lockfile, tiers
    from opkiln.remote.fetch import MISSING, runs_here
    from opkiln.remote.fetch import pull as fetch

    file = lock_file or settings.lock or "ops.lock"
    rows = [
        row
        for row in lockfile.read(file)
        if (not ops or row.op in ops) and (not fitting or runs_here(row))
    ]
    root = options.writable_root()
    tiers.forget(root)
    done: list[PullResult] = []
    progress = _Progress(rows)
    try:
        for each in fetch(rows, os.path.abspath(file), _parse_tiers(urls), root, progress.add):
            done.append(each)
            progress.count(each)
    finally:
        progress.clear()
    document = [{**each.row._asdict(), **fields(each, "status url reason")} for each in done]
    table = [("op", "for", "size", "status", "from")]
    for row, status, url, reason in sorted(done):
        table.append((row.op, row.target, size(row.size), status, url or reason))
    output.answer(as_json, {"artifacts": document}, columns(table))
    return StoreError.exit_code if any(each.status == MISSING for each in done) else 0


class _Progress:
    """A line on a terminal that counts bytes; elsewhere a line for each artifact."""

    def __init__(self, rows: list[LockRow]) -> None:
        self._artifacts = len(rows)
        self._bytes = sum(row.size for row in rows)
        self._got = self._done = 0
        self._lock = forks.lock()
        self._shown = 0.0
        self._live = output.level() == output.NORMAL and output.is_terminal(sys.stderr)

    def clear(self) -> None:
        """Remove the line."""
        if self._live:
            click.echo("\r\x1b[K", nl=False, err=True)

    def add(self, number: int) -> None:
        """Count received bytes. Called by several threads."""
        with self._lock:
            self._got += number
            if self._live and time.monotonic() - self._shown > 0.1:
                self._shown = time.monotonic()
                counted = f"{self._done} of {self._artifacts}"
                text = f"{counted}, {size(self._got)} of {size(self._bytes)}"
                click.echo(f"\r{text}\x1b[K", nl=False, err=True)

    def count(self, each: PullResult) -> None:
        """Count a finished artifact."""
        self._done += 1
        if not self._live:
            where = f" from {each.url}" if each.url else ""
            output.say(
                f"[{self._done}/{self._artifacts}] {each.row.op} for {each.row.target}: "
                f"{each.status}{where}"
            )
