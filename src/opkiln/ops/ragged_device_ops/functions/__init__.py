"""The functions of the library. Importing this package declares all of them."""

from __future__ import annotations

from opkiln.ops.ragged_device_ops.functions import experts, paged, rows

__all__ = ["experts", "paged", "rows"]
