"""``opkiln ninja``: ninja's compiles and links from the store, everything else as it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample.ninja_project import RULES, Project, needs_ninja, servers

from opkiln.compat.ninja import front
from opkiln.store import entry

pytestmark = needs_ninja

MAIN = '#include <stdio.h>\n#include "a.h"\nint main(void) { printf("%d\\n", A); return 0; }\n'
GRAPH = "build main.o: cc main.c\nbuild app: link main.o\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A program of one source and one header."""
    return Project(tmp_path / "one", GRAPH, main__c=MAIN, a__h="#define A 1\n")


def objects(cache: Path) -> list[Path]:
    """The store's entries of commands."""
    return sorted(cache.glob("v1/objects/*/*/*"))


def test_a_clean_build_takes_everything_from_the_store(project: Project) -> None:
    first = project.build()
    assert (first.hits, first.misses) == ([], ["app", "main.c"]), first.output
    assert project.is_done()
    project.clean()
    again = project.build()
    assert (again.hits, again.misses) == (["app", "main.c"], []), again.output
    assert again.output == first.output
    assert project.run("app") == "1\n"
    assert os.access(project.path / "app", os.X_OK)
    assert not os.access(project.path / "main.o", os.X_OK)
    assert project.is_done()


def test_a_build_with_nothing_to_do_starts_no_server(project: Project, cache: Path) -> None:
    project.build()
    before = objects(cache)
    done = project.build()
    assert "no work to do" in done.output
    assert (done.hits, done.misses) == ([], [])
    assert objects(cache) == before


def test_a_header_edited_and_back(project: Project) -> None:
    project.build()
    project.write("a.h", "#define A 2\n")
    edited = project.build()
    assert edited.misses == ["app", "main.c"], edited.output
    assert project.run("app") == "2\n"
    project.write("a.h", "#define A 1\n")
    back = project.build()
    assert (back.hits, back.misses) == (["app", "main.c"], [])
    assert project.run("app") == "1\n"
    assert project.is_done()


def test_a_header_that_appears_in_front_of_another(tmp_path: Path) -> None:
    """ninja's depfile does not name it; the look-ups that failed do."""
    graph = RULES.replace("-I.", "-Ifirst -Isecond") + "build main.o: cc main.c\n"
    project = Project(tmp_path / "one", main__c=MAIN)
    project.write("build.ninja", graph)
    project.write("second/a.h", "#define A 1\n")
    (project.path / "first").mkdir()
    project.build()
    project.write("first/a.h", "#define A 2\n")
    project.clean()
    assert project.build().misses == ["main.c"]


def test_a_generated_header(tmp_path: Path) -> None:
    graph = "build a.h: copy a.in\nbuild main.o: cc main.c | a.h\nbuild app: link main.o\n"
    project = Project(tmp_path / "one", graph, main__c=MAIN)
    project.write("a.in", "#define A 1\n")
    project.build()
    project.clean()
    again = project.build()
    assert (again.hits, again.misses) == (["app", "main.c"], []), again.output
    project.write("a.in", "#define A 3\n")
    project.build()
    assert project.run("app") == "3\n"
    project.write("a.in", "#define A 1\n")
    assert project.build().misses == []
    assert project.run("app") == "1\n"


def test_another_directory_hits_and_its_depfile_and_messages_name_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        project = Project(
            tmp_path / name, main__c=MAIN + "static int unused;\n", a__h="#define A 1\n"
        )
        rule = RULES.replace("-I.", f"-I{project.path}").replace("  deps = gcc\n", "")
        project.write("build.ninja", f"{rule}build main.o: cc {project.path}/main.c\n")
        done = project.build()
        assert f"{project.path}/main.c:" in done.output
        assert f"{project.path}/a.h" in (project.path / "main.o.d").read_text()
        assert project.is_done()
    assert (done.hits, done.misses) == (["main.c"], [])


def test_an_object_with_the_directory_in_it_serves_that_directory_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        project = Project(tmp_path / name, main__c=MAIN, a__h="#define A 1\n")
        project.write("build.ninja", RULES.replace("-Wall", "-g") + "build main.o: cc main.c\n")
        assert project.build().misses == ["main.c"]
        project.clean()
        assert project.build().hits == ["main.c"]
        assert os.fsencode(project.path) in (project.path / "main.o").read_bytes()


def test_path_spelled_differently_hits_and_another_compiler_on_it_misses(
    project: Project, tmp_path: Path
) -> None:
    project.build()
    project.clean()
    empty = tmp_path / "empty"
    empty.mkdir()
    path = os.environ["PATH"]
    assert project.build(PATH=f"{empty}:{path}:{empty}/:").misses == []
    project.clean()
    (empty / "gcc").symlink_to(shutil.which("gcc") or "")
    assert project.build(PATH=f"{empty}:{path}").hits == []


def test_another_compiler_behind_the_same_name_misses(tmp_path: Path) -> None:
    project = Project(tmp_path / "one", main__c="int f(void) { return A; }\n")
    tool = tmp_path / "bin" / "gcc"
    tool.parent.mkdir()
    real = shutil.which("gcc")
    project.write("build.ninja", RULES.replace("gcc ", f"{tool} ") + "build main.o: cc main.c\n")
    contents = []
    for number in (1, 2, 1):
        tool.write_text(f'#!/bin/sh\nexec {real} -DA={number} "$@"\n')
        tool.chmod(0o755)
        time.sleep(0.03)
        project.clean()
        done = project.build()
        contents.append((project.path / "main.o").read_bytes())
    assert done.hits == ["main.c"]
    assert contents[0] == contents[2] != contents[1]


def test_a_variable_that_compilers_read_is_in_the_key(project: Project, tmp_path: Path) -> None:
    project.build()
    project.clean()
    (tmp_path / "more").mkdir()
    assert project.build(CPATH=str(tmp_path / "more")).hits == []


def test_two_outputs(tmp_path: Path) -> None:
    command = "gcc -c main.c -save-temps=obj -o main.o"
    graph = f"rule both\n  command = {command}\nbuild main.o main.i: both main.c\n"
    project = Project(tmp_path / "one", graph, main__c=MAIN, a__h="#define A 1\n")
    project.build()
    text = (project.path / "main.i").read_text()
    for name in ("main.o", "main.i", "main.s"):
        (project.path / name).unlink()
    assert project.build().hits == ["main.c"]
    assert (project.path / "main.i").read_text() == text
    assert (project.path / "main.s").exists()
    assert project.is_done()


def test_an_archive_with_a_member_less(tmp_path: Path) -> None:
    """ar keeps what is in an old archive: a fresh one has what its command says."""
    project = Project(tmp_path / "one", a__c="int a;\n", b__c="int b;\n")
    objects = "build a.o: cc a.c\nbuild b.o: cc b.c\n"
    project.write("build.ninja", f"{RULES}{objects}build lib.a: ar a.o b.o\n")
    project.build()
    project.write("build.ninja", f"{RULES}{objects}build lib.a: ar a.o\n")
    assert project.build().misses == ["lib.a"]
    members = subprocess.run(
        ["ar", "t", project.path / "lib.a"], capture_output=True, text=True, check=True
    )
    assert members.stdout == "a.o\n"


def test_response_files(tmp_path: Path) -> None:
    graph = (
        "rule rsp\n  command = gcc @$out.rsp -o $out\n  rspfile = $out.rsp\n"
        "  rspfile_content = $in_newline\n"
    )
    project = Project(
        tmp_path / "one", f"{graph}build main.o: cc main.c\nbuild app: rsp main.o\n",
        main__c=MAIN, a__h="#define A 1\n",
    )  # fmt: skip
    project.build()
    assert project.run("app") == "1\n"
    project.clean()
    assert project.build().misses == []
    assert project.run("app") == "1\n"
    assert not (project.path / "app.rsp").exists()


def test_a_rule_with_restat_keeps_what_comes_after_it_up_to_date(tmp_path: Path) -> None:
    graph = (
        "rule keep\n  command = cmp -s $in $out || cp $in $out\n  restat = 1\n"
        "build a.h: keep a.in\nbuild main.o: cc main.c | a.h\n"
    )
    project = Project(tmp_path / "one", graph, main__c=MAIN)
    project.write("a.in", "#define A 1\n")
    project.build()
    project.write("a.in", "#define A 1\n")
    done = project.build()
    assert (done.hits, done.misses) == ([], [])
    assert project.is_done()


def test_pools_and_the_console(tmp_path: Path) -> None:
    graph = (
        "pool one\n  depth = 1\nrule say\n  command = echo said\n  pool = console\n"
        "rule slow\n  command = gcc -I. -c $in -o $out\n  pool = one\n"
        "build a.o: slow a.c\nbuild b.o: slow b.c\nbuild said: say\n"
    )
    project = Project(tmp_path / "one", graph, a__c="int a;\n", b__c="int b;\n")
    assert "said" in project.build().output
    project.clean()
    done = project.build()
    assert done.hits == ["a.c", "b.c"]
    assert "said" in done.output


def test_warnings_are_shown_again(project: Project) -> None:
    project.write("main.c", MAIN + "static int unused;\n")
    first = project.build()
    assert "defined but not used" in first.output
    project.clean()
    again = project.build()
    assert again.hits == ["app", "main.c"]
    assert again.output == first.output


def test_many_warnings_are_shown_again_whole(project: Project) -> None:
    lines = "".join(f"static int unused{number};\n" for number in range(1000))
    project.write("main.c", MAIN + lines)
    first = project.build()
    assert len(first.output) > 100_000
    project.clean()
    again = project.build()
    assert again.hits == ["app", "main.c"]
    assert again.output == first.output


def test_a_large_output_is_put_in_place_by_another_thread(tmp_path: Path) -> None:
    source = "char large[4 << 20] = {1};\n"
    project = Project(tmp_path / "one", "build large.o: cc large.c\n", large__c=source)
    project.build()
    data = (project.path / "large.o").read_bytes()
    project.clean()
    assert project.build().hits == ["large.c"]
    assert (project.path / "large.o").read_bytes() == data
    assert project.is_done()


@pytest.mark.parametrize("through", [True, False])
def test_a_failing_edge_fails_each_time_as_with_plain_ninja(
    project: Project, through: bool
) -> None:
    project.write("main.c", "int main(void) { return B; }\n")
    for _ in range(2):
        if through:
            done = project.build()
            status, output = done.status, done.output
            assert not done.hits
        else:
            found = project.plain()
            status, output = found.returncode, found.stdout
        assert status == 1
        assert "FAILED: main.o" in output
        assert "undeclared" in output
        assert not (project.path / "main.o").exists()
    project.write("main.c", MAIN)
    assert (project.build().status if through else project.plain().returncode) == 0


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ("build a.o: cc b.o\nbuild b.o: cc a.o\nbuild app: link a.o\n", "dependency cycle"),
        ("build a.o: cc missing.c\n", "missing and no known rule"),
        ("build a.o: cc a.c\nbuild a.o: cc b.c\n", "multiple rules generate a.o"),
    ],
)
def test_ninjas_own_errors(tmp_path: Path, graph: str, said: str) -> None:
    project = Project(tmp_path / "one", graph, a__c="int a;\n", b__c="int b;\n")
    done, plain = project.build(), project.plain()
    assert said in done.output
    assert done.status == plain.returncode == 1
    assert done.output.strip() == (plain.stdout + plain.stderr).strip()


def test_an_edge_that_writes_elsewhere_runs_each_time(tmp_path: Path, cache: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    project = Project(tmp_path / "one", a__c="int a;\n")
    project.write(
        "build.ninja",
        f"rule cc\n  command = gcc -c a.c -o a.o -Wa,-adhln={elsewhere}/list\nbuild a.o: cc a.c\n",
    )
    for _ in range(2):
        project.clean()
        (elsewhere / "list").unlink(missing_ok=True)
        assert project.build().misses == ["a.c"]
        assert (elsewhere / "list").exists()
    assert objects(cache) == []


def test_a_source_that_asks_for_the_time_is_compiled_each_time(tmp_path: Path, cache: Path) -> None:
    project = Project(tmp_path / "one", "build a.o: cc a.c\n", a__c="char* now = __TIME__;\n")
    project.build()
    assert objects(cache) == []


def test_other_commands_run_as_they_are(tmp_path: Path, cache: Path) -> None:
    graph = (
        "rule sh\n  command = gcc -c a.c -o a.o; echo $$HOME > home\nbuild home: sh a.c\n"
        "rule py\n  command = touch p && gcc -c a.c -o b.o\nbuild b.o: py a.c\n"
    )
    project = Project(tmp_path / "one", graph, a__c="int a;\n")
    done = project.build()
    assert (done.status, done.hits, done.misses) == (0, [], [])
    assert objects(cache) == []
    assert (project.path / "home").read_text() == os.environ.get("HOME", "") + "\n"


@pytest.mark.skipif(shutil.which("ccache") is None, reason="there is no ccache here")
def test_a_command_through_ccache_is_the_compilers_own(project: Project, tmp_path: Path) -> None:
    project.build()
    project.clean()
    project.write("build.ninja", RULES.replace("= gcc -Wall", "= ccache gcc -Wall") + GRAPH)
    done = project.build(CCACHE_DIR=str(tmp_path / "ccache"))
    assert (done.hits, done.misses) == (["app", "main.c"], [])


def test_eight_at_once_compile_once(tmp_path: Path, cache: Path) -> None:
    graph = "build a.o: cc a.c\nbuild b.o: cc b.c\n"
    projects = [
        Project(tmp_path / f"p{number}", graph, a__c="int a;\n", b__c="int b;\n")
        for number in range(8)
    ]
    traces = [tmp_path / f"p{number}.trace" for number in range(8)]
    running = [
        project.start("-j2", trace=trace) for project, trace in zip(projects, traces, strict=True)
    ]
    assert [each.wait(120) for each in running] == [0] * 8
    served = [Project.served(trace) for trace in traces]
    assert sorted(label for _, misses in served for label in misses) == ["a.c", "b.c"]
    assert len(objects(cache)) == 2
    assert all(project.is_done() for project in projects)


def many(tmp_path: Path, name: str) -> Project:
    sources = {f"f{number}__c": f'#include "a.h"\nint f{number} = A;\n' for number in range(12)}
    graph = "".join(f"build f{number}.o: cc f{number}.c\n" for number in range(12))
    every = " ".join(f"f{number}.o" for number in range(12))
    return Project(
        tmp_path / name, f"{graph}build all.a: ar {every}\n", a__h="#define A 1\n", **sources
    )


@pytest.mark.parametrize("whom", ["server", "ninja"])
@pytest.mark.parametrize("after", [0.05, 0.2, 0.35])
def test_a_build_that_was_killed_is_continued_by_plain_ninja(
    tmp_path: Path, whom: str, after: float
) -> None:
    project = many(tmp_path, "one")
    trace = tmp_path / "one.trace"
    running = project.start("-j2", trace=trace)
    time.sleep(0.15 + after)
    if whom == "ninja":
        running.kill()
    else:
        for pid in servers(trace):
            os.kill(pid, signal.SIGKILL)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == (-9 if whom == "ninja" else 0), output
    time.sleep(0.3)  # what a killed ninja had started goes on
    assert project.plain().returncode == 0
    assert project.is_done()
    from_nothing = many(tmp_path, "two")
    from_nothing.plain()
    for number in range(12):
        name = f"f{number}.o"
        assert (project.path / name).read_bytes() == (from_nothing.path / name).read_bytes()


def test_an_interrupt_ends_the_command_and_removes_what_it_had_half_written(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "gcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho half > out.o\nsleep 60\n")
    tool.chmod(0o755)
    project = Project(tmp_path / "one", a__c="int a;\n")
    project.write(
        "build.ninja", f"rule cc\n  command = {tool} -c a.c -o out.o\nbuild out.o: cc a.c\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "opkiln", "ninja"], cwd=project.path, env=project.environment(),
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (project.path / "out.o").exists():
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == 2 or running.returncode == 130
    assert not (project.path / "out.o").exists()


def test_what_opkiln_run_starts_gets_this_ninja(project: Project, tmp_path: Path) -> None:
    def run() -> list[str]:
        trace = tmp_path / "run.trace"
        trace.unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-m", "opkiln", "run", "sh", "-c", "ninja"], cwd=project.path,
            env=project.environment(trace), check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        return Project.served(trace)[0]

    assert run() == []
    project.clean()
    assert run() == ["app", "main.c"]


def stand_in(tmp_path: Path, source: str, *flags: str) -> Path:
    program = tmp_path / "bin" / "ninja"
    program.parent.mkdir()
    (tmp_path / "ninja.c").write_text(source)
    subprocess.run(["gcc", *flags, tmp_path / "ninja.c", "-o", program], check=True)
    return program


@pytest.mark.parametrize(
    ("flags", "why"),
    [(("-static",), "linked statically"), ((), "starts commands in a way that is not known")],
)
def test_another_ninja_runs_without_the_store_and_one_line_says_so(
    tmp_path: Path, project: Project, flags: tuple[str, ...], why: str
) -> None:
    source = (
        "#include <stdlib.h>\n#include <unistd.h>\n"
        'int main(void) { return unsetenv("A") || system("echo ran"); }\n'
    )
    program = stand_in(tmp_path, source, *flags)
    done = project.build(PATH=f"{program.parent}:{os.environ['PATH']}")
    lines = done.output.splitlines()
    assert len([line for line in lines if why in line]) == 1, done.output
    assert "ran" in lines
    assert len(lines) == 2
    assert done.status == 0


def test_without_a_ninja_there_is_an_error_with_a_hint(project: Project, tmp_path: Path) -> None:
    done = project.build(PATH=str(tmp_path))
    assert done.status == 2
    assert "there is no ninja on PATH" in done.output
    assert "hint: " in done.output


def test_a_store_that_cannot_be_written_is_no_obstacle(project: Project) -> None:
    done = project.build(
        OPKILN_CACHE_DIR="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere", OPKILN_TMPDIR="/proc"
    )
    assert done.status == 0
    assert project.run("app") == "1\n"
    assert project.is_done()


def test_an_entry_that_would_write_elsewhere_is_not_taken(project: Project, cache: Path) -> None:
    """A manifest may come from a layer of somebody else's."""
    project.build()
    target = project.path.parent / "target"
    for path in cache.glob("v1/objects/*/*/*/manifest.json"):
        manifest = entry.read_manifest(str(path.parent))
        manifest["files"][0][:2] = ["dir", "../target"]
        path.write_bytes(entry.write_manifest(manifest))
    project.clean()
    assert project.build().hits == []
    assert not target.exists()
    assert project.run("app") == "1\n"


def test_the_ninja_of_opkiln_run_is_the_plain_one_outside_of_it(project: Project) -> None:
    """CMake remembers the path of the ninja that it found."""
    done = subprocess.run(
        [f"{front.SHIM}/ninja"], cwd=project.path, capture_output=True, text=True, check=True
    )
    assert "[2/2]" in done.stdout
    assert project.is_done()
