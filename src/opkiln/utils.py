"""Lists of tensors as one flat tensor, and bytes. Importing this module is cheap.

The name is the one that DeepSpeed's users know; each function is imported when used.
"""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.utils.flatten import byte_view as byte_view
    from opkiln.ops.utils.flatten import flatten as flatten
    from opkiln.ops.utils.flatten import from_bytes as from_bytes
    from opkiln.ops.utils.flatten import unflatten as unflatten
    from opkiln.ops.utils.flatten import unflatten_into as unflatten_into

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.utils.flatten": "byte_view flatten from_bytes unflatten unflatten_into",
})  # fmt: skip
