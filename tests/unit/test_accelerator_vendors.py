"""Vendors' accelerators, against stand-ins of their packages.

Importing such a package changes torch for good, so each is imported in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sample import child, forks, vendors

TESTS = Path(__file__).parents[1]


def in_a_child(code: str, *path: Path, **env: str) -> list[str]:
    return child.run(code, path=[*path, TESTS], env=env, bare=False).splitlines()


@pytest.fixture(scope="module")
def vendors_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the suite says of each vendor's accelerator, on the stand-in of its package."""
    here = tmp_path_factory.mktemp("vendors")
    for name in vendors.PACKAGES:
        vendors.install(here / name, name)
    argv = ["-m", "sample.vendor_conformance", str(here), *vendors.PACKAGES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = child.finish(forks.Fork(argv, env=child.environment([TESTS]), **pipes))
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        answers |= json.loads(line)
    return answers


@pytest.mark.parametrize("name", list(vendors.PACKAGES))
def test_a_vendors_device_is_asked_what_its_package_has(
    name: str, vendors_answers: dict[str, Any]
) -> None:
    answer = vendors_answers[name]
    assert answer["wrong"] == []
    assert answer["name"] == name
    assert answer["trace"] == f"{vendors.PACKAGES[name]} counts 2"


@pytest.mark.parametrize("name", list(vendors.PACKAGES))
def test_a_vendors_package_without_a_device_file_is_not_even_imported(
    name: str, tmp_path: Path
) -> None:
    told = in_a_child(
        f"""
        import sys, opkiln
        from opkiln.accelerator import detect
        print(opkiln.get_accelerator().name, {vendors.PACKAGES[name]!r} in sys.modules)
        print(*[each.why for each in detect.trace() if each.name == {name!r}])
        """,
        vendors.install(tmp_path / "packages", name),
    )
    assert told[0] == "cpu False"
    assert f"{vendors.PACKAGES[name]} is installed, but there is no /dev/" in told[1]


def test_a_vendors_package_that_imports_but_counts_no_device_does_not_win(tmp_path: Path) -> None:
    packages = vendors.install(tmp_path / "packages", "npu", devices=0)
    vendors.install(packages, "mlu", broken=True)
    root = vendors.node(vendors.node(tmp_path / "system", "npu"), "mlu")
    told = in_a_child(
        f"""
        import sys, opkiln
        from opkiln.accelerator import detect
        detect.ROOT = {str(root)!r}
        print(opkiln.get_accelerator().name, "torch_npu" in sys.modules)
        why = {{each.name: each.why for each in detect.trace()}}
        print(why["npu"])
        print(why["mlu"])
        """,
        packages,
    )
    assert told[0] == "cpu True"
    assert told[1] == "torch_npu is installed, but counts no device"
    assert told[2].startswith("torch_mlu is installed, but fails: OSError: libascend_hal.so")


def test_a_vendors_package_that_leaves_the_interpreter_does_not_take_the_process_along(
    tmp_path: Path,
) -> None:
    package = tmp_path / "packages" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('set_env.sh was not sourced')\n")
    told = in_a_child(
        f"""
        import opkiln
        from opkiln.accelerator import detect
        detect.ROOT = {str(vendors.node(tmp_path / "system", "npu"))!r}
        print(opkiln.get_accelerator().name)
        print(*[each.why for each in detect.trace() if each.name == "npu"])
        """,
        tmp_path / "packages",
    )
    refusal = "torch_npu is installed, but fails: SystemExit: set_env.sh was not sourced"
    assert told == ["cpu", refusal]


def test_a_vendors_package_that_was_put_in_by_hand_is_asked_like_another(tmp_path: Path) -> None:
    told = in_a_child(
        f"""
        import sys, types, opkiln
        from opkiln.accelerator import detect
        sys.modules["torch_mlu"] = types.ModuleType("torch_mlu")  # it has no spec
        detect.ROOT = {str(vendors.node(tmp_path / "system", "mlu"))!r}
        print(opkiln.get_accelerator().name)
        print(*[each.why for each in detect.trace() if each.name == "mlu"])
        """
    )
    assert told[0] == "cpu"
    assert told[1].startswith("torch_mlu is installed, but fails: ")


def test_a_vendors_device_that_answers_is_taken_and_drives_torch(tmp_path: Path) -> None:
    told = in_a_child(
        f"""
        import opkiln
        from opkiln.accelerator import detect
        detect.ROOT = {str(vendors.node(tmp_path / "system", "mlu"))!r}
        found = opkiln.get_accelerator()
        print(found.name, detect.trace()[-1].why, found.device(1), found.memory_allocated())
        """,
        vendors.install(tmp_path / "packages", "mlu"),
    )
    assert told == ["mlu torch_mlu counts 2 mlu:1 1048576"]


def test_a_vendors_accelerator_that_is_asked_for_and_has_no_device_is_an_error(
    tmp_path: Path,
) -> None:
    told = in_a_child(
        """
        import opkiln
        try:
            opkiln.get_accelerator()
        except opkiln.errors.AcceleratorError as error:
            print(error)
        """,
        vendors.install(tmp_path / "packages", "npu", devices=0),
        DS_ACCELERATOR="npu",
    )
    expected = "DS_ACCELERATOR=npu cannot be used: torch_npu is installed, but counts no device"
    assert told[0] == expected
    assert told[1].startswith("  cpu can: ")
