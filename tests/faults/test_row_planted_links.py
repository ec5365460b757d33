"""Row 17: whoever plants links where a store is about to be made has nothing written through them.

The place is a directory in which everybody may make files, as /tmp is. One user plants links, and
directories full of links, at the names that another user's store will have; that other user builds
there all the while. Kernels that refuse to follow such links by themselves
(``fs.protected_symlinks``) are not relied on: where that can be switched, nothing changes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import write
from sample import child

if TYPE_CHECKING:
    from fault_rows import Cases

pytestmark = [
    pytest.mark.row(17),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else"),
    pytest.mark.timed,
]

USER, OTHER = child.NOBODY, 12345

# Everything that a build writes in its store, in the order of a build; each round as a new process
# would do it: the store is looked for anew. Every 50th is a real load.
BUILDER = """
import os, shutil, sys, warnings
import opkiln
from opkiln.run import budget
from opkiln.errors import CompileError, OpkilnError
from opkiln.building import failure
from opkiln.store import lock, publish
from opkiln.store import layers
from opkiln.store.layers import Store
from opkiln.machine.toolchain import probing
place, count = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("ignore")
os.mkdir(leaf := os.path.join(os.environ["HOME"], "leaf"))
for name in ("manifest.json", "precious"):
    with open(os.path.join(leaf, name), "w") as file:
        file.write("written by the store")
written = refused = 0
for number in range(count):
    try:
        store = Store()
        root = store.root
        probing.remember(store.memory, "compiler", {"number": number}, [sys.executable])
        layers.claim(root)
        with lock.turn(
            root, "precious", lambda: None, lambda state: None, what="op", limit=60
        ) as got:
            publish.publish(leaf, root, f"ops/{number}/precious")
            failure.write_log(root, "precious", "log")
            got.fail(CompileError("failed"))
        publish.discard(root, os.path.join(root, f"ops/{number}/precious"))
        budget._open_table(place)
        if number % 50 == 0:
            text = f'extern "C" int value() {{ return {number}; }}'
            library = opkiln.load_inline("op", text, is_python_module=False, abi="none")
            assert library.value() == number
        written += root.startswith(place)
    except (OpkilnError, OSError) as error:
        refused += 1
    if root.startswith(place) and not os.path.islink(place):
        try:
            if os.lstat(place).st_uid == os.geteuid():
                shutil.rmtree(place)  # so that the next round makes it anew
        except FileNotFoundError:
            pass
print(written, refused, flush=True)
"""

# Whatever the name is free for: a link to the victim's directory, or a directory of links.
ATTACKER = """
import os, random, shutil, sys, time
place, victim = sys.argv[1:]
chance = random.Random(17)
names = ("v1", "slots", "v1/staging", "v1/locks", "v1/toolchains", "v1/logs", "v1/failures")
print("ready", flush=True)
while True:
    kind = chance.randrange(3)
    try:
        if kind == 0:
            os.symlink(victim, place)
        elif kind == 1:
            os.mkdir(place, 0o777)
            os.symlink(victim, os.path.join(place, "v1"))
            os.symlink(os.path.join(victim, "precious"), os.path.join(place, "slots"))
        else:
            os.makedirs(os.path.join(place, "v1"), 0o777)
            for name in names[2:]:
                os.symlink(victim, os.path.join(place, name))
        time.sleep(chance.uniform(0, 0.004))
    except OSError:
        pass
    try:
        os.unlink(place) if os.path.islink(place) else shutil.rmtree(place)
    except OSError:
        pass
    time.sleep(chance.uniform(0, 0.002))
"""


def state(directory: Path) -> dict[str, tuple[object, ...]]:
    """Every file below a directory, with its contents, owner and mode."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(data).hexdigest()
        found[str(path)] = (digest, status.st_mode, status.st_uid, status.st_mtime_ns)
    return found


@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["as /tmp", "without the sticky bit"])
def test_the_files_that_planted_links_lead_to_stay_as_they_are(
    mode: int, public: Path, python_of_others: str, cases: Cases
) -> None:
    shared, victim, home = public / "shared", public / "victim", public / "home"
    for directory in (shared, victim, home, public / "scratch"):
        directory.mkdir()
    # The names of what a store holds, and the name that everything in the test has.
    for name in ("precious", "precious.json", "precious.log", "manifest.json", "slots", "ops/x"):
        write(victim / name, "precious")
    for path in (home, public / "scratch", victim, *victim.rglob("*")):
        os.chown(path, USER, USER)
    shared.chmod(mode)
    place = shared / f"opkiln-{USER}"
    before = state(victim)
    count = cases.count(1000, one_in=40)
    env: dict[str, str | None] = {
        "HOME": str(home), "XDG_CACHE_HOME": None,
        "OPKILN_CACHE_DIR": str(shared), "OPKILN_TMPDIR": str(public / "scratch"),
        "OPKILN_RUNTIME_DIR": str(home / "run"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    attacker = subprocess.Popen(
        [python_of_others, "-S", "-c", ATTACKER, str(place), str(victim)],
        stdout=subprocess.PIPE, user=OTHER, group=OTHER, extra_groups=[],
    )  # fmt: skip
    try:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == b"ready\n"
        cases.tried(count)
        builder = child.start(
            BUILDER, str(place), str(count), python=python_of_others, user=USER, env=env, bare=True
        )
        done = child.finish(builder, timeout=600)
    finally:
        attacker.send_signal(signal.SIGKILL)
        attacker.wait()
        attacker.stdout.close()
    assert done.returncode == 0, done.stderr
    written, refused = map(int, done.stdout.split())
    assert written + refused <= count
    assert written, "the attacker was never too late: nothing was tried"
    after = state(victim)
    assert {name: after.get(name) for name in before} == before
    if mode & 0o1000:
        # Nobody can take our directory away, so nothing at all is made elsewhere.
        assert after == before
