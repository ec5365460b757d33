"""For authors of ops: a suite of tests for pytest, and pytest's option ``--opkiln``.

Importing this module is cheap: each name is imported when it is used. pytest imports it, for
``opkiln.testing.plugin``, in every environment that has opkiln.
"""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.testing.suite import SIZES as SIZES
    from opkiln.testing.suite import Make as Make
    from opkiln.testing.suite import op_tests as op_tests

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.testing.suite": "SIZES Make op_tests",
})  # fmt: skip
