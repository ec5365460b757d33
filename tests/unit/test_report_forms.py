"""A report's forms: text, JSON and Markdown of one report that has something of everything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click import unstyle
from sample.levels import X86_V4

from opkiln.accelerator.device import Answer
from opkiln.base.build_model import TorchSDK
from opkiln.decision.terms import Candidate
from opkiln.errors import StoreError
from opkiln.machine.devices import amd, nvidia
from opkiln.report import collect, compilers, facts, forms, layout, machine, operators, page
from opkiln.report.collect import PastBuild
from opkiln.run import budget
from opkiln.settings import override
from opkiln.store import inventory

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "report-json.md"
NOW = 1_800_000_000.0
MISFIT = "CUDA 12.8; torch was built with 13.0, another major version"


def backend(name: str, status: str = "cached", reason: str = "") -> operators.BackendStatus:
    candidate = Candidate("store", "taken" if status == "cached" else "refused", reason, "/store/x")
    good = status in ("cached", "would compile")
    cached = status == "cached"
    return operators.BackendStatus(name, status, False, cached, good, reason, "", (candidate,))


def op(name: str, *backends: operators.BackendStatus, **more: Any) -> operators.OpStatus:
    return operators.OpStatus(name, "sample", backends[0].backend, backends, **more)


OPS = (
    op("fast_gelu", backend("cuda"), backend("cpu", "would compile", "not built yet")),
    op("slow_gelu", backend("cuda", "would fall back", "there is no compiler for cuda")),
    operators.OpStatus("broken", "", "", (), "ImportError: no module named nothing"),
)


def filled(ops: tuple[operators.OpStatus, ...] = OPS) -> collect.Report:
    """A report of a machine with everything."""
    here = machine.Machine(
        "3.11.7", "/usr/bin/python3", "Linux", "A CPU", X86_V4, "avx512",
        machine.Space("/dev/shm", 64 << 20, 32 << 20),
        (machine.Limit("memlock", 65536, None), machine.Limit("nofile", 1024, 4096)),
        machine.Cgroup("/job", 2.5, 8 << 30, 4),
    )  # fmt: skip
    tools = (
        compilers.Tool("cpu", "/usr/bin/g++", "PATH", "g++ 12.2", True, ""),
        compilers.Tool("cpu", "clang++", "PATH", "", False, "not on PATH"),
        compilers.Tool("cuda", "/usr/local/cuda-12.8", "/usr/local/cuda-*", "12.8", False, MISFIT),
        compilers.Tool("rocm", "/opt/rocm/bin/hipcc", "/opt", "", False, "not asked", False),
    )  # fmt: skip
    found = machine.FoundDevices(
        gpus=(machine.Gpu("NVIDIA", 0, "NVIDIA H200", "9.0", 141 << 30, True),
              machine.Gpu("NVIDIA", 1, "NVIDIA H200", "9.0", 141 << 30, False)),
        drivers=(machine.Driver("NVIDIA", "580.65.06", "13.0", ""),),
        accelerator=machine.ChosenAccelerator("cuda", "2 x NVIDIA H200", ""),
        accelerators=(Answer("cuda", True, "2 x NVIDIA H200"),
                      Answer("npu", False, "torch_npu is not installed")),
        collectives=(machine.CommunicationLibrary("NCCL", "/usr/lib/libnccl.so.2.27.3", "2.27.3"),),
    )  # fmt: skip
    limits = budget.Limits((0, 1), 8 << 30, 4 << 30, "CPU affinity", "80% of the machine's memory")
    store = collect.StoreStatus(
        "/cache/v1", ("/cache/v1", "/layer/v1"), ("/shared cannot be the store: not ours",),
        inventory.Sizes(2, 4096, 3, 2048, 100), 20 << 30,
        machine.Space("/cache", 10 << 30, 1 << 30),
        (PastBuild("fast_gelu", "sample", "cuda 9.0", NOW - 60, 12.5, 900 << 20, "/cache/x"),
         PastBuild("fast_gelu", "sample", "cpu", NOW - 65, 3.0, 200 << 20, "/cache/y"),
         PastBuild("slow_gelu", "sample", "cpu", NOW - 90000, 1.0, 0, "/cache/z")),
        (PastBuild("far_gelu", "sample", "cpu", NOW, 1.0, 0, "/cache/f", "fetched from oci://host"),),
        ("oci://host/ops",),
        (inventory.HostModule("ninja", "build", 12, 4096, NOW - 30, NOW - 20, "a.cpp",
                              "a.h changed", "/project/build"),),
    )  # fmt: skip
    environment = collect.Environment(
        machine=here,
        tools=tools,
        unfound=(
            compilers.Tool("rocm", "/gone/bin/hipcc", "ROCM_HOME", "", False, "no such program"),
        ),
        torch=TorchSDK("/site/torch", "2.13.0+cu130", "abc", "13.0", None, True),
        torch_error="",
        devices=found,
        budget=budget.Description(limits, 2, "/dev/shm/opkiln-0/slots", ("/run: read-only",)),
        store=store,
        settings=(collect.SettingValue("OPKILN_ACCELERATOR", "cpu", "DS_ACCELERATOR"),
                  collect.SettingValue("OPKILN_MODE", "auto", "default"),
                  collect.SettingValue("OPKILN_STORE_LAYERS", ("/layer", "/more"), "call")),
        unknown_variables=("unknown setting OPKILN_MODEE; did you mean OPKILN_MODE?",),
        dropped_variables=("CFLAGS",),
    )  # fmt: skip
    return collect.Report("0.1.0", NOW, ops, environment, collect.problems(ops, environment))


# Text


def as_text(report: collect.Report, **how: Any) -> str:
    """The text without its colour."""
    return unstyle(forms.as_text(report, **how))


def test_the_text_says_it_all_in_words() -> None:
    said = "\n".join(" ".join(line.split()) for line in as_text(filled()).splitlines())
    for line in (
        "fast_gelu cuda no yes yes",
        "cpu no no yes not built yet",
        "slow_gelu cuda no no no there is no compiler for cuda",
        "broken - no no no ImportError: no module named nothing",
        "torch 2.13.0+cu130, CUDA 13.0, C++11 ABI",
        "cgroup /job: a quota of 2.5 CPUs, 4 CPUs, 8.0 GiB of memory",
        "/dev/shm 32.0 MiB free of 64.0 MiB",
        "limits memlock 64.0 KiB (at most unlimited), nofile 1024 (at most 4096)",
        "dropped CFLAGS (not passed to compilers)",
        "C++ /usr/bin/g++, g++ 12.2, taken (PATH)",
        f"CUDA /usr/local/cuda-12.8, 12.8, refused: {MISFIT} (/usr/local/cuda-*)",
        "ROCm /opt/rocm/bin/hipcc, not asked (/opt)",
        "SYCL none was found",
        "in force cuda",
        "cuda yes: 2 x NVIDIA H200",
        "npu no: torch_npu is not installed",
        "NVIDIA driver 580.65.06, supports CUDA up to 13.0",
        "NVIDIA GPU 0 NVIDIA H200, 9.0, 141.0 GiB",
        "NVIDIA GPU 1 NVIDIA H200, 9.0, 141.0 GiB, not visible to this process",
        "NCCL 2.27.3, /usr/lib/libnccl.so.2.27.3",
        "size 6.1 KiB of 20.0 GiB: 2 ops and 3 objects",
        "space 1.0 GiB free of 10.0 GiB",
        "last build fast_gelu for cuda 9.0, 60 s ago, in 12.50 s",
        "layer /layer/v1",
        "note /shared cannot be the store: not ours",
        "OPKILN_ACCELERATOR cpu from DS_ACCELERATOR",
        "OPKILN_STORE_LAYERS /layer:/more from call",
        "1 more at their defaults (`opkiln report --json` has all)",
        f"CUDA toolkit none can be used: /usr/local/cuda-12.8: {MISFIT}",
        "ROCM_HOME there is no /gone/bin/hipcc",
        "hint: unset ROCM_HOME",
        "settings unknown setting OPKILN_MODEE; did you mean OPKILN_MODE?",
    ):  # fmt: skip
        assert line in said.splitlines(), line


def test_every_line_is_whole_without_a_terminal_and_fits_one_that_is_narrow() -> None:
    whole = as_text(filled())
    assert max(map(len, whole.splitlines())) > 100
    for width in (60, 80, 100):
        folded = as_text(filled(), width=width)
        # Only what has no blank to be broken at may stand out.
        assert all(len(line) <= width or " " not in line.strip() for line in folded.splitlines())
        assert "".join(folded.split()) == "".join(whole.split())


def test_colour_adds_nothing_but_colour() -> None:
    plain = as_text(filled(), width=60)
    painted = forms.as_text(filled(), width=60)
    assert "\x1b[32m" in painted
    assert re.sub(r"\x1b\[\d*m", "", painted) == plain
    for line in painted.splitlines():
        # A line that begins a colour ends it: a pager shows lines by themselves.
        assert line.count("\x1b[0m") * 2 == line.count("\x1b[")


def test_a_report_without_problems_says_so_when_only_they_are_asked_for() -> None:
    fine = collect.Report("0.1.0", NOW, OPS[:1], None, ())
    assert as_text(fine, errors_only=True) == "problems\n  none"
    assert "problems" not in as_text(fine)


def test_a_word_that_is_longer_than_the_line_stays_whole() -> None:
    folded = layout.columns([("path", "/a/" + "b" * 90 + " and more")], width=40)
    assert "/a/" + "b" * 90 in folded


def test_an_empty_last_cell_is_no_line_of_its_own() -> None:
    rows = [("an_op_with_a_name", "a_backend", "yes", ""), ("x", "y", "no", "a reason")]
    lines = layout.columns(rows, indent=2, width=20).splitlines()
    assert "an_op_with_a_name" in lines[0]
    assert all(line.strip() for line in lines), lines


def test_what_would_steer_a_terminal_is_spelt_out() -> None:
    name, reason = "\x1b[2Jop", "it\x1b]0;title\x07 fails\udcff"
    report = collect.Report("1", NOW, (op(name, backend("cpu", "would fail", reason)),), None, ())
    said = as_text(report)
    assert "\\x1b[2Jop" in said
    assert "it\\x1b]0;title\\x07 fails\\udcff" in said
    assert all(line.isprintable() for line in said.splitlines())


def repeated(said: str) -> list[str]:
    """The longer statements that a text makes more than once."""
    cells = [cell for line in said.splitlines() for cell in re.split(r"  +", line.strip())]
    return sorted({cell for cell in cells if len(cell) > 20 and cells.count(cell) > 1})


def test_a_report_says_a_thing_once() -> None:
    no_driver = "there is no NVIDIA driver here, and no list of architectures is set"
    ops = tuple(
        op(name, backend("cpu", "would compile", "not built yet: its first use builds it"),
           backend("cuda", "would fall back", no_driver))
        for name in ("one", "two", "three")
    )  # fmt: skip
    report = collect.Report("1", NOW, ops, None, ())
    for width in (None, 70):
        said = as_text(report, width=width)
        assert repeated(said) == []
        assert "".join(said.split()).count("".join(no_driver.split())) == 1
    assert forms.as_markdown(report).count(no_driver) == 1
    # The number in a row is the one of its reason.
    rows = [line.split() for line in as_text(report).splitlines()]
    assert ["two", "cpu", "no", "no", "yes", "(1)"] in rows
    assert ["cuda", "no", "no", "no", "(2)"] in rows
    assert ["(2)", *no_driver.split()] in rows


def test_a_reason_of_one_op_alone_stays_in_its_row() -> None:
    said = as_text(filled())
    assert re.search(r"slow_gelu +cuda +no +no +no +there is no compiler for cuda", said)


def test_problems_that_ops_have_in_common_are_one_problem() -> None:
    reason = "no C++ compiler can be used here (g++: not on PATH)"
    ops = tuple(op(name, backend("cpu", "would fail", reason)) for name in ("one", "two", "three"))
    (found,) = collect.problems(ops, None)
    assert found == collect.Problem("3 ops", f"{reason}: one, two, three", "opkiln explain one")


def test_toolkits_that_were_not_asked_have_their_reason_said_once() -> None:
    report = filled()
    assert report.environment is not None
    why = "not asked: torch is not built for CUDA"
    tools = tuple(
        compilers.Tool("cuda", path, "PATH", "", False, why, False) for path in ("/a", "/b", "/c")
    )
    around = report.environment._replace(tools=tools)
    said = as_text(report._replace(environment=around))
    assert said.count("torch is not built for CUDA") == 1
    assert said.count("--probe") == 1


# JSON


def fields(value: Any, path: str = "") -> set[str]:
    """Every value of a document by its place, as ``ops[].backends[].status``."""
    if isinstance(value, dict):
        return {
            field
            for name, part in value.items()
            for field in fields(part, f"{path}.{name}" if path else name)
        }
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return {field for part in value for field in fields(part, f"{path}[]")}
    return {path}


DOCUMENTED = re.compile(r"^\| `([\w.\[\]]+)` \|", re.MULTILINE)


def test_the_json_is_what_the_docs_say_field_by_field() -> None:
    document = json.loads(json.dumps(forms.as_document(filled())))
    assert document["schema"] == forms.SCHEMA
    documented = set(DOCUMENTED.findall(DOCS.read_text()))
    assert fields(document) - {"ops[].backends"} == documented  # of an op that is broken, empty
    assert f"`schema` is {forms.SCHEMA}" in DOCS.read_text()


def test_a_report_of_this_machine_has_no_field_that_is_not_documented() -> None:
    found = fields(json.loads(json.dumps(forms.as_document(collect.collect()))))
    documented = set(DOCUMENTED.findall(DOCS.read_text()))
    strange = found - documented
    # An empty list, or null, stands for all that would be in it.
    assert not {each for each in strange if not any(d.startswith(each) for d in documented)}


def test_variants_in_the_same_state_share_a_row_and_a_problem() -> None:
    missing = backend("cuda", "would fall back", "there is no compiler for cuda")
    ops = (
        op("attn__HEAD_64", missing, variant_of="attn"),
        op("attn__HEAD_80", backend("cuda"), variant_of="attn"),
        op("attn__HEAD_96", missing, variant_of="attn"),
    )
    rows = facts.ops(ops).rows
    assert [row[0].text for row in rows] == ["attn (2 variants)", "attn (HEAD_80)"]
    (problem,) = collect.problems(ops, None)
    assert problem.subject == "attn"


def test_an_op_for_devices_that_are_not_here_is_no_problem() -> None:
    absent = backend("cuda", "would fall back", "there is no NVIDIA driver here")
    found = op("for_gpus", absent, no_device=True)
    assert collect.problems((found,), None) == ()
    assert forms.as_document(filled((found,)), errors_only=True)["ops"] == []
    (row,) = facts.ops((found,)).rows
    assert "bad" not in [cell.look for cell in row]


def test_only_the_ops_with_problems_are_in_a_document_of_problems() -> None:
    document = forms.as_document(filled(), errors_only=True)
    assert [each["op"] for each in document["ops"]] == ["slow_gelu", "broken"]
    assert document["environment"] is None
    assert len(document["problems"]) == len(filled().problems)


# Markdown


def test_markdown_begins_with_the_problems_and_folds_the_rest() -> None:
    said = forms.as_markdown(filled())
    assert said.startswith("### opkiln 0.1.0\n\n**problems**\n\n|")
    assert said.count("<details>") == said.count("</details>") == 5
    tables = [line for line in said.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert "| fast\\_gelu | cuda | no | yes | yes |  |" in tables


def test_markup_in_what_was_found_stays_text() -> None:
    name = "a|b<script>*_`"
    said = forms.as_markdown(collect.Report("1", NOW, (op(name, backend("cpu")),), None, ()))
    assert "| a\\|b\\<script>\\*\\_\\` |" in said


# What is found


def test_nccl_is_found_once_with_the_version_of_its_name_or_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, wheel, named = tmp_path / "torch", tmp_path / "nvidia/nccl", tmp_path / "named"
    for directory in (torch, wheel / "lib", wheel / "include", named):
        directory.mkdir(parents=True)
    (wheel / "lib/libnccl.so.2").touch()
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    (wheel / "include/nccl.h").write_text(header)
    (named / "libnccl.so.2.27.3").touch()
    (named / "libnccl.so.2").symlink_to("libnccl.so.2.27.3")
    (named / "librccl.so.1").touch()
    monkeypatch.setattr(machine, "_SYSTEM", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{named}:relative")
    sdk = TorchSDK(str(torch), "2.13.0", "x", "13.0", None, True)
    with override(rocm_home=str(tmp_path / "nothing")):
        found = list(machine.collectives(sdk))
    assert [(each.name, each.version) for each in found] == [
        ("NCCL", "2.27.3"), ("RCCL", ""), ("NCCL", "2.28.9"),
    ]  # fmt: skip


def test_gpus_are_those_of_both_vendors_with_what_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = tuple(
        nvidia.NvidiaGPU(n, f"GPU-{n}", "NVIDIA H200", "9.0", 141 << 30) for n in range(2)
    )
    of_nvidia = nvidia.NvidiaDevices(cards, "580.65.06", "13.0", "nvml")
    monkeypatch.setattr(nvidia, "devices", lambda memory=(), root="/": of_nvidia)
    of_amd = amd.AmdDevices((amd.AmdGPU(0, "gfx942", 64, "MI300X", 192 << 30),))
    monkeypatch.setattr(amd, "devices", lambda root="/": of_amd)
    with override(cuda_visible_devices="1"):
        found = machine.devices((), None)
    assert [(each.vendor, each.index, each.arch, each.visible) for each in found.gpus] == [
        ("NVIDIA", 0, "9.0", False), ("NVIDIA", 1, "9.0", True), ("AMD", 0, "gfx942", False),
    ]  # fmt: skip
    assert found.drivers[0] == machine.Driver("NVIDIA", "580.65.06", "13.0", "")
    answers = {each.name: each for each in found.accelerators}
    assert not answers["cuda"].present  # there are GPUs, and no torch that could drive them
    assert "built without CUDA" in answers["cuda"].why


def test_a_store_that_cannot_be_read_is_a_note_and_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(root: str) -> None:
        raise StoreError(f"{root}/ops cannot be read: Permission denied")

    monkeypatch.setattr(inventory, "entries", unreadable)
    found = collect.collect(ops=False)
    assert found.environment is not None
    assert found.environment.store.sizes is None
    assert any("Permission denied" in each.text for each in found.problems)


def test_the_group_of_either_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    file = tmp_path / "proc/self/cgroup"
    file.write_text("4:memory:/slurm/job\n0::/unified\n")
    assert machine.machine(str(tmp_path)).cgroup.path == "/unified"
    file.write_text("4:memory:/slurm/job\n")
    found = machine.machine(str(tmp_path))
    assert found.cgroup == machine.Cgroup("/slurm/job", None, None, None)
    assert found.system.startswith("unknown distribution (linux ")


def test_room_is_that_of_where_a_path_will_be(tmp_path: Path) -> None:
    found = machine.space(str(tmp_path / "not" / "there"))
    assert found.path == str(tmp_path)
    assert 0 < found.free <= found.total


def test_builds_close_in_time_share_a_scale() -> None:
    environment = filled().environment
    assert environment is not None
    found = page.runs(environment.store.builds)
    assert [[each.made_for for each in builds] for builds in found] == [
        ["cuda 9.0", "cpu"],
        ["cpu"],
    ]
