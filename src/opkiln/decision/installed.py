"""Where packages carry libraries that were built elsewhere.

<package>/prebuilt/v1/ops/…                 what a package carries for its own ops
<on sys.path>/opkiln_prebuilt/<name>/v1/…   what a wheel of prebuilt ops installs
"""

from __future__ import annotations

import os
import sys

from opkiln.model import ONE_CALL
from opkiln.settings import LAYOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.model import OpSpec

OWN = "prebuilt"  # below a package
SHARED = "opkiln_prebuilt"  # below a directory of sys.path: a name for each wheel


def layers(spec: OpSpec) -> list[str]:
    """The installed layers that have something for an op. A few look-ups where there are none."""
    if spec.distribution == ONE_CALL:
        return []
    found = [os.path.join(spec.root, OWN, LAYOUT)]
    for directory in sys.path:
        if os.path.isabs(directory):  # not the working directory, whatever that is
            shared = os.path.join(directory, SHARED)
            found += [os.path.join(shared, name, LAYOUT) for name in _names(shared)]
    below = os.path.join("ops", spec.distribution, spec.name)
    return [layer for layer in found if os.path.isdir(os.path.join(layer, below))]


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []  # not there, or no directory
