"""Lists of tensors as one flat tensor, and bytes. Importing this module is cheap.

The name is the one that DeepSpeed's users know; each function is imported when used.
"""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.utils.flatten import (
        byte_view,
        flatten,
        from_bytes,
        unflatten,
        unflatten_into,
    )

__all__ = ["byte_view", "flatten", "from_bytes", "unflatten", "unflatten_into"]

__getattr__, __dir__ = lazy.names(__name__, dict.fromkeys(__all__, "opkiln.ops.utils.flatten"))
