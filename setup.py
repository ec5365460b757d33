"""opkiln precompiles its own ops with what it has for those of other packages. Its archives have
the same bytes wherever they are built: ``make release-check`` compares them."""

import gzip
import os
import sys
import tarfile
import time

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))

from opkiln.ship.setuptools import finalize


class Distribution(setuptools.Distribution):
    def finalize_options(self):
        super().finalize_options()
        finalize(self)


def plain_mode(mode):
    """The permissions of a file without the builder's umask."""
    return 0o755 if mode & 0o100 else 0o644


class SourceArchive(sdist):
    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):  # noqa: A002
        """A ``.tar.gz`` without the builder's clock, name, umask and directory.

        setuptools takes ``SOURCE_DATE_EPOCH`` for wheels, and not for these.
        """
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def plain(member):
            member.mtime = epoch
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = plain_mode(member.mode)
            return member

        path = f"{base_name}.tar.gz"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=plain)
        return path


class Wheel(bdist_wheel):
    def write_wheelfile(self, *arguments, **options):
        """This is written last, so all else is there: the umask leaves its permissions now."""
        super().write_wheelfile(*arguments, **options)
        for directory, _, names in os.walk(self.bdist_dir):
            for name in names:
                path = os.path.join(directory, name)
                os.chmod(path, plain_mode(os.stat(path).st_mode))


setuptools.setup(distclass=Distribution, cmdclass={"sdist": SourceArchive, "bdist_wheel": Wheel})
