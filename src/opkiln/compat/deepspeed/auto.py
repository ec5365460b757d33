"""``import opkiln.compat.deepspeed.auto`` calls ``install()``. No other module acts on import."""

from __future__ import annotations

from opkiln.compat.deepspeed.patch import install

install()
