"""``opkiln lock``, and the sub-commands of ``opkiln cache`` that speak to remote tiers."""

from __future__ import annotations

import os
import sys
import threading
import time

import click

from opkiln.cli import output
from opkiln.cli.bundles import chosen
from opkiln.cli.options import complete_op, json_option, writable_root
from opkiln.errors import StoreError, UsageError
from opkiln.report.layout import columns, count, fields, size
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.remote.fetch import Pulled
    from opkiln.remote.lockfile import Locked

_url_option = click.option(
    "--remote", "urls", multiple=True, metavar="URL",
    help="This tier instead of those in OPKILN_REMOTES.",
)  # fmt: skip


def _tiers(urls: tuple[str, ...]) -> tuple[str, ...]:
    from opkiln.setting_values import urls as parse

    try:
        found: tuple[str, ...] = parse(" ".join(urls)) if urls else settings.remotes
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not found:
        raise UsageError("there is no remote tier", hint="export OPKILN_REMOTES=oci://host/prefix")
    return found


@click.command("lock", short_help="Write ops.lock: the digests of built ops.")
@click.argument("ops", nargs=-1, shell_complete=complete_op)
@click.option(
    "-o", "--output", "file", default="ops.lock", show_default=True, metavar="FILE",
    type=click.Path(dir_okay=False), help="The file to write.",
)  # fmt: skip
@json_option
def lock_command(ops: tuple[str, ...], file: str, as_json: bool) -> None:
    """Write the digest of the newest entry of each op and target to a lock file; of OPS, or of all
    that are built here.

    Check the file into your repository. `opkiln cache push` publishes the same artifacts, and
    `opkiln cache pull --lock FILE` fetches them. With OPKILN_LOCK=FILE a load takes them, and no
    others, without signatures.
    """
    from opkiln.remote import lockfile
    from opkiln.remote.push import packed
    from opkiln.writing import replace

    rows = []
    for each in chosen(ops):
        with packed(each.payload) as (_, row):
            rows.append(row)
    replace(file, lockfile.write(rows).encode())
    output.answer(as_json, {"file": file, "artifacts": rows}, _table(rows))
    if not as_json:
        output.say(f"wrote {file}: {count(len(rows), 'artifact')}")


def _table(rows: list[Locked]) -> str:
    head = ("op", "package", "for", "size", "sha256")
    told = [(r.op, r.package, r.target, size(r.size), r.sha256) for r in sorted(rows)]
    return columns([head, *told])


@click.command("push", short_help="Publish entries to a remote tier.")
@click.argument("ops", nargs=-1, shell_complete=complete_op)
@_url_option
@click.option(
    "--key", "key_file", type=click.Path(dir_okay=False), metavar="KEY",
    help="Sign with this private key, as `opkiln cache keygen` makes it.",
)  # fmt: skip
@json_option
def push(ops: tuple[str, ...], urls: tuple[str, ...], key_file: str | None, as_json: bool) -> None:
    """Publish the newest entry of each op and target; of OPS, or of all that are built here.

    Only the first tier of OPKILN_REMOTES is published to. Without a signature, others take the
    artifacts only by a lock file. OPKILN_PUSH=KEY publishes whatever a process compiles.
    """
    from opkiln.remote import tiers
    from opkiln.remote.push import push as publish

    url = _tiers(urls)[0]
    tiers.forget(writable_root())
    rows = []
    for each in chosen(ops):
        rows.append(publish(each.payload, url, key_file))
        output.say(f"published {each.name} for {rows[-1].target} to {url}")
    output.answer(as_json, {"url": url, "artifacts": rows}, _table(rows))


@click.command("pull", short_help="Fetch what a lock file names.")
@click.option(
    "--lock", "lock_file", type=click.Path(dir_okay=False), metavar="FILE",
    help="The lock file, as `opkiln lock` writes it.  [default: OPKILN_LOCK, else ops.lock]",
)  # fmt: skip
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only this op.")
@click.option("--fitting", is_flag=True, help="Only what this machine can run.")
@_url_option
@json_option
def pull(
    lock_file: str | None,
    ops: tuple[str, ...],
    fitting: bool,
    urls: tuple[str, ...],
    as_json: bool,
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
    root = writable_root()
    tiers.forget(root)
    done: list[Pulled] = []
    progress = _Progress(rows)
    try:
        for each in fetch(rows, os.path.abspath(file), _tiers(urls), root, progress.add):
            done.append(each)
            progress.finished(each)
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

    def __init__(self, rows: list[Locked]) -> None:
        self._artifacts = len(rows)
        self._bytes = sum(row.size for row in rows)
        self._got = self._done = 0
        self._lock = threading.Lock()
        self._shown = 0.0
        self._live = output.level() == output.NORMAL and output.is_terminal(sys.stderr)

    def clear(self) -> None:
        """Remove the line."""
        if self._live:
            click.echo("\r\x1b[K", nl=False, err=True)

    def add(self, number: int) -> None:
        """So many bytes have come. Called by several threads."""
        with self._lock:
            self._got += number
            if self._live and time.monotonic() - self._shown > 0.1:
                self._shown = time.monotonic()
                counted = f"{self._done} of {self._artifacts}"
                text = f"{counted}, {size(self._got)} of {size(self._bytes)}"
                click.echo(f"\r{text}\x1b[K", nl=False, err=True)

    def finished(self, each: Pulled) -> None:
        """One artifact is done."""
        self._done += 1
        if not self._live:
            where = f" from {each.url}" if each.url else ""
            output.say(
                f"[{self._done}/{self._artifacts}] {each.row.op} for {each.row.target}: "
                f"{each.status}{where}"
            )
