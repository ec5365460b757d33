"""Builds the documentation site: ``make docs``.

    .docs-venv/bin/python docs/site/build.py     # build/docs, build/site

The pages are written for a code host, where a link may lead to any file of the repository. So they
are copied first, and links are made to fit: pages that lie elsewhere come along, and so does every
other file that a page links to, text as a page of its own. The site links to no code host, and is
whole without a network. Then Zensical builds it, and any warning is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pages
from pages import DOCS, ROOT

STAGED = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".cu": "cpp", ".h": "cpp", ".sh": "bash",
              ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}  # fmt: skip
# The landing page is as wide as the window. A code host would show these lines as a table.
_LANDING = "---\nhide:\n  - navigation\n  - toc\n---\n\n"


class Stage:
    """The copy of the pages that the site is built of."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._pages = {source: page for page, source in pages.sources().items()}
        self._files: set[Path] = set()  # files and directories that pages link to

    def write(self) -> None:
        shutil.rmtree(self.target, ignore_errors=True)
        self.target.mkdir(parents=True)
        shutil.copytree(DOCS / "pictures", self.target / "pictures")
        for asset in (DOCS / "site").glob("*.*"):
            if asset.suffix in (".css", ".svg"):
                shutil.copy(asset, self.target)
        for source, page in self._pages.items():
            place = self.target / page
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(self._relinked(source, page))
        for file in self._files:
            self._write_file(file)

    def _relinked(self, source: Path, page: str) -> str:
        text = source.read_text()
        head = _LANDING if page == "index.md" else ""
        for link in reversed(pages.links(text)):
            if link.path:
                goal = self._goal((source.parent / link.path).resolve())
                relative = os.path.relpath(goal, Path(page).parent)
                anchored = f"{relative}#{link.anchor}" if link.anchor else relative
                text = text[: link.start] + anchored + text[link.end :]
        return head + text

    def _goal(self, file: Path) -> str:
        """Where a file is in the site. One that is no page and no picture is added to it."""
        if file in self._pages:
            return self._pages[file]
        if file.is_relative_to(DOCS):
            return str(file.relative_to(DOCS))
        self._files.add(file)
        place = f"files/{file.relative_to(ROOT)}"
        return place if file.suffix == ".json" else f"{place}.md"

    def _write_file(self, file: Path) -> None:
        place = self.target / self._goal(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".json":
            shutil.copy(file, place)
            return
        name = file.relative_to(ROOT)
        listed = subprocess.run(
            ["git", "ls-files", "--", str(name)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )  # not what compilers and interpreters left there
        shown = [_shown(ROOT / each) for each in listed.stdout.splitlines()]
        place.write_text(
            f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n"
            "A file of the repository, as it was when this site was built.\n\n" + "\n".join(shown)
        )


def _shown(file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    text = file.read_text()
    fence = "````" if "```" in text else "```"
    return f"## `{file.relative_to(ROOT)}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def main() -> int:
    Stage(STAGED).write()
    zensical = Path(sys.executable).with_name("zensical")
    argv = [str(zensical), "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    return subprocess.run(argv, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
