"""A process may end between any two calls that change the store: it opens, verifies and serves.

Each operation is run in processes of its own, and stopped at its first call that changes something
below the store, at its second, and so on until it finishes. A write is also stopped half-way. After
each stop another process looks at the store: nothing in it is damaged, a load gives the right
answer and leaves it whole, and what lies about is swept.

A process that is killed is what is tried, not a machine that loses power; that what is renamed into
place was synced before is tried by the order of calls.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cryptography
import loaders
import pytest
from sample import layer
from sample.child import SOURCE
from sample.quiet import within

from opkiln.machine.facts import Hasher
from opkiln.store import bundle, entry, signing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rows import Cases

pytestmark = pytest.mark.timed

KILLED = -9
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "crash_points.json"


class Server:
    """Runs operations in processes that may be stopped (``crash_server.py``)."""

    def __init__(self, base: Path, preload: str) -> None:
        self.base = base
        self.cache, self.out = base / "cache", base / "out"
        for name in ("scratch", "runtime", "out"):
            (base / name).mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "LD_PRELOAD": preload,
            "CRASH_BELOW": f"{self.cache}:{self.out}",
            "OPKILN_CACHE_DIR": str(self.cache),
            "OPKILN_TMPDIR": str(base / "scratch"),
            "OPKILN_RUNTIME_DIR": str(base / "runtime"),
            "OPKILN_PROGRESS": "off",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(loaders.HERE / "crash_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, do: str, at: int | None = None, log: str = "", **more: Any) -> Any:
        request: dict[str, Any] = {"do": do, "with": more}
        request |= {} if at is None else {"at": at}
        request |= {"log": log} if log else {}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], loaders.HANGS)
        assert ready, f"{request} hangs"
        answer = json.loads(self.process.stdout.readline())
        assert answer["status"] in (0, KILLED), f"{request}: {answer.get('error')}"
        assert at is not None or answer["status"] == 0, f"{request} was killed"
        return answer

    def restore(self, template: Path | None) -> None:
        """Give the store the state of a template; None: there is no store."""
        shutil.rmtree(self.cache, ignore_errors=True)
        if template is not None:
            shutil.copytree(template, self.cache)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def source(base: Path) -> str:
    file = loaders.write(base / "source" / "op.cpp", loaders.returning(43))
    loaders.write(base / "source" / "wrong.cpp", "int value( {\n")
    loaders.let_rest()
    return str(file)


@pytest.fixture(scope="module")
def server(base: Path, source: str) -> Iterator[Server]:
    made = Server(base, loaders.shim("crash_points", base))
    yield made
    made.close()


@pytest.fixture(scope="module")
def built(server: Server, source: str, base: Path) -> Path:
    """A store with an op, its object, a receipt, and what was learnt of the compiler."""
    server.restore(None)
    assert server("load", source=source) == {
        "status": 0,
        "value": 43,
        "origin": "built",
        "calls": 0,
    }
    return shutil.copytree(server.cache, base / "built")


class Sweep:
    """Tries the points of one operation."""

    def __init__(self, name: str, cases: Cases, server: Server) -> None:
        self.name, self.cases, self.server = name, cases, server
        self.tried = 0
        self.bad: list[str] = []

    def __call__(
        self,
        before: Callable[[], None],
        operation: dict[str, Any],
        good: Callable[[], list[str]],
    ) -> int:
        """Stop the operation at its points; ``good`` says what is wrong afterwards. Returns how
        many points there are."""
        before()
        points = int(self.server(**operation, at=0)["calls"])
        assert points > 0
        assert not (found := good()), f"unstopped: {found}"
        step = 1 if self.cases.whole else max(10, points // 2)
        first = 1 + sum(self.name.encode()) % step  # of another operation, other calls
        for at in range(first, points + 1, step):
            before()
            stopped = self.server(**operation, at=at)["status"] == KILLED
            self.cases.tried(stopped)
            self.tried += stopped
            if not stopped and at < points - 5:  # how often a lock is asked for, say, may differ
                self.bad.append(f"{at}: not stopped")
            self.bad += [f"{at}: {each}" for each in good()]
        return points


@pytest.fixture
def sweep(request: pytest.FixtureRequest, cases: Cases, server: Server) -> Iterator[Sweep]:
    name = request.node.name.removeprefix("test_").replace("_can_stop_anywhere", "")
    made = Sweep(name, cases, server)
    began = time.monotonic()
    yield made
    record = {
        "operation": name.replace("_", " "),
        "tried": made.tried,
        "bad": len(made.bad),
        "seconds": round(time.monotonic() - began, 1),
    }
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        plugins.get_plugin("terminalreporter").write_line(
            f"\n{record['operation']}: {record['tried']} points tried, {record['bad']} bad, "
            f"{record['seconds']} s"
        )
    if cases.whole:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        known = [each for each in known if each["operation"] != record["operation"]]
        records = sorted([*known, record], key=lambda each: str(each["operation"]))
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")


def whole(server: Server, source: str = "") -> list[str]:
    """What is wrong with the store: it is to open, verify, serve a source, and be swept."""
    wrong = [f"damaged: {each}" for each in server("damage")["faults"]]
    for expected in (("built", "store"), ("store",)) if source else ():
        served = server("load", source=source)
        if served["value"] != 43 or served["origin"] not in expected:
            wrong.append(f"a load gave {served}")
    wrong += [f"damaged after a load: {each}" for each in server("damage")["faults"]]
    wrong += [f"left: {each}" for each in server("sweep")["strays"]]
    scratch = server.base / "scratch"
    within(10, lambda: not any(scratch.iterdir()))  # the watchdog of what was stopped is at it
    return [*wrong, *(f"left in the scratch: {each}" for each in scratch.iterdir())]


# Building, which publishes objects, an op, probes and a receipt


def test_a_first_build_can_stop_anywhere(sweep: Sweep, server: Server, source: str) -> None:
    sweep(
        lambda: server.restore(None),
        {"do": "load", "source": source},
        lambda: whole(server, source),
    )
    assert sweep.bad == []


def forget_ops(server: Server, built: Path, *more: str) -> None:
    """As ``built``, but the op is not in the store, nor what is in these directories."""
    server.restore(built)
    for name in ("ops", "receipts", "locks", *more):
        shutil.rmtree(server.cache / "v1" / name)


def test_publishing_an_op_can_stop_anywhere(
    sweep: Sweep, server: Server, source: str, built: Path
) -> None:
    sweep(
        lambda: forget_ops(server, built),
        {"do": "load", "source": source},
        lambda: whole(server, source),
    )
    assert sweep.bad == []


def test_replacing_a_damaged_op_can_stop_anywhere(
    sweep: Sweep, server: Server, source: str, built: Path
) -> None:
    def before() -> None:
        server.restore(built)
        (leaf,) = loaders.leaves(server.cache)
        payload = next(path for path in leaf.iterdir() if path.suffix == ".so")
        payload.write_bytes(payload.read_bytes()[:-1] + b"x")

    def good() -> list[str]:
        # Until somebody has found the damage out, it is there; a load is to mend it.
        served = server("load", source=source)
        return [*([] if served["value"] == 43 else [str(served)]), *whole(server, source)]

    sweep(before, {"do": "load", "source": source}, good)
    assert sweep.bad == []


def test_a_failing_build_can_stop_anywhere(
    sweep: Sweep, server: Server, source: str, built: Path
) -> None:
    wrong = os.path.join(os.path.dirname(source), "wrong.cpp")
    sweep(
        lambda: server.restore(built),
        {"do": "load", "source": wrong},
        lambda: whole(server, source),
    )
    assert sweep.bad == []


# Collecting


@pytest.fixture(scope="module")
def full(built: Path, base: Path) -> Path:
    """As ``built``, with more entries."""
    made = shutil.copytree(built, base / "full")
    for number in range(3):
        layer.add(made, f"other{number}", b"\x7fELF" + bytes(5000))
    for path in (made / "v1" / "ops" / "somebody").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (made / "v1" / "ops" / "somebody").chmod(0o700)
    stale = made / "v1" / "staging" / "0123456789abcdef01234567"
    stale.mkdir(parents=True)
    (stale / "op.so").write_bytes(b"half")
    for path in (stale, stale / "op.so"):
        os.utime(path, (1, 1))
    return made


def test_collecting_can_stop_anywhere(
    sweep: Sweep, server: Server, source: str, full: Path
) -> None:
    sweep(lambda: server.restore(full), {"do": "collect"}, lambda: whole(server, source))
    assert sweep.bad == []


def test_clearing_can_stop_anywhere(sweep: Sweep, server: Server, source: str, full: Path) -> None:
    sweep(lambda: server.restore(full), {"do": "clear"}, lambda: whole(server, source))
    assert sweep.bad == []


# Bundles and layers


@pytest.fixture(scope="module")
def shipped(base: Path) -> Path:
    """A layer of three ops."""
    made = base / "layer"
    for number in range(3):
        layer.add(made, f"shipped{number}", b"\x7fELF" + bytes([number]) * 3000)
    return made


@pytest.mark.parametrize("store", ["fresh", "in_use"])
def test_importing_can_stop_anywhere(
    store: str, sweep: Sweep, server: Server, source: str, built: Path, shipped: Path, base: Path
) -> None:
    file = base / "import.bundle"
    bundle.write_bundle(str(shipped), str(file))

    def good() -> list[str]:
        wrong = [f"damaged: {each}" for each in server("damage")["faults"]]
        taken = server("unpack", file=str(file))["taken"]
        for number, directory in enumerate(taken):
            payload = Path(directory, f"shipped{number}.so").read_bytes()
            if payload != b"\x7fELF" + bytes([number]) * 3000:
                wrong.append(f"{directory} is not what was imported")
        wrong += [] if len(taken) == 3 else [str(taken)]
        return [*wrong, *whole(server, source if store == "in_use" else "")]

    before = built if store == "in_use" else None
    sweep(lambda: server.restore(before), {"do": "unpack", "file": str(file)}, good)
    assert sweep.bad == []


@pytest.mark.parametrize("there", ["new", "replaced"])
def test_writing_a_bundle_can_stop_anywhere(
    there: str, sweep: Sweep, server: Server, shipped: Path
) -> None:
    file = server.out / "ops.bundle"
    old = b""

    def before() -> None:
        nonlocal old
        shutil.rmtree(server.out)
        server.out.mkdir()
        if there == "replaced":
            other = server.base / "other-layer"
            if not other.exists():
                layer.add(other, "old", b"\x7fELFold")
            bundle.write_bundle(str(other), str(file))
            old = file.read_bytes()

    def good() -> list[str]:
        if there == "new" and not file.exists():
            return []
        if there == "replaced" and file.read_bytes() == old:
            return []
        return [] if len(bundle.read_bundle(str(file))) == 3 else ["it is neither old nor new"]

    sweep(before, {"do": "write", "layer_dir": str(shipped), "file": str(file)}, good)
    assert sweep.bad == []


def test_signing_a_bundle_can_stop_anywhere(
    sweep: Sweep, server: Server, shipped: Path, base: Path
) -> None:
    key = signing.generate(str(base / "key"))
    plain, signed, file = base / "plain.bundle", base / "signed.bundle", server.out / "ops.bundle"
    bundle.write_bundle(str(shipped), str(plain))
    shutil.copy(plain, signed)
    signing.sign(str(signed), key.private)

    def before() -> None:
        shutil.rmtree(server.out)
        server.out.mkdir()
        shutil.copy(plain, file)

    def good() -> list[str]:
        whole_ones = (plain.read_bytes(), signed.read_bytes())
        return [] if file.read_bytes() in whole_ones else ["it is neither old nor new"]

    site = str(Path(cryptography.__file__).parents[1])
    operation = {"do": "sign", "site": site, "file": str(file), "key": key.private}
    sweep(before, operation, good)
    assert sweep.bad == []


def test_exporting_a_layer_can_stop_anywhere(sweep: Sweep, server: Server, built: Path) -> None:
    out = server.out / "layer"

    def before() -> None:
        server.restore(built)
        shutil.rmtree(out, ignore_errors=True)

    def good() -> list[str]:
        (made,) = server("export", out=str(out))["exported"]
        found = entry.examine(made, {}, Hasher(), listed=True, whole=False, own=False)
        return [] if isinstance(found, entry.Leaf) else [str(found)]

    sweep(before, {"do": "export", "out": str(out)}, good)
    assert sweep.bad == []


# What a loss of power needs: the order of calls


def test_what_is_renamed_into_place_was_synced_after_it_was_last_written(
    server: Server, source: str, base: Path, built: Path
) -> None:
    forget_ops(server, built, "objects")
    log = base / "calls.log"
    log.write_text("")
    assert server("load", source=source, at=0, log=str(log))["value"] == 43
    unsynced: set[str] = set()
    published = []
    for line in log.read_text().splitlines():
        call, _, rest = line.partition(" ")
        if call in ("open", "half-written", "pwrite", "sendfile", "copy_file_range"):
            unsynced.add(rest)
        elif call == "fsync":
            unsynced.discard(rest)
            if os.path.dirname(rest).endswith("/staging"):
                published.append(("directory", rest))
        elif call == "rename":
            before, _, after = rest.partition(" ")
            if "/v1/ops/" in after or "/v1/objects/" in after:
                loose = [path for path in unsynced if path.startswith(before + "/")]
                assert loose == [], line
                assert ("directory", before) in published
                published.append(("entry", after))
    assert [kind for kind, _ in published].count("entry") == 2  # an object, an op
    renames = [after for kind, after in published if kind == "entry"]
    synced = [line[6:] for line in log.read_text().splitlines() if line.startswith("fsync ")]
    assert all(os.path.dirname(after) in synced for after in renames)
