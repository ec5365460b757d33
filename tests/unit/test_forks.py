"""A forked child does not wait for what a thread of its parent holds."""

from __future__ import annotations

from sample import child

FORKED = """
import os, threading
from opkiln.base import forks

lock = forks.lock()
inside, go_on = threading.Event(), threading.Event()

class Thing:
    @forks.cached_property
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait()
        return 7

def hold():
    with lock:
        Thing().value

holder = threading.Thread(target=hold)
holder.start()
inside.wait()
pid = os.fork()
if pid == 0:
    with lock:
        os._exit(Thing().value)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
go_on.set()
holder.join()
"""

HELD = """
import os, threading
from opkiln.base import forks

lock = forks.lock()
with lock:
    pid = os.fork()
if pid == 0:
    taken = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
    other.start()
    other.join()
    os._exit(7 if taken == [True] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


def test_what_another_thread_of_the_parent_holds_is_free_in_the_child() -> None:
    child.run(FORKED, forked=False)


def test_what_the_thread_that_forks_holds_it_releases_in_the_child() -> None:
    child.run(HELD, forked=False)
