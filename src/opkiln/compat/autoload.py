"""What torch calls when it is imported beside an installed opkiln: its group ``torch.backends``."""

from __future__ import annotations

import opkiln
from opkiln.settings import settings


def start() -> None:
    """Let ``torch.load`` read quantized tensors, and exchange torch's functions for opkiln's if
    ``OPKILN_PATCH_TORCH`` asks for it."""
    opkiln._allow_torch_to_load()
    if settings.patch_torch:
        from opkiln.compat import patch

        patch.install()
