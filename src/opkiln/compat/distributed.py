"""``OPKILN_ENSURE``: the ranks of an unmodified program agree on its ops when they form a group.

In place of ``torch.distributed.init_process_group``: it calls that, then ``opkiln.ensure``. What
the program loads later (``cpp_extension.load``, a builder of DeepSpeed, an op that was not named)
is built by one rank, and the others take its library (``cluster.sharing``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from opkiln.base.model import Op
from opkiln.loading import loader
from opkiln.settings import settings

RECORDED = "1"


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The replacement of the function, in its module and in the package that imports it."""
    right = module.init_process_group

    @wraps(right)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        made = right(*args, **kwargs)
        agree()
        return made

    for owner in (module, sys.modules.get("torch.distributed")):
        if getattr(owner, "init_process_group", None) is right:
            yield owner, "init_process_group", init_process_group


def agree() -> None:
    """Have all ranks of the default group agree on the ops that the setting names.

    Raises ClusterError.
    """
    named = settings.ensure
    if not named:
        return
    from opkiln.cluster.ensure import agree_on_first, ensure

    if RECORDED in named:
        ensure(())  # from here on all ranks are in the same start of the job
        # The file grows while the job runs, so one rank reads it for all.
        listed = [each for each in named if each != RECORDED]
        named = agree_on_first("ops", [*listed, *_recorded_ops()])
    if named:
        ensure(named)
    process = os.getpid()

    def share(op: Op) -> None:
        from opkiln.cluster import sharing

        # A forked process, such as a worker of a data loader, has the connections of its parent.
        if os.getpid() == process:
            sharing.share(op)

    loader.before_load = share


def _recorded_ops() -> list[str]:
    from opkiln.base.model import ONE_CALL
    from opkiln.errors import StoreError
    from opkiln.loading import recording

    if settings.record is None:
        return []
    try:
        uses = recording.read(settings.record)
    except StoreError:
        return []  # the first run: there is no file yet
    ops = (f"{use.distribution}:{use.op}" for use in uses if use.distribution != ONE_CALL)
    return [*ops, *recording.read_modules(settings.record)]
