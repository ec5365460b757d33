"""The functions of the library. Importing this package declares all of them."""

from __future__ import annotations

from opkiln.ops.ragged_device_ops.functions import paged

__all__ = ["paged"]
