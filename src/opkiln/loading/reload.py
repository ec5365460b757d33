"""A new version of a library beside those this process has open."""

from __future__ import annotations

from opkiln.building import loadtest
from opkiln.digest import sha256_file
from opkiln.errors import LoadTestError, ReloadError
from opkiln.model import ABI_NONE, PLAIN, Artifact, OpSpec
from opkiln.store import publish
from opkiln.toolchain import torch_sdk


def prepare(spec: OpSpec, artifact: Artifact, earlier: list[Artifact]) -> Artifact:
    """The artifact to open after ``earlier``: itself, or a copy of one that was open before.

    The dynamic linker runs a library's initialisers once per file, so a version that comes back
    needs a file of its own. Whether this works is tried in a child: two libraries that define the
    same schema end the process. Raises ReloadError.
    """
    if spec.kind == PLAIN:
        return artifact  # it registers nothing
    if any(each.sha256 == artifact.sha256 for each in earlier):
        artifact = artifact._replace(path=publish.private_copy(artifact.path))
    sdk = None if spec.abi == ABI_NONE else torch_sdk.find()
    with publish.scratch(f"{spec.name}-reload") as tmpdir:
        try:
            before = tuple(each.path for each in earlier if _intact(each))
            loadtest.check(spec, sdk, artifact.path, after=before, tmpdir=tmpdir)
        except LoadTestError as error:
            raise ReloadError(
                f"the new build of {spec.name} cannot be loaded beside the old one",
                why=f"{error.why}\n(a library that defines its own schemas can be loaded once)",
                hint="restart the process",
            ) from error
    return artifact


def _intact(artifact: Artifact) -> bool:
    """Whether the file is still what this process opened: it may be collected or damaged since."""
    try:
        return sha256_file(artifact.path) == artifact.sha256
    except OSError:
        return False
