"""``import opkiln.compat.deepspeed.auto``: ``install()`` as an import, the one module that acts."""

from __future__ import annotations

from opkiln.compat.deepspeed.patch import install

install()
