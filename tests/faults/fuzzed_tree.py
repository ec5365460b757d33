"""A random tree of files that one op is built from, and random changes to it (`differential.py`).

Every header, source, binary input and archive member has a number. The built library tells which
numbers were compiled in, so two builds can be compared file by file.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fuzzed_compiler import KINDS, Compiler

from opkiln.base.model import Op, OpSpec

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

HEADERS = ("h0.h", "h1.h", "h2.h", "sub/h3.h", "h4.h", "sub/h5.h")
SOURCES = ("a.cpp", "b.cpp")
SYSTEM, PREFIX = Path("/usr/src"), "opkiln-fuzzed-"
_DATA = """
asm(".pushsection .rodata\\n.balign 4\\n.globl {name}\\n{name}: {directive}\\n.popsection");
extern "C" const int {name} __attribute__((visibility("default")));
"""


class Tree:
    """The sources of an op, and everything that its build reads.

    ``deploy`` is a link to a release, so that what is above the sources can be exchanged, too. Each
    of the search directories is a directory, a link to one, or does not exist.
    """

    def __init__(
        self, path: Path, dice: random.Random, members: list[Path], compilers: Path, kind: str = ""
    ) -> None:
        self.path = path
        self.dice = dice
        kind = kind or dice.choice([*KINDS, "", "", "", "", ""])  # most often, g++ itself
        self.compiler = Compiler(path / "compiler", kind, dice, compilers) if kind else None
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
        # Searched last; has every header, most of the time. Where this process may write there, it
        # is among the files of the system.
        self.last = path / "deploy" / "last"
        if os.access(SYSTEM, os.W_OK) and dice.random() < 0.3:
            self.last = SYSTEM / f"{PREFIX}{os.getpid()}-{path.name}"
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
        wrapped = "#ifdef WRAPPED\nWRAPPED,\n#endif\n"
        text = f'extern "C" const int numbers_{stem}[] = {{ {self._number()},\n{wrapped}{body}}};\n'
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

    @property
    def variables(self) -> dict[str, str]:
        """What a load gets in its environment."""
        return {} if self.compiler is None else self.compiler.variables

    def remove(self) -> None:
        for path in (self.path, self.last):
            shutil.rmtree(path, ignore_errors=True)

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
        if self.compiler is not None:
            found.append((self.compiler.change, 20))
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
