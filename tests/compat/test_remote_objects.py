"""What commands made on one machine, on others: by a remote tier, if somebody vouches for it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from sample import tiers
from sample.ninja_project import Project, needs_ninja

from opkiln.store import signing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sample.ninja_project import Built
    from sample.tiers import Place

pytestmark = needs_ninja

MAIN = '#include "a.h"\nint main(void) { return A; }\n'
GRAPH = "build main.o: cc main.c\nbuild app: link main.o\n"
ALL = ["app", "main.c"]


class Team:
    """A tier, a key, and machines with a store and a directory each."""

    def __init__(self, base: Path, ready: Path, place: Place) -> None:
        self.base, self.ready, self.place = base, ready, place
        self.key = signing.generate(str(base / "key"))
        self.other = signing.generate(str(base / "other.key"))

    def build(
        self, name: str, main: str = MAIN, header: str = "#define A 1\n", **more: str
    ) -> Built:
        """Build in a directory of this name. Its store has nothing but the compilers at first."""
        store = self.base / f"store-{name}"
        if not store.exists():
            shutil.copytree(self.ready, store)
        project = Project(self.base / name, GRAPH, main__c=main, a__h=header)
        project.clean()
        given = {"OPKILN_REMOTES": self.place.url, **self.place.variables, **more}
        return project.build(OPKILN_CACHE_DIR=str(store), **given)

    def publish(self) -> Built:
        return self.build("publisher", OPKILN_PUSH=self.key.private)

    def fetch(self, name: str = "other", **more: str) -> Built:
        return self.build(name, **{"OPKILN_TRUSTED_KEYS": self.key.key, **more})

    def blobs(self) -> list[str]:
        """The digests of what is published."""
        if self.place.server is not None:
            found = [name for name in self.place.server.files if "/cas/" in name]
        else:
            assert self.place.directory is not None
            found = list(map(str, self.place.directory.glob("cas/*")))
        return [name.rpartition("/")[2] for name in found]


@pytest.fixture(params=["directory", "web"])
def team(request: pytest.FixtureRequest, tmp_path: Path, ready: Path) -> Iterator[Team]:
    place = tiers.start(request.param, tmp_path / "tier")
    yield Team(tmp_path, ready, place)
    place.stop()


def test_another_machine_fetches_what_one_has_published(team: Team) -> None:
    first = team.publish()
    assert first.misses == ALL
    assert len(team.blobs()) == 2, first.output
    found = team.fetch()
    assert (found.hits, found.misses) == (ALL, []), found.output
    assert (team.base / "other/app").read_bytes() == (team.base / "publisher/app").read_bytes()
    again = team.fetch(OPKILN_REMOTES="file:///nowhere")
    assert (again.hits, again.misses) == (ALL, []), again.output  # they are its own now
    assert "nowhere" not in again.output


def test_another_source_or_header_is_compiled(team: Team) -> None:
    team.publish()
    header = team.fetch(header="#define A 2\n")
    assert header.misses == ALL, header.output
    source = team.fetch("third", main=MAIN.replace("A;", "A + 1;"))
    assert "main.c" in source.misses, source.output


def test_a_damaged_object_is_refused_with_a_line(team: Team) -> None:
    team.publish()
    for sha256 in team.blobs():
        team.place.alter(sha256)
    done = team.fetch()
    assert (done.status, done.misses) == (0, ALL), done.output
    assert done.output.count("its blob is refused: it has the SHA-256") == 2


def test_what_no_trusted_key_has_signed_is_refused(team: Team) -> None:
    team.publish()
    done = team.fetch(OPKILN_TRUSTED_KEYS=team.other.key)
    assert (done.status, done.misses) == (0, ALL), done.output
    assert f"it is signed by {team.key.key}" in done.output


def test_without_trust_no_tier_is_asked(team: Team) -> None:
    team.publish()
    done = team.build("other")
    assert (done.status, done.misses) == (0, ALL), done.output
    assert done.output.count("no tier of OPKILN_REMOTES is asked") == 1


def test_a_tier_that_is_down_costs_one_line(tmp_path: Path, ready: Path) -> None:
    place = tiers.start("web", tmp_path / "tier")
    place.stop()
    team = Team(tmp_path, ready, place)
    done = team.fetch()
    assert (done.status, done.misses) == (0, ALL), done.output
    assert done.output.count("is not used from now on") == 1
    published = team.build("third", OPKILN_PUSH=team.key.private)
    assert (published.status, published.misses) == (0, ALL), published.output
    assert published.output.count("is not used from now on") == 1
