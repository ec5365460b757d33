"""A differential fuzzer: after any change, the cache serves what an empty cache builds.

    python tests/faults/differential.py DIRECTORY --rounds 5000 --seed 1

It makes trees of sources, headers, links, search directories, binary inputs and archives (``Tree``)
and changes them at random, also while they are built, and with clocks that are wrong. After each
round two fresh processes load the op: one from the cache that has seen everything so far, one from
an empty cache. Their answers must be equal: every header and every binary input has a number, and
an answer is the list of the numbers that were compiled in, in order. Where one is an error, so is
the other.

The first difference ends it: the changes that led there are printed, and the exit status is 1.
``--plant`` breaks opkiln on purpose, to show that it would be found.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from opkiln.decision.terms import Request
from opkiln.errors import OpkilnError
from opkiln.loading import loader
from opkiln.model import Op, OpSpec
from opkiln.observing import inputs, observer

if TYPE_CHECKING:
    from collections.abc import Callable

HEADERS = ("h0.h", "h1.h", "h2.h", "sub/h3.h", "h4.h", "sub/h5.h")
SOURCES = ("a.cpp", "b.cpp")
ROUNDS_PER_TREE = 25
_DATA = """
asm(".pushsection .rodata\\n.balign 4\\n.globl {name}\\n{name}: {directive}\\n.popsection");
extern "C" const int {name} __attribute__((visibility("default")));
"""


class Tree:
    """The sources of an op, and everything that its build reads.

    ``deploy`` is a link to a release, so that what is above the sources can be exchanged, too. Each
    of the search directories is a directory, a link to one, or does not exist.
    """

    def __init__(self, path: Path, dice: random.Random, members: list[Path]) -> None:
        self.path = path
        self.dice = dice
        self.members = members  # object files; the number that each returns is its place here
        self.journal: list[str] = []
        self._numbers = itertools.count(100_000)  # all texts have the same length
        self._names = itertools.count()
        self._texts: dict[Path, list[str]] = {}
        release = path / "releases" / "first"
        (release / "src").mkdir(parents=True)
        (path / "deploy").symlink_to("releases/first")
        self.root = path / "deploy" / "src"
        self.searched = [path / "deploy" / f"inc{number}" for number in range(4)]
        self.last = path / "deploy" / "last"  # searched last; has every header, most of the time
        self.archives = [path / "deploy" / f"lib{number}" for number in range(2)]
        self.data = path / "deploy" / "data.bin"
        self.assembly = path / "deploy" / "data.s"
        self._describe()
        self._fill()

    def _describe(self) -> None:
        """What stays as it is: the declaration, and what each header includes."""
        dice = self.dice
        below = {name: HEADERS[place + 1 :] for place, name in enumerate(HEADERS)}
        self.includes = {
            name: [self._directive(each) for each in later if dice.random() < 0.3]
            for name, later in below.items()
        }
        self.sources = {
            name: [self._directive(each) for each in HEADERS if dice.random() < 0.6]
            for name in SOURCES[: dice.randint(1, 2)]
        }
        self.has_data = dice.random() < 0.4
        self.has_assembly = dice.random() < 0.2
        self.has_archive = dice.random() < 0.4
        flags = ("-I{}", "-isystem{}", "-iquote{}", "-idirafter{}", "-isystem {}")
        self.flags = [dice.choice(flags) for _ in self.searched]
        self.declared = [dice.random() < 0.5 for _ in self.searched]

    def _directive(self, name: str) -> str:
        """The lines that include a header, or what else they say if it is missing."""
        spelled = self.dice.choice([f'"{name}"', f"<{name}>"])
        kind = self.dice.random()
        if kind < 0.5:
            return f"#include {spelled}\n"
        if kind < 0.75:
            return f"#if __has_include({spelled})\n#include {spelled}\n#else\n-1,\n#endif\n"
        macro = f"WANTED{next(self._names)}"
        return (
            f"#define {macro} {spelled}\n"
            f"#if __has_include({macro})\n#include {macro}\n#else\n-2,\n#endif\n"
        )

    def _fill(self) -> None:
        for directory in self.searched:
            kind = self.dice.random()
            if kind < 0.6:
                directory.mkdir()
            elif kind < 0.8:
                self._directory_link(directory)
        for name in HEADERS:
            for directory in (*self.dice.sample(self.searched, 2), self.last):
                if directory.is_dir() or directory is self.last:
                    self._write(directory / name, self._header(name))
        for name, lines in self.sources.items():
            self._write(self.root / name, self._source(name, lines))
        self._write_number(self.data)
        self._write(self.assembly, self._assembly())
        for directory in self.archives:
            if directory is self.archives[-1] or self.dice.random() < 0.5:
                directory.mkdir()
                self._archive(directory)

    def op(self) -> Op:
        """The declaration, as an author would write it."""
        flags: list[str] = []
        for directory, flag, declared in zip(self.searched, self.flags, self.declared, strict=True):
            flags += [] if declared else flag.format(directory).split(" ")
        both = zip(self.searched, self.declared, strict=True)
        directories = [str(directory) for directory, declared in both if declared]
        flags += ["-idirafter", str(self.last)]
        linked = [f"-L{directory}" for directory in self.archives] + ["-linner"]
        return Op(OpSpec("op", "fuzzed", str(self.root), tuple(self.sources), tuple(directories),
                         tuple(flags), tuple(linked) if self.has_archive else (),
                         kind="plain", abi="none"))  # fmt: skip

    def answer(self, library: str) -> list[int]:
        """The numbers that a library was made from."""
        opened = ctypes.CDLL(library)
        found: list[int] = []
        for name in self.sources:
            stem = name.partition(".")[0]
            length = ctypes.c_int.in_dll(opened, f"length_{stem}").value
            found += (ctypes.c_int * length).in_dll(opened, f"numbers_{stem}")
        if self.has_archive:
            found.append(opened.archived())
        for name, there in (("data", self.has_data), ("assembled", self.has_assembly)):
            if there:
                found.append(ctypes.c_int.in_dll(opened, name).value)
        return found

    # Texts

    def _number(self) -> int:
        return next(self._numbers)

    def _header(self, name: str) -> str:
        return f"{self._number()},\n{''.join(self.includes[name])}"

    def _assembly(self) -> str:
        return f".long {self._number()}\n"

    def _source(self, name: str, lines: list[str]) -> str:
        stem = name.partition(".")[0]
        body = "".join(lines)
        text = f'extern "C" const int numbers_{stem}[] = {{ {self._number()},\n{body}}};\n'
        text += f'extern "C" const int length_{stem} = sizeof numbers_{stem} / sizeof(int);\n'
        if name == SOURCES[0]:
            if self.has_archive:
                text += 'int inner();\nextern "C" int archived() { return inner(); }\n'
            if self.has_data:
                text += _DATA.format(name="data", directive=f'.incbin \\"{self.data}\\"')
            if self.has_assembly:
                text += _DATA.format(name="assembled", directive=f'.include \\"{self.assembly}\\"')
        return text

    # Files

    def _write(self, path: Path, text: str) -> None:
        """Write a file in one of the ways in which editors and tools do."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        old = path.stat() if path.exists() else None
        self._texts.setdefault(path, []).append(text)
        in_place = self.dice.random() < 0.5  # through a link, if it leads to a file
        if in_place and (old is not None or not path.is_symlink()):
            path.write_text(text)
        else:
            fresh = path.with_name(f".fresh{next(self._names)}")
            fresh.write_text(text)
            fresh.replace(path)
        kind = self.dice.random()
        if kind < 0.3 and old is not None:
            os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        elif kind < 0.4:
            long_ago_or_ahead = time.time() + self.dice.choice([-1e8, 1e8])
            os.utime(path, (long_ago_or_ahead, long_ago_or_ahead))

    def _write_number(self, path: Path) -> None:
        data = self._number().to_bytes(4, sys.byteorder)
        if self.dice.random() < 0.5 or path.is_symlink():
            path.write_bytes(data)
        else:
            target = path.with_name(f"data{next(self._names)}")
            target.write_bytes(data)
            self._link(path, target.name)

    def _link(self, path: Path, target: str) -> None:
        """Make a link, or lead it elsewhere, in one step or in two."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        if self.dice.random() < 0.5:
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        else:
            fresh = path.with_name(f".fresh{next(self._names)}")
            fresh.symlink_to(target)
            fresh.replace(path)

    def _directory_link(self, directory: Path) -> None:
        target = directory.with_name(f"dir{next(self._names)}")
        target.mkdir()
        self._link(directory, target.name)

    def _archive(self, directory: Path) -> None:
        """libinner.a in one of the forms that a linker takes."""
        directory.mkdir(exist_ok=True)
        path = directory / "libinner.a"
        member = directory / f"member{self.dice.randrange(2)}.o"
        shutil.copyfile(self.dice.choice(self.members), member)
        path.unlink(missing_ok=True)
        kind = self.dice.choice(["rc", "rcT", "INPUT"])
        if kind == "INPUT":
            path.write_text(f"INPUT({member})\n")
        else:
            subprocess.run(["ar", kind, path.name, member.name], cwd=directory, check=True)

    # Changes. Each says what it did.

    def change(self) -> None:
        """Make one random change."""
        what: Callable[[], str] = self.dice.choices(*zip(*self._changes(), strict=True))[0]
        self.journal.append(what())

    def exchange(self) -> None:
        """Let paths lead to files that have been there for long: no time tells of it."""
        self.journal.append(self.dice.choice([self._exchange, self._deploy])())

    def _changes(self) -> list[tuple[Callable[[], str], int]]:
        found = [
            (self._edit, 8), (self._add, 6), (self._remove, 4), (self._link_header, 4),
            (self._dangle, 3), (self._edit_source, 2), (self._exchange, 3), (self._deploy, 2),
            (self._toggle_directory, 4), (self._lead_elsewhere, 3), (self._put_back, 3),
            (self._touch, 3), (self._litter, 3), (self._become_directory, 2), (self._reorder, 1),
            (self._beside_source, 2),
        ]  # fmt: skip
        if self.has_data or self.has_assembly:
            found.append((self._edit_data, 5))
        if self.has_archive:
            found += [(self._edit_archive, 4), (self._edit_member, 3), (self._drop_archive, 2)]
        return found

    def _some_header(self) -> Path | None:
        directories = [*self.searched, *([self.last] if self.dice.random() < 0.3 else [])]
        there = [directory / name for directory in directories for name in HEADERS
                 if (directory / name).is_file()]  # fmt: skip
        return self.dice.choice(there) if there else None

    def _edit(self) -> str:
        path = self._some_header()
        if path is None:
            return self._add()
        name = next(each for each in HEADERS if str(path).endswith(each))
        self._write(path, self._header(name))
        return f"edit {path}"

    def _add(self) -> str:
        directory, name = self.dice.choice(self.searched), self.dice.choice(HEADERS)
        if not directory.is_dir():
            directory.unlink(missing_ok=True)
        self._write(directory / name, self._header(name))
        return f"add {directory / name}"

    def _beside_source(self) -> str:
        path = self.root / self.dice.choice(HEADERS)
        if path.exists():
            path.unlink()
            return f"remove {path}"
        self._write(path, self._header(str(path.relative_to(self.root))))
        return f"add {path}"

    def _remove(self) -> str:
        path = self._some_header()
        if path is None or (self.last in path.parents and self.dice.random() < 0.8):
            return self._add()
        path.unlink()
        return f"remove {path}"

    def _link_header(self) -> str:
        path = self._some_header()
        if path is None:
            return self._add()
        name = next(each for each in HEADERS if str(path).endswith(each))
        target = self.path / "versions" / f"v{next(self._names)}.h"
        self._write(target, self._header(name))
        if self.dice.random() < 0.3:  # a link to a link
            way = target.with_name(f"way{next(self._names)}")
            way.symlink_to(target.name)
            target = way
        self._link(path, str(target))
        return f"link {path} to {target}"

    def _dangle(self) -> str:
        """A link that leads nowhere; or make the target of one that is there."""
        paths = [directory / name for directory in self.searched for name in HEADERS]
        broken = [path for path in paths if path.is_symlink() and not path.exists()]
        if broken:
            path = self.dice.choice(broken)
            name = next(each for each in HEADERS if str(path).endswith(each))
            target = path.parent / os.readlink(path)
            self._write(target, self._header(name))
            return f"make {target}, which {path} leads to"
        directory, name = self.dice.choice(self.searched), self.dice.choice(HEADERS)
        if not directory.is_dir():
            return self._add()
        (directory / name).parent.mkdir(exist_ok=True)
        self._link(directory / name, str(self.path / "later" / f"t{next(self._names)}.h"))
        return f"link {directory / name} to nowhere"

    def _edit_source(self) -> str:
        name = self.dice.choice(list(self.sources))
        self._write(self.root / name, self._source(name, self.sources[name]))
        return f"edit {name}"

    def _exchange(self) -> str:
        """Exchange two search directories."""
        one, two = self.dice.sample(self.searched, 2)
        aside = one.with_name(f"aside{next(self._names)}")
        for source, target in ((one, aside), (two, one), (aside, two)):
            if os.path.lexists(source):
                source.rename(target)
        return f"exchange {one.name} and {two.name}"

    def _deploy(self) -> str:
        """A new release, which has other files; or one of the older ones."""
        releases = self.path / "releases"
        older = sorted(each.name for each in releases.iterdir())
        if len(older) > 2 or self.dice.random() < 0.2:
            name = self.dice.choice(older)
        else:
            name = f"r{next(self._names)}"
            shutil.copytree(self.path / "deploy", releases / name, symlinks=True)
            for directory in self.searched:
                for header in HEADERS:
                    path = releases / name / directory.name / header
                    if path.is_file() and not path.is_symlink() and self.dice.random() < 0.3:
                        path.write_text(self._header(header))
        self._link(self.path / "deploy", f"releases/{name}")
        return f"deploy {name}"

    def _toggle_directory(self) -> str:
        """Make a search directory that does not exist, or remove one."""
        directory = self.dice.choice(self.searched)
        if directory.is_symlink():
            directory.unlink()
            return f"remove the link {directory}"
        if directory.exists():
            shutil.rmtree(directory)
            return f"remove {directory}"
        for name in self.dice.sample(HEADERS, 2):
            self._write(directory / name, self._header(name))
        return f"make {directory}"

    def _lead_elsewhere(self) -> str:
        """A search directory becomes a link to another, with some of its headers changed."""
        directory = self.dice.choice(self.searched)
        target = directory.with_name(f"dir{next(self._names)}")
        if directory.is_dir():
            shutil.copytree(directory, target, symlinks=True)
        else:
            target.mkdir()
        name = self.dice.choice(HEADERS)
        self._write(target / name, self._header(name))
        self._link(directory, target.name)
        return f"link {directory} to {target.name}"

    def _put_back(self) -> str:
        """An older text of a file."""
        path = self.dice.choice(list(self._texts))
        if not path.parent.is_dir():
            return self._edit()
        self._write(path, self.dice.choice(self._texts[path]))
        return f"put back {path}"

    def _touch(self) -> str:
        path = self._some_header() or self.root / SOURCES[0]
        os.utime(path)
        return f"touch {path}"

    def _litter(self) -> str:
        """A file that nobody reads, in a directory that is searched."""
        directory = self.dice.choice([*self.searched, self.root, *self.archives, self.path])
        if not directory.is_dir():
            return self._edit()
        (directory / f"notes{next(self._names)}.txt").touch()
        return f"litter in {directory}"

    def _become_directory(self) -> str:
        """A header becomes a directory, which compilers pass by."""
        path = self._some_header()
        if path is None or self.last in path.parents:
            return self._add()
        path.unlink()
        path.mkdir()
        return f"directory {path}"

    def _reorder(self) -> str:
        self.dice.shuffle(self.flags)
        self.dice.shuffle(self.declared)
        return "other flags"

    def _edit_data(self) -> str:
        if self.has_assembly and self.dice.random() < 0.5:
            self._write(self.assembly, self._assembly())
            return f"edit {self.assembly}"
        self._write_number(self.data)
        return f"edit {self.data}"

    def _edit_archive(self) -> str:
        directory = self.dice.choice(self.archives)
        self._archive(directory)
        return f"edit {directory}/libinner.a"

    def _edit_member(self) -> str:
        directory = self.dice.choice(self.archives)
        if not directory.is_dir():
            return self._edit_archive()
        member = directory / f"member{self.dice.randrange(2)}.o"
        shutil.copyfile(self.dice.choice(self.members), member)
        return f"edit {member}"

    def _drop_archive(self) -> str:
        path = self.archives[0] / "libinner.a"
        path.unlink(missing_ok=True)
        return f"remove {path}"


class Fuzzer:
    """Rounds of changes, and the two answers after each."""

    def __init__(self, where: Path, seed: int) -> None:
        self._where = where
        self._seed = seed
        self._dice = random.Random(seed)
        self._known = where / "known"  # a cache that knows the compilers and nothing else
        self._members = self._compile_members(where)
        self._stages = where / "stages"
        self._stages.mkdir(0o700)
        self.errors = 0
        self._first_answer()

    def run(self, first: int, rounds: int) -> str:
        """What the first difference is; empty if there is none."""
        first -= first % ROUNDS_PER_TREE
        for number in range(first, first + rounds):
            if number % ROUNDS_PER_TREE == 0:
                directory = self._where / f"tree{number}"
                tree = Tree(directory, random.Random(f"{self._seed}-{number}"), self._members)
                cache = self._cache(directory.with_suffix(".cache"))
                self._ahead = 0.0
            difference = self._round(tree, cache)
            if difference:
                told = "\n".join(tree.journal)
                return f"round {number}, seed {self._seed}: {difference}\n{told}"
            if number % ROUNDS_PER_TREE == ROUNDS_PER_TREE - 1:
                shutil.rmtree(directory)
                shutil.rmtree(cache)
        return ""

    def _round(self, tree: Tree, cache: Path) -> str:
        dice = tree.dice
        if dice.random() < 0.2:
            self._ahead = dice.choice([0.0, 0.0, 3600.0, -3600.0, 1e8])
            tree.journal.append(f"the clock is {self._ahead:+.0f} s")
        if dice.random() < 0.35:
            self._change_during_a_build(tree, cache)
        else:
            for _ in range(dice.randint(1, 3)):
                tree.change()
        served = self._load(tree, cache)
        if dice.random() < 0.3:  # a second load finds what the first has written down
            again = self._load(tree, cache)
            if again != served:
                return f"first {served}, then {again}"
        empty = self._cache(cache.with_suffix(".empty"))
        built = self._load(tree, empty)
        shutil.rmtree(empty)
        tree.journal.append(f"    = {built}")
        self.errors += isinstance(built, str)
        if served == built or (isinstance(served, str) and isinstance(built, str)):
            return ""
        return f"served {served}, an empty cache builds {built}"

    def _change_during_a_build(self, tree: Tree, cache: Path) -> None:
        tree.change()
        loading = self._start(tree, cache)
        while not any(self._stages.iterdir()):  # no build has begun
            if select.select([loading[1]], [], [], 0.002)[0]:
                break  # nor will it: this was a hit
        time.sleep(tree.dice.uniform(0, 0.3))
        tree.journal.append("during the build that follows the last change:")
        if tree.dice.random() < 0.3:
            tree.exchange()
        for _ in range(tree.dice.randint(1, 2)):
            tree.change()
        self._finish(loading)  # it saw the one, or the other, or a mixture

    def _load(self, tree: Tree, cache: Path) -> list[int] | str:
        return self._finish(self._start(tree, cache))

    def _start(self, tree: Tree, cache: Path) -> tuple[int, int]:
        """Load in a process of its own, which knows nothing of earlier loads."""
        receiving, sending = os.pipe()
        child = os.fork()
        if child:
            os.close(sending)
            return child, receiving
        os.close(receiving)
        status = 1
        try:
            os.environ["OPKILN_CACHE_DIR"] = str(cache)
            os.environ["OPKILN_TMPDIR"] = str(self._stages)
            _set_clock(self._ahead)
            with os.fdopen(sending, "w") as file:
                try:
                    artifact, _ = loader.obtain(Request(tree.op()))
                    json.dump(tree.answer(artifact.path), file)
                except (OpkilnError, OSError) as error:
                    json.dump(f"{type(error).__name__}: {error}", file)
            status = 0
        finally:
            os._exit(status)

    def _finish(self, loading: tuple[int, int]) -> list[int] | str:
        child, receiving = loading
        with os.fdopen(receiving) as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"a load ended with status {status}")
        answer: list[int] | str = json.loads(text)
        return answer

    def _cache(self, path: Path) -> Path:
        """An empty cache that knows the compilers."""
        path.mkdir(0o700)
        if self._known.exists():
            (path / "v1").mkdir(0o700)
            shutil.copytree(self._known / "v1" / "toolchains", path / "v1" / "toolchains")
            (path / "v1" / "toolchains").chmod(0o700)
        return path

    def _first_answer(self) -> None:
        self._ahead = 0.0
        dice = random.Random(0)
        tree = Tree(self._where / "first", dice, self._members)
        self._known.mkdir(0o700)
        self._load(tree, self._known)
        time.sleep(2.1)  # what is remembered of a file that was just written is not believed
        self._load(tree, self._known)

    def _compile_members(self, where: Path) -> list[Path]:
        made = []
        for number in range(6):
            source = where / f"member{number}.cpp"
            source.write_text(f"int inner() {{ return {number}; }}\n")
            made.append(source.with_suffix(".o"))
            command = ["g++", "-c", "-fPIC", str(source), "-o", str(made[-1])]
            subprocess.run(command, check=True)
        return made


def _set_clock(ahead: float) -> None:
    """Let this process believe that it is later, or earlier."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + ahead
    time.time_ns = lambda: now_ns() + int(ahead * 1e9)


# Mistakes to find


def _drop_failed_lookups() -> None:
    of = inputs.of
    inputs.of = lambda *given: of(*given)._replace(absent=())


def _drop_observed_files() -> None:
    of = inputs.of
    inputs.of = lambda *given: of(*given)._replace(files=())


def _observe_nothing() -> None:
    observer.library = lambda *_: ""


PLANTS = {
    "failed look-ups are dropped": _drop_failed_lookups,
    "observed files are dropped": _drop_observed_files,
    "nothing is observed": _observe_nothing,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="an empty directory to work in")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="begin with the tree of this round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=PLANTS, help="a mistake to find")
    options = parser.parse_args()
    os.environ["OPKILN_PROGRESS"] = "off"
    os.environ["OPKILN_RUNTIME_DIR"] = str(options.directory / "run")
    if options.plant:
        PLANTS[options.plant]()
    began = time.monotonic()
    fuzzer = Fuzzer(options.directory, options.seed)
    difference = fuzzer.run(options.first, options.rounds)
    seconds = time.monotonic() - began
    print(difference or f"{options.rounds} rounds, 0 differences")
    print(f"{fuzzer.errors} of the answers were errors; {seconds:.0f} s")
    return bool(difference)


if __name__ == "__main__":
    sys.exit(main())
