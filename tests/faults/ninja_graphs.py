"""A differential fuzzer: in front of any ninja, a build gives what plain ninja builds from nothing.

    python tests/faults/ninja_graphs.py DIRECTORY --rounds 300 --seed 1
    python tests/faults/ninja_graphs.py DIRECTORY --command 'ninja'

It makes trees with a ``build.ninja`` (compiles with headers of their own and generated ones,
archives, links, depfiles of both kinds, response files, restat, phony and order-only inputs, two
outputs, pools) and changes them at random. After each change the tree is built by the command, and
a copy of its sources by plain ninja in the same place. Both must end alike, and then all outputs
must have the same bytes, and plain ninja must find no work to do in the tree of the command.

ninja decides by times what is out of date. Where a change does not show in times (a header in front
of another, a compiler that is no input), the outputs are removed, as people do.

The first difference ends it: the changes that led there are printed, and the exit status is 1.
``--plant`` breaks the cache on purpose, to show that it would be found.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import opkiln
from opkiln.compat.ninja import front

ROUNDS_PER_TREE = 15
TICK = 0.006  # seconds: an edit is later than what was built before
DIRECTORIES = ("inc/a", "inc/b", "inc/c")

COMPILER = """#!/bin/sh
# compiler number NUMBER
exec gcc -DSCRIPT=NUMBER "$@"
"""
GENERATOR = """#!/bin/sh
# Writes a header from a template: all but its comments.
grep -v '^//' "$1" > "$2.new"
if cmp -s "$2.new" "$2"; then rm "$2.new"; else mv "$2.new" "$2"; fi
"""
SPLITTER = """#!/bin/sh
# Two outputs from one input.
sed -n 1p "$1" > "$2" && sed -n 2p "$1" > "$3"
"""

HEAD = """ninja_required_version = 1.3
builddir = out
root = {root}
flags = {flags}
pool few
  depth = 1
rule cc_gcc
  command = $cc $flags $more -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = CC $out
rule cc_file
  command = $cc $flags $more -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
rule cc_none
  command = $cc $flags $more -c $in -o $out
  pool = few
rule generate
  command = sh tools/generate.sh $in $out
  restat = 1
rule split
  command = sh tools/split.sh $in $out
rule archive
  command = rm -f $out && ar crsD $out $in
rule link
  command = gcc -shared -o $out @$out.rsp
  rspfile = $out.rsp
  rspfile_content = $in_newline
rule link_plain
  command = gcc -shared $in -o $out
"""


class Unit(NamedTuple):
    """A compiled file."""

    number: int
    rule: str  # how its headers are told to ninja
    cc: str
    more: str  # flags of its own
    headers: tuple[int, ...]
    generated: tuple[int, ...]

    @property
    def source(self) -> str:
        return f"src/u{self.number}.{'cpp' if self.cc == 'g++' else 'c'}"

    @property
    def output(self) -> str:
        return f"out/obj/u{self.number}.o"


class Tree:
    """Sources and a build file, and changes to them."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.path = path
        self.dice = dice
        self.journal: list[str] = []
        self.variables: dict[str, str] = {}
        self._history: dict[str, list[str]] = {}
        self._flags = "-O0"
        self._search = list(DIRECTORIES)
        self._broken: dict[str, str] = {}
        path.mkdir(parents=True)
        self._headers = range(dice.randint(3, 6))
        self._templates = range(dice.randint(1, 2))
        self._units = [self._new_unit(number) for number in range(dice.randint(4, 9))]
        self._archived = dice.sample(self._units, dice.randint(1, 3))
        self._linked = "link" if dice.random() < 0.7 else "link_plain"
        self._write("tools/cc.sh", COMPILER.replace("NUMBER", "0"))
        self._write("tools/generate.sh", GENERATOR)
        self._write("tools/split.sh", SPLITTER)
        for number in self._headers:
            self._write(f"inc/b/h{number}.h", self._header(number))
        for number in self._templates:
            self._write(f"src/g{number}.in", f"#define G{number} {dice.randrange(1000)}\n")
        self._write("src/pair.in", "#define ONE 1\n#define TWO 2\n")
        for unit in self._units:
            self._write(unit.source, self._text(unit))
        self._describe()

    # What is in the files

    def _new_unit(self, number: int) -> Unit:
        dice = self.dice
        some = dice.sample(self._headers, dice.randint(1, min(3, len(self._headers))))
        return Unit(
            number,
            dice.choice(("cc_gcc", "cc_gcc", "cc_file", "cc_none")),
            dice.choice(("gcc", "gcc", "gcc", "tools/cc.sh", "$root/tools/cc.sh", "g++")),
            dice.choice(("", "", "-g", "-DMORE=1", "-Isrc")),
            tuple(sorted(some)),
            tuple(number for number in self._templates if dice.random() < 0.5),
        )

    def _header(self, number: int) -> str:
        dice = self.dice
        more = [f"#define H{number} {dice.randrange(1000)}"]
        if number + 1 < len(self._headers) and dice.random() < 0.4:
            more.append(f'#include "h{number + 1}.h"')
        if dice.random() < 0.3:
            more.append('#if __has_include("maybe.h")\n#include "maybe.h"\n#endif')
        return f"#ifndef IN{number}\n#define IN{number}\n" + "\n".join(more) + "\n#endif\n"

    def _text(self, unit: Unit) -> str:
        includes = [f'#include "h{number}.h"' for number in unit.headers]
        includes += [f'#include "gen/g{number}.h"' for number in unit.generated]
        values = [f"H{number}" for number in unit.headers]
        values += [f"G{number}" for number in unit.generated]
        if unit.generated:
            includes.append('#include "gen/one.h"')
            values.append("ONE")
        values += [str(self.dice.randrange(1000)), "MAYBE", "SCRIPT"]
        start = '#ifdef __cplusplus\nextern "C"\n#endif\n'
        known = "#ifndef MAYBE\n#define MAYBE 0\n#endif\n#ifndef SCRIPT\n#define SCRIPT 0\n#endif\n"
        body = f"const char *where{unit.number} = __FILE__;\n" if self.dice.random() < 0.2 else ""
        return (
            "\n".join(includes) + f"\n{known}{body}{start}"
            f"int unit{unit.number}(void) {{ return {' + '.join(values)}; }}\n"
        )

    def _describe(self) -> None:
        """Write the build file, if it says something else now."""
        search = " ".join(f"-I{each}" for each in (*self._search[:2], f"$root/{self._search[2]}"))
        lines = [HEAD.format(root=self.path, flags=f"{self._flags} {search} -Iout")]
        generated = []
        for number in self._templates:
            generated.append(f"out/gen/g{number}.h")
            lines.append(f"build {generated[-1]}: generate src/g{number}.in | tools/generate.sh")
        pair = "out/gen/one.h out/gen/two.h"
        lines.append(f"build {pair}: split src/pair.in | tools/split.sh")
        lines.append(f"build headers: phony {' '.join(generated)} {pair}")
        headers = sorted(
            str(each.relative_to(self.path)) for each in (self.path / "inc").rglob("*.h")
        )
        for unit in self._units:
            inputs = [unit.source]
            known = [*headers, *generated, *pair.split()] if unit.rule == "cc_none" else []
            if "cc.sh" in unit.cc:
                known.append("tools/cc.sh")
            implicit = f" | {' '.join(known)}" if known else ""
            lines.append(f"build {unit.output}: {unit.rule} {inputs[0]}{implicit} || headers")
            lines.append(f"  cc = {unit.cc}\n  more = {unit.more}")
        archived = " ".join(unit.output for unit in self._archived)
        rest = [unit.output for unit in self._units if unit not in self._archived]
        lines.append(f"build out/libsome.a: archive {archived}")
        lines.append(f"build out/all.so: {self._linked} {' '.join([*rest, 'out/libsome.a'])}")
        lines.append("build all: phony out/all.so out/gen/two.h\ndefault all\n")
        text = "\n".join(lines)
        file = self.path / "build.ninja"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)

    def _write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if name.endswith(".sh"):
            file.chmod(0o755)
        self._history.setdefault(name, []).append(text)

    # Changes

    def change(self) -> None:
        """Change something; the journal says what."""
        time.sleep(TICK)
        if self._broken:
            for name, text in self._broken.items():
                self._write(name, text)
            self._broken = {}
            self.journal.append("mended")
            return
        kinds = [
            self._edit_source, self._edit_source, self._edit_header, self._edit_header,
            self._edit_back, self._edit_back, self._touch, self._delete_some, self._delete_all,
            self._delete_all, self._change_flags, self._change_unit, self._shadow, self._unshadow,
            self._swap_headers, self._swap_directories, self._replace_compiler, self._edit_template,
            self._edit_template, self._edit_pair, self._other_members, self._move, self._break,
            self._edit_unseen, self._variable, self._maybe, self._add_unit,
        ]  # fmt: skip
        self.dice.choice(kinds)()
        self._describe()

    def _say(self, what: str) -> None:
        self.journal.append(what)

    def _edit_source(self) -> None:
        unit = self.dice.choice(self._units)
        self._write(unit.source, self._text(unit))
        self._say(f"edited {unit.source}")

    def _edit_header(self) -> None:
        file = self.dice.choice(sorted((self.path / "inc").rglob("h*.h")))
        self._write(str(file.relative_to(self.path)), self._header(int(file.stem[1:])))
        self._say(f"edited {file.name} in {file.parent.name}")

    def _edit_back(self) -> None:
        names = sorted(
            name for name, texts in self._history.items()
            if len(texts) > 1 and (self.path / name).exists()
        )  # fmt: skip
        if not names:
            self._edit_source()
            return
        name = self.dice.choice(names)
        self._write(name, self.dice.choice(self._history[name]))
        self._say(f"an earlier text of {name}")

    def _touch(self) -> None:
        name = self.dice.choice(sorted(self._history))
        if (self.path / name).exists():
            os.utime(self.path / name)
        self._say(f"touched {name}")

    def outputs(self) -> dict[str, Path]:
        return {
            str(file.relative_to(self.path)): file
            for file in (self.path / "out").rglob("*")
            if file.is_file() and not file.name.startswith(".ninja")
        }

    def _delete_some(self) -> None:
        there = self.outputs()
        for name in self.dice.sample(sorted(there), min(len(there), 3)):
            there[name].unlink()
            self._say(f"deleted {name}")

    def _delete_all(self) -> None:
        if self.dice.random() < 0.5:
            shutil.rmtree(self.path / "out", ignore_errors=True)
            self._say("deleted out")
            return
        for file in self.outputs().values():
            file.unlink()
        self._say("deleted all outputs, and left the log")

    def _change_flags(self) -> None:
        self._flags = self.dice.choice(("-O0", "-O1", "-O0 -g", "-O0 -DFLAG=1", "-O0 -fPIC"))
        self._say(f"flags {self._flags}")

    def _change_unit(self) -> None:
        place = self.dice.randrange(len(self._units))
        old = self._units[place]
        more = self.dice.choice(("", "-g", "-DMORE=2", "-DMORE='\"a b\"'", "-Isrc"))
        self._units[place] = old._replace(more=more)
        self._archived = [self._units[unit.number] for unit in self._archived]
        self._say(f"flags of {old.output}: {more}")

    def _shadow(self) -> None:
        number = self.dice.choice(self._headers)
        directory = self.dice.choice(DIRECTORIES)
        self._write(f"{directory}/h{number}.h", self._header(number))
        self._say(f"h{number}.h in {directory}")
        self._delete_all()

    def _unshadow(self) -> None:
        for number in self._headers:
            found = [each for each in DIRECTORIES if (self.path / each / f"h{number}.h").exists()]
            if len(found) > 1:
                gone = self.dice.choice(found)
                (self.path / gone / f"h{number}.h").unlink()
                self._say(f"h{number}.h is gone from {gone}")
                self._delete_all()
                return

    def _swap_headers(self) -> None:
        """Two files change their names, and keep their times."""
        found = sorted((self.path / "inc").rglob("h*.h"))
        one, other = self.dice.sample(found, 2)
        if one.stem != other.stem:
            return  # a header is found by its name, and has its macro
        between = one.with_suffix(".swap")
        one.rename(between)
        other.rename(one)
        between.rename(other)
        self._say(f"{one.name} of {one.parent.name} and {other.parent.name} swapped")
        self._delete_all()

    def _swap_directories(self) -> None:
        self.dice.shuffle(self._search)
        self._say(f"searched in {' '.join(self._search)}")

    def _replace_compiler(self) -> None:
        number = str(self.dice.randrange(5))
        self._write("tools/cc.sh", COMPILER.replace("NUMBER", number))
        self._say(f"compiler {number}")

    def _edit_template(self) -> None:
        number = self.dice.choice(self._templates)
        value = self.dice.choice((1, 2, self.dice.randrange(1000)))
        comment = f"// {self.dice.randrange(1000)}\n" if self.dice.random() < 0.5 else ""
        self._write(f"src/g{number}.in", f"{comment}#define G{number} {value}\n")
        self._say(f"template {number} says {value}{' with a comment' if comment else ''}")

    def _edit_pair(self) -> None:
        one, two = self.dice.randrange(4), self.dice.randrange(4)
        self._write("src/pair.in", f"#define ONE {one}\n#define TWO {two}\n")
        self._say(f"pair {one} {two}")

    def _other_members(self) -> None:
        self._archived = self.dice.sample(self._units, self.dice.randint(1, len(self._units) - 1))
        self._say(f"archived {' '.join(unit.output for unit in self._archived)}")

    def _move(self) -> None:
        """The same tree in another place: absolute paths of the build file change with it."""
        name = "here" if self.path.name == "there" else "there"
        self.path = self.path.rename(self.path.with_name(name))
        self._say(f"moved {name}")
        if self.dice.random() < 0.5:
            self._delete_all()

    def _break(self) -> None:
        unit = self.dice.choice(self._units)
        text = (self.path / unit.source).read_text()
        self._broken = {unit.source: text}
        (self.path / unit.source).write_text(f"{text}\nint broken( {{\n")
        self._say(f"broke {unit.source}")

    def _edit_unseen(self) -> None:
        """An edit that keeps the time of its file."""
        file = self.dice.choice(sorted((self.path / "inc").rglob("h*.h")))
        before = file.stat()
        self._write(str(file.relative_to(self.path)), self._header(int(file.stem[1:])))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        self._say(f"edited {file.name} with its old time")
        self._delete_all()

    def _variable(self) -> None:
        """Another directory to search, by a variable that gcc reads."""
        if self.variables:
            self.variables = {}
        else:
            name = self.dice.choice(("CPATH", "C_INCLUDE_PATH"))
            self.variables = {name: str(self.path / "later")}
            self._write("later/maybe.h", f"#define MAYBE {self.dice.randrange(5)}\n")
        self._say(f"variables {self.variables}")
        self._delete_all()

    def _maybe(self) -> None:
        file = self.path / "inc/c/maybe.h"
        if file.exists():
            file.unlink()
        else:
            self._write("inc/c/maybe.h", f"#define MAYBE {self.dice.randrange(5)}\n")
        self._say(f"maybe.h: {file.exists()}")
        self._delete_all()

    def _add_unit(self) -> None:
        unit = self._new_unit(len(self._units))
        self._units.append(unit)
        self._write(unit.source, self._text(unit))
        self._say(f"added {unit.source}")


class Fuzzer:
    """Rounds of changes, and the two builds after each."""

    def __init__(self, where: Path, seed: int, command: list[str], plain: str) -> None:
        self._where, self._seed = where, seed
        self._command, self._plain = command, plain
        self.variables = front.environment()  # for the command: as ``opkiln run`` has them
        self.failed = self.commands = 0

    def run(self, first: int, rounds: int) -> str:
        """What the first difference is; empty if there is none."""
        first -= first % ROUNDS_PER_TREE
        for number in range(first, first + rounds):
            if number % ROUNDS_PER_TREE == 0:
                place = self._where / f"tree{number}"
                tree = Tree(place / "here", random.Random(f"{self._seed}-{number}"))
            else:
                tree.change()
            difference = self._compare(tree)
            if difference:
                told = "\n".join(tree.journal)
                return f"round {number}, seed {self._seed}: {difference}\n{told}"
            if number % ROUNDS_PER_TREE == ROUNDS_PER_TREE - 1:
                shutil.rmtree(place)
        return ""

    def _compare(self, tree: Tree) -> str:
        done = self._build(self._command, tree, self.variables)
        aside = tree.path.with_name("aside")
        tree.path.rename(aside)
        shutil.copytree(aside, tree.path, ignore=lambda at, _: ["out"] if at == str(aside) else [])
        alone = self._build([self._plain], tree)
        expected = tree.outputs()
        told = {name: file.read_bytes() for name, file in expected.items()}
        shutil.rmtree(tree.path)
        aside.rename(tree.path)
        if (done.returncode == 0) != (alone.returncode == 0):
            return f"exit status {done.returncode}, plain {alone.returncode}\n{done.stdout}"
        if done.returncode:
            self.failed += 1
            return ""
        self.commands += len(told)
        found = tree.outputs()
        if missing := sorted(told.keys() - found.keys()):
            return f"not there: {' '.join(missing)}\n{done.stdout}"
        for name, content in told.items():
            if found[name].read_bytes() != content:
                return f"{name} differs\n{done.stdout}"
        again = self._build([self._plain, "-n", "-d", "explain"], tree)
        if "no work to do" not in again.stdout:
            return f"plain ninja finds work:\n{again.stdout}{again.stderr}"
        return ""

    def _build(
        self, command: list[str], tree: Tree, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables, **tree.variables}
        return subprocess.run(
            [*command, "-k", "0", "-j", "2"], cwd=tree.path, env=environment, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip


# Mistakes to find. Each is planted in the server, by a program that starts it in its place.
PLANTS = {
    "failed look-ups are dropped": "drop(gather.ABSENT)",
    "files that were read are dropped": "drop(gather.FILE)",
    "variables are not in the key": "prepared.variables_of_others = lambda *_, **__: ()",
    "paths in outputs are overlooked": "attempt.Attempt._place_facts = lambda *_: ()",
    "old times are kept": "kept.put_in_place = old_times",
    "the words after the first ten are not in the key": (
        "kept.Anchors.hide = lambda self, text: ' '.join(hide(self, text).split()[:10])"
    ),
}
SERVER = """
import os, sys
sys.path[:0] = [{source!r}]
from opkiln.building import attempt, gather, kept, prepared
from opkiln.compat.ninja import program
of, put, hide = gather.facts_of, kept.put_in_place, kept.Anchors.hide
def drop(*kinds):
    gather.facts_of = lambda *given: tuple(each for each in of(*given) if each.kind not in kinds)
def old_times(leaf, anchors, **more):
    made = put(leaf, anchors, **more)
    for path in made:
        os.utime(path, (1e9, 1e9))
    return made
{mistake}
program.main()
"""


def plant(directory: Path, mistake: str) -> dict[str, str]:
    """The variable that lets ninja's library start a server with a mistake."""
    program = directory / "server.py"
    directory.mkdir(parents=True, exist_ok=True)
    source = str(Path(opkiln.__file__).parents[1])
    program.write_text(SERVER.format(source=source, mistake=PLANTS[mistake]))
    return {"_OPKILN_NINJA_MAIN": str(program)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a directory to work in")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="begin with the tree of this round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--command", help="instead of opkiln ninja")
    parser.add_argument("--plain", default=shutil.which("ninja"), help="the plain ninja")
    parser.add_argument("--plant", choices=PLANTS, help="a mistake to find")
    options = parser.parse_args()
    directory = options.directory.resolve()
    command = shlex.split(options.command or "") or [f"{front.SHIM}/ninja"]
    began = time.monotonic()
    fuzzer = Fuzzer(directory, options.seed, command, options.plain)
    if options.plant:
        fuzzer.variables |= plant(directory, options.plant)
    difference = fuzzer.run(options.first, options.rounds)
    seconds = time.monotonic() - began
    print(difference or f"{options.rounds} rounds, 0 differences")
    print(f"{fuzzer.failed} of the builds failed; {fuzzer.commands} outputs; {seconds:.0f} s")
    return bool(difference)


if __name__ == "__main__":
    sys.exit(main())
