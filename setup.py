"""opkiln precompiles its own ops with what it has for those of other packages."""

import os
import sys

import setuptools

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))

from opkiln.ship.setuptools import finalize


class Distribution(setuptools.Distribution):
    def finalize_options(self):
        super().finalize_options()
        finalize(self)


setuptools.setup(distclass=Distribution)
