"""Precompiled ops in the wheels that hatchling builds.

    [build-system]
    requires = ["hatchling", "opkiln"]

    [tool.hatch.build.targets.wheel.hooks.opkiln]

To have ``DS_BUILD_STRING`` in the version:

    [tool.hatch.version]
    source = "opkiln"
    path = "src/my_package/__init__.py"

hatchling finds both through an entry point of opkiln.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl
from hatchling.version.source.regex import RegexSource

from opkiln.base.model import CARRIED
from opkiln.builder.registry import GROUP
from opkiln.errors import OpkilnError, SpecError
from opkiln.settings import settings
from opkiln.ship import selection
from opkiln.ship.precompile import PURE, precompile


class PrecompileHook(BuildHookInterface):  # type: ignore[misc]
    """The hook: adds ``<package>/prebuilt`` to a wheel.

    ``where`` is the directory of the packages, if that is neither ``src`` nor the project itself.
    """

    PLUGIN_NAME = "opkiln"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """hatchling calls this before each build; ``version`` is the kind of wheel it builds."""
        if self.target_name != "wheel":
            return
        # The directory is removed when the process ends, because hatchling does not say when a
        # build ends. hatchling also calls this when it only reads the metadata.
        self._staged = tempfile.TemporaryDirectory(prefix="opkiln-", dir=settings.tmpdir)
        try:
            self._require_marked()
            self._precompile(version == "editable", build_data)
        except OpkilnError as error:
            self.app.abort(str(error))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """hatchling calls this with each wheel that it has built."""
        if self.target_name != "wheel" or version == "editable":
            return
        with zipfile.ZipFile(artifact_path) as wheel:
            names = set(wheel.namelist())
        try:
            for package, files in self._sources.items():
                missing = [each for each in files if each.replace(os.sep, "/") not in names]
                hint = '[tool.hatch.build.targets.wheel] artifacts = ["*.cpp", "*.cu", "*.h"]'
                selection.require_sources(package, missing, hint)
        except OpkilnError as error:
            os.remove(artifact_path)
            self.app.abort(str(error))

    def _precompile(self, editable: bool, build_data: dict[str, Any]) -> None:
        tags = set()
        # The sources of packages whose ops are compiled where they are used.
        self._sources: dict[str, list[str]] = {}
        entry_points = self.metadata.core.entry_points.get(GROUP, {})
        for (package, where), values in self._packages(entry_points).items():
            out = None if editable else os.path.join(self._staged.name, package, CARRIED)
            ops = selection.declared_ops(values, where)
            shipment = precompile(package, ops, where, out)
            if shipment.report:
                self.app.display_info(shipment.report)
            if out is not None and shipment.tag != PURE:
                build_data["force_include"][out] = "/".join((*package.split("."), CARRIED))
                tags.add(shipment.tag)
            else:
                self._sources[package] = selection.sources(ops, where)
        if tags:
            build_data["pure_python"] = False
            build_data["tag"] = selection.strictest_tag(tags)

    def _packages(self, entry_points: dict[str, str]) -> dict[tuple[str, str], dict[str, str]]:
        """The ops by (package, the directory that it is imported from). The package of an op is the
        outermost one that is a directory."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        given = self.config.get("where")
        places = [given] if given else ["src", "."]
        roots = [os.path.normpath(os.path.join(self.root, name)) for name in places]
        for name, value in entry_points.items():
            names = selection.packages_around(value.partition(":")[0])
            found_in = (
                (package, root)
                for package in names
                for root in roots
                if os.path.isfile(os.path.join(root, *package.split("."), "__init__.py"))
            )
            place = next(found_in, None)
            if place is None:
                raise SpecError(
                    f"op {name}: no package of this project has {value}",
                    why=f"looked for {names[0]}/__init__.py in {', '.join(roots)}",
                    hint='[tool.hatch.build.targets.wheel.hooks.opkiln] where = "lib"',
                )
            found.setdefault(place, {})[name] = value
        return found

    def _require_marked(self) -> None:
        version = self.metadata.version
        if selection.tag_version(version) != version:
            raise SpecError(
                f"version {version} does not include DS_BUILD_STRING={settings.build_string}",
                why="hatchling reads the version before it calls this hook",
                hint='[tool.hatch.version] source = "opkiln" path = "…/__init__.py"',
            )


class MarkedVersion(RegexSource):  # type: ignore[misc]
    """hatchling's version source (a file with ``__version__``), plus ``DS_BUILD_STRING``."""

    PLUGIN_NAME = "opkiln"

    def get_version_data(self) -> dict[str, Any]:
        found: dict[str, Any] = super().get_version_data()
        return {**found, "version": selection.tag_version(found["version"])}


@hookimpl  # type: ignore[untyped-decorator]
def hatch_register_build_hook() -> type[PrecompileHook]:
    return PrecompileHook


@hookimpl  # type: ignore[untyped-decorator]
def hatch_register_version_source() -> type[MarkedVersion]:
    return MarkedVersion
