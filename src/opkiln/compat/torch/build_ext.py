"""``BuildExtension``, the setuptools command of torch.utils.cpp_extension, over opkiln's engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

from opkiln.compat.torch import paths
from opkiln.compat.torch.extension import ExtensionBuilder, is_torchs
from opkiln.errors import OpkilnError
from opkiln.ship.prebuild import BuildOutcome
from opkiln.ship.setuptools import STEP, PrecompileOps, builder_of


class ExtensionFailed(SetupError, RuntimeError):  # type: ignore[misc]
    """An extension could not be built. It is a RuntimeError, as in torch."""


class BuildExtension(build_ext):  # type: ignore[misc]
    """Replaces torch's command of this name: ``cmdclass={"build_ext": BuildExtension}``.

    An extension that is ``MyBuilder().builder()`` is precompiled for the loader, into
    ``<package>/prebuilt``, for this machine's family of CPUs and for the GPUs that the settings
    ask for. ``CppExtension`` and ``CUDAExtension`` are built as torch builds them; setuptools
    builds the others. Subclasses may override the same methods as those of torch's command.
    """

    @classmethod
    def with_options(cls, **options: Any) -> type[BuildExtension]:
        """A subclass whose constructor adds these options, as in torch.

        ``no_python_abi_suffix`` leaves the Python's tag out of file names. ``use_ninja`` has no
        effect: these builds do not use ninja.
        """

        class WithOptions(cls):  # type: ignore[valid-type,misc]
            def __init__(self, *arguments: Any, **given: Any) -> None:
                super().__init__(*arguments, **{**given, **options})

        WithOptions.__name__ = cls.__name__
        return WithOptions

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_python_abi_suffix: bool = options.get("no_python_abi_suffix", False)
        self.use_ninja: bool = options.get("use_ninja", True)
        self._built: dict[int, BuildOutcome] = {}

    def finalize_options(self) -> None:
        super().finalize_options()
        given: list[Extension] = list(self.distribution.ext_modules or ())
        self._ops = [each for each in given if builder_of(each) is not None]
        self.extensions = [each for each in given if builder_of(each) is None]

    def run(self) -> None:
        super().run()
        if self._ops:
            self.distribution.cmdclass.setdefault(STEP, PrecompileOps)
            step = self.get_finalized_command(STEP)
            step.editable_mode = bool(self.inplace)
            self.run_command(STEP)

    def build_extensions(self) -> None:
        """Build all of torch's extensions at once, and put them where setuptools expects them."""
        # A subclass that overrides build_extension may change each extension first.
        if type(self).build_extension is BuildExtension.build_extension:
            self._build(self.extensions)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension. Raises SetupError."""
        if not is_torchs(ext):
            # As torch does, for every extension.
            name = ("TORCH_EXTENSION_NAME", ext.name.rpartition(".")[2])
            if name not in ext.define_macros:
                ext.define_macros.append(name)
            super().build_extension(ext)
            return
        if id(ext) not in self._built:
            self._build([ext])
        outcome = self._built.pop(id(ext))
        error = outcome.error
        if error is not None:
            paths.name_the_assignment(error)
            if error.hint.startswith("opkiln build "):  # no command builds an extension
                raise ExtensionFailed(str(OpkilnError(error.what, why=error.why))) from error
            raise ExtensionFailed(str(error)) from error
        place = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(place))
        if os.path.lexists(place):
            os.unlink(place)  # it is never overwritten: a process may have it mapped
        self.copy_file(outcome.path, place)

    def get_ext_filename(self, fullname: str) -> str:
        """The file of a module; with ``no_python_abi_suffix``, without the Python's tag."""
        usual: str = super().get_ext_filename(fullname)
        parts = usual.split(".")
        if self.no_python_abi_suffix and len(parts) > 2:
            return ".".join([*parts[:-2], parts[-1]])
        return usual

    def _build(self, extensions: Sequence[Extension]) -> None:
        """Find or build torch's extensions in the store, and remember each outcome."""
        from opkiln.run import events
        from opkiln.ship import prebuild

        torchs = [each for each in extensions if is_torchs(each)]
        if not torchs:
            return
        jobs = self.parallel if type(self.parallel) is int else None
        try:
            builders = [ExtensionBuilder(each, self.compiler, self.debug) for each in torchs]
            for builder in builders:
                for remark in builder.remarks:
                    events.emit(events.NOTE, text=remark)
            asked = [prebuild.BuildRequest(each) for each in builders]
            with paths.assigned_toolkit():
                outcomes = prebuild.prebuild(asked, jobs=jobs)
        except OpkilnError as error:
            raise ExtensionFailed(str(error)) from error
        for extension, outcome in zip(torchs, outcomes, strict=True):
            self._built[id(extension)] = outcome
