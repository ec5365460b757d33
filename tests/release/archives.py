"""The archives of a release: built alike everywhere, with nothing missing and nothing else."""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import NamedTuple

from environments import REPOSITORY
from steps import Failure, Tools, run, say

LICENSE = "Apache-2.0"
# What a wheel has besides the package, and a source archive besides the package's sources.
INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
BESIDE = (
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml",
    "setup.py",
)  # fmt: skip
MADE = ("PKG-INFO", "setup.cfg")
# Another author's notice. Our files have none: LICENSE speaks for all of them.
NOTICE = re.compile(rb"copyright|SPDX-License-Identifier|all rights reserved", re.IGNORECASE)
# What pyroma misses, and nothing else: the project has neither an address nor a home page yet.
MISSED = ("author-email", "'url' field")


class Archives(NamedTuple):
    """Both archives, and the clone that they were built from."""

    wheel: Path
    source: Path
    clone: Path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_files(tools: Tools) -> None:
    """The files that a code host reads are well-formed. Raises Failure."""
    check = tools.program("check-jsonschema")
    workflows = sorted(map(str, (REPOSITORY / ".github" / "workflows").glob("*.yml")))
    run([check, "--builtin-schema", "vendor.github-workflows", *workflows], REPOSITORY)
    run([check, "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"], REPOSITORY)
    run([tools.program("validate-pyproject"), "pyproject.toml"], REPOSITORY)
    say(f"{len(workflows)} workflows, CITATION.cff and pyproject.toml fit their schemas")


def built_alike(tools: Tools, work: Path) -> Archives:
    """Build everything twice, and the wheel from the source archive too. Raises Failure."""
    epoch = run(["git", "log", "-1", "--format=%ct"], REPOSITORY).strip()
    first = _built(tools, work / "first", epoch, umask=0o022, zone="UTC")
    second = _built(tools, work / "second" / "deeper", epoch, umask=0o002, zone="Asia/Tokyo")
    with tarfile.open(first.source) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (tree,) = (work / "unpacked").iterdir()
    out = work / "from-source"
    build = tools.python("-m", "build", "--no-isolation", "--wheel", "--outdir", out, tree)
    run(build, work, SOURCE_DATE_EPOCH=epoch)
    (third,) = out.iterdir()
    for one, other in (
        (first.source, second.source), (first.wheel, second.wheel), (first.wheel, third),
    ):  # fmt: skip
        if sha256(one) != sha256(other):
            shutil.copytree(work, REPOSITORY / "build" / "differ", dirs_exist_ok=True)
            raise Failure(f"two builds of {one.name} differ; both are below build/differ")
    say(f"{first.source.name}: the same bytes from two directories")
    say(f"{first.wheel.name}: the same bytes from two directories, and from the source archive")
    return first


def _built(tools: Tools, work: Path, epoch: str, *, umask: int, zone: str) -> Archives:
    work.mkdir(parents=True)
    clone, out = work / "opkiln", work / "dist"
    commit = run(["git", "rev-parse", "HEAD"], REPOSITORY).strip()
    run(["git", "clone", "--quiet", "--no-checkout", str(REPOSITORY), str(clone)], work)
    run(["git", "checkout", "--quiet", "--detach", commit], clone, umask=umask)
    build = tools.python("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out)
    run([*build, str(clone)], work, umask=umask, SOURCE_DATE_EPOCH=epoch, TZ=zone)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Archives(wheel, source, clone)


def check_names(found: Archives, tags: list[str]) -> None:
    """The version is that of the tag, and the changelog tells of it. Raises Failure."""
    version = found.wheel.name.split("-")[1]
    if found.source.name != f"opkiln-{version}.tar.gz":
        raise Failure(f"{found.source.name} is not of version {version}")
    if found.wheel.name != f"opkiln-{version}-py3-none-any.whl":
        raise Failure(f"{found.wheel.name} is not a wheel for every platform")
    if wrong := [tag for tag in tags if tag.startswith("v") and tag != f"v{version}"]:
        raise Failure(f"the tag {wrong[0]} is on version {version}")
    changes = (found.clone / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        raise Failure(f"CHANGELOG.md has no section `## [{version}] - DATE`")
    say(f"version {version}, with its section in the changelog")


def check_contents(found: Archives) -> None:
    """Each has the package as it is in the repository, and nothing else. Raises Failure."""
    tracked = run(["git", "ls-files", "src/opkiln"], found.clone).split()
    base = found.source.name.removesuffix(".tar.gz")
    info = f"{base}.dist-info"
    with zipfile.ZipFile(found.wheel) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist()}
    expected = {path.removeprefix("src/") for path in tracked} | {f"{info}/{i}" for i in INFO}
    _same_names("the wheel", set(shipped), expected)
    with tarfile.open(found.source) as archive:
        sources = {each.name for each in archive.getmembers() if each.isfile()}
    sources = {name for name in sources if ".egg-info/" not in name}
    _same_names("the source archive", sources, {f"{base}/{i}" for i in (*tracked, *BESIDE, *MADE)})
    licence = (found.clone / "LICENSE").read_bytes()
    if shipped[f"{info}/licenses/LICENSE"] != licence:
        raise Failure("the wheel has another LICENSE")
    metadata = BytesParser().parsebytes(shipped[f"{info}/METADATA"])
    if metadata["License-Expression"] != LICENSE:
        raise Failure(f"the wheel's licence is {metadata['License-Expression']}")
    noticed = [n for n, text in shipped.items() if n.startswith("opkiln/") and NOTICE.search(text)]
    if noticed:
        raise Failure(f"these have a notice of their own: {', '.join(sorted(noticed))}")
    say(f"{len(shipped)} files in the wheel: the package, and no tests, benches or other licences")


def _same_names(where: str, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise Failure(f"{where} lacks {', '.join(missing[:10])}")
    if more := sorted(found - expected):
        raise Failure(f"{where} has {', '.join(more[:10])}, which it should not have")


def check_metadata(tools: Tools, found: Archives) -> None:
    """The package index takes it, and shows its page. Raises Failure."""
    both = [str(found.wheel), str(found.source)]
    run(tools.python("-m", "twine", "check", "--strict", *both), found.clone)
    rated = run([tools.program("pyroma"), "--min", str(10 - len(MISSED)), both[1]], found.clone)
    complaints = [line for line in rated.splitlines() if "package" in line]
    if len(complaints) != len(MISSED) or not all(map(str.__contains__, complaints, MISSED)):
        raise Failure(f"pyroma misses something else than {' and '.join(MISSED)}:\n{rated}")
    say("metadata: twine is content; pyroma misses an address and a home page, which are not there")
