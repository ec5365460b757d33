"""Precompiled ops in the wheels that setuptools builds.

A project that declares ops as entry points only needs opkiln among its build requirements.
setuptools finds ``ship.hook`` through an entry point of opkiln. The hook adds a step to the build
that precompiles the ops that the variables select. A project with a setup.py may use
``BuildExtension`` of ``opkiln.compat.torch``, with ``MyBuilder().builder()`` among its
``ext_modules``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from configparser import ConfigParser
from typing import Any, ClassVar

from setuptools import Command, Distribution, Extension
from setuptools.errors import ModuleError, SetupError

from opkiln.base.model import CARRIED
from opkiln.builder import OpBuilder
from opkiln.builder.registry import GROUP
from opkiln.errors import OpkilnError, SpecError
from opkiln.ship import selection
from opkiln.ship.precompile import PURE, list_unshipped_sources, precompile, tag_of
from opkiln.ship.selection import DeclaredOp

STEP = "build_opkiln"


def finalize(dist: Distribution) -> None:
    """Add the step to a project's build, after its configuration has been read.

    Without ops the step does nothing.
    """
    read = dist.parse_config_files

    # The files may name commands of the project. setuptools ignores those of setup.cfg if there are
    # commands already, and those of pyproject.toml replace all others. So the step is added last.
    def parse_config_files(*arguments: Any, **options: Any) -> None:
        read(*arguments, **options)
        if STEP not in dist.cmdclass:
            dist.cmdclass.update(commands(dist))

    dist.parse_config_files = parse_config_files


def commands(dist: Distribution) -> dict[str, type[Command]]:
    """The commands of a project, with the step; each is a subclass of the project's own."""

    class BuildCommand(dist.get_command_class("build")):  # type: ignore[misc]
        sub_commands: ClassVar = [*dist.get_command_class("build").sub_commands, (STEP, None)]

    class InfoCommand(dist.get_command_class("egg_info")):  # type: ignore[misc]
        def tagged_version(self) -> str:
            try:
                return selection.tag_version(super().tagged_version())
            except OpkilnError as error:
                raise SetupError(str(error)) from error

    made = {"build": BuildCommand, "egg_info": InfoCommand}
    # setuptools before 70.1 imports it from `wheel`, which may not be installed yet.
    with contextlib.suppress(ModuleError):

        class WheelCommand(dist.get_command_class("bdist_wheel")):  # type: ignore[misc]
            def get_tag(self) -> tuple[str, str, str]:
                return _tag(self, super().get_tag())

        made["bdist_wheel"] = WheelCommand
    for name, kind in made.items():
        kind.__name__ = name
    return {**made, STEP: PrecompileOps}


def _tag(command: Any, usual: tuple[str, str, str]) -> tuple[str, str, str]:
    """A wheel's tag, from the ops that were precompiled into it."""
    dist = command.distribution
    extensions = dist.ext_modules or ()
    if dist.has_c_libraries() or any(builder_of(each) is None for each in extensions):
        return usual  # compiled by setuptools, for this Python and this platform
    tags: set[str] = set()
    # An editable wheel has no ops, even if an earlier build left some in the build directory.
    if command.skip_build or dist.have_run.get(STEP):
        step = command.get_finalized_command(STEP)
        tags = {tag_of(step.layer(package)) for package in step.packages()} - {PURE}
    if not tags:
        return ("py3", "none", "any") if extensions else usual
    command.root_is_pure = False
    # Each package in the wheel has a tag; the strictest fits all.
    python, abi, platform = selection.strictest_tag(tags).split("-")
    if command.plat_name_supplied:
        platform = command.plat_name.replace("-", "_").replace(".", "_")
    return python, abi, platform


class PrecompileOps(Command):  # type: ignore[misc]
    """The step: precompiles ops into ``<package>/prebuilt`` of what is being built."""

    description = "precompile the ops that OPKILN_BUILD_OPS and OPKILN_BUILD_<OP> select"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    command_name = STEP
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Build the ops, or find them in the store; report on standard error. Raises SetupError."""
        try:
            for package, (ops, extensions) in self.packages().items():
                # An editable install ships nothing: its ops go to the user's store, as on first
                # use.
                out = None if self.editable_mode else self.layer(package)
                where = self._where(package)
                shipment = precompile(package, ops, where, out, extensions)
                if shipment.report:
                    sys.stderr.write(f"{shipment.report}\n")
                if out is not None:
                    hint = '[tool.setuptools.package-data] "*" = ["*.cpp", "*.cu", "*.h"]'
                    missing = self._missing_sources(ops, where, out, shipment.tag)
                    selection.require_sources(package, missing, hint)
        except OpkilnError as error:
            raise SetupError(str(error)) from error

    def packages(self) -> dict[str, tuple[list[DeclaredOp], list[OpBuilder]]]:
        """The packages that have ops: the ops of their entry points and of their extensions."""
        if self.distribution.get_name() == "opkiln":
            return {"opkiln": (selection.bundled_ops(), [])}  # these have no entry points
        found: dict[str, tuple[list[DeclaredOp], list[OpBuilder]]] = {}
        for name, value in _entry_points(self.distribution).items():
            package = self._package(value.partition(":")[0].strip())
            ops = selection.declared_ops({name: value}, self._where(package))
            found.setdefault(package, ([], []))[0].extend(ops)
        for extension in self.distribution.ext_modules or ():
            builder = builder_of(extension)
            if builder is not None:
                found.setdefault(_imported_package(builder), ([], []))[1].append(builder)
        return found

    def layer(self, package: str) -> str:
        """The directory that a package's ops are precompiled into."""
        assert self.build_lib is not None
        return os.path.join(self.build_lib, *package.split("."), CARRIED)

    def _package(self, module: str) -> str:
        """The outermost package of a module that is a directory, as builders see it."""
        for name in selection.packages_around(module):
            if os.path.exists(os.path.join(self._directory(name), "__init__.py")):
                return name
        raise SpecError(
            f"the op in {module} does not belong to a package",
            why=f"{self._directory(module)} has no __init__.py; ops are installed in their package",
        )

    def _directory(self, package: str) -> str:
        directory: str = self.get_finalized_command("build_py").get_package_dir(package)
        return os.path.abspath(directory)

    def _where(self, package: str) -> str:
        """The directory that a package can be imported from. Raises SpecError."""
        directory = self._directory(package)
        tail = os.path.join("", *package.split("."))
        if not directory.endswith(os.sep + tail):
            raise SpecError(
                f"{package} cannot be imported from its sources",
                why=f"package_dir puts it into {directory}",
                hint=shlex.join(["mv", directory, os.path.join(os.path.dirname(directory), tail)]),
            )
        return directory[: -len(tail) - 1] or os.sep

    def _missing_sources(self, ops: list[DeclaredOp], where: str, out: str, tag: str) -> list[str]:
        if tag != PURE:
            return list_unshipped_sources(out, os.path.dirname(out))
        # Its ops are compiled where they are used.
        assert self.build_lib is not None
        found = selection.sources(ops, where)
        return [file for file in found if not os.path.exists(os.path.join(self.build_lib, file))]

    # The interface that setuptools expects

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        found = []
        for package in self.packages() if not self.editable_mode else ():
            for directory, _, names in os.walk(self.layer(package)):
                found += [os.path.join(directory, name) for name in names]
        return sorted(found)

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def builder_of(extension: Extension) -> OpBuilder | None:
    """The builder that made an extension (``MyBuilder().builder()``), if one did."""
    found: OpBuilder | None = getattr(extension, "opkiln", None)
    return found


def _imported_package(builder: OpBuilder) -> str:
    for name in selection.packages_around(type(builder).__module__):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if os.path.basename(file) == "__init__.py":
            return name
    raise SpecError(
        f"op {builder.name} does not belong to a package",
        why=f"{type(builder).__name__} is in the module {type(builder).__module__}",
    )


def _entry_points(dist: Distribution) -> dict[str, str]:
    """The ops that a project declares."""
    given: Any = getattr(dist, "entry_points", None) or {}
    if not isinstance(given, str):
        lines = given.get(GROUP, ())
        lines = lines.splitlines() if isinstance(lines, str) else lines
        given = "\n".join([f"[{GROUP}]", *(line.strip() for line in lines)])
    parser = ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(given)
    return dict(parser[GROUP]) if GROUP in parser else {}
