"""What torch calls when it is imported beside an installed opkiln: its group ``torch.backends``."""

from __future__ import annotations

from opkiln.settings import settings


def start() -> None:
    """Exchange torch's functions for opkiln's, where ``OPKILN_PATCH_TORCH`` asks for it."""
    if settings.patch_torch:
        from opkiln.compat import patch

        patch.install()
