"""The table of settings: precedence, parsing, what reaches a child, and its documentation."""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from pathlib import Path

import pytest
import reference_pages.settings
from sample.levels import X86_V1

from opkiln.base.setting_values import parse_size
from opkiln.errors import SettingError
from opkiln.settings import (
    DROPPED,
    PASSED,
    PASSED_FAMILIES,
    PASSED_TO_SCRIPTS,
    build_switch,
    child_environment,
    compiler_variables,
    dropped_variables,
    fingerprint,
    override,
    settings,
    table,
)

SOURCE = Path(__file__).parents[2] / "src" / "opkiln"


def test_a_value_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.mode == "auto"
    monkeypatch.setenv("OPKILN_MODE", "cached")
    assert settings.mode == "cached"


def test_opkilns_own_name_wins_over_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAFLAGS", "-G")
    assert settings.cudaflags == ("-G",)
    monkeypatch.setenv("OPKILN_CUDAFLAGS", "-lineinfo")
    assert settings.cudaflags == ("-lineinfo",)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "")
    assert settings.mode == "auto"


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_an_empty_list_of_gpus_is_a_list(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setting = next(each for each in table() if each.variable == name)
    assert setting.resolve() == (None, "default")
    monkeypatch.setenv(name, "")
    assert setting.resolve() == ("", name)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("OPKILN_DEBUG", "maybe", "on or off"),
        ("OPKILN_MODE", "loud", "auto or native or cached or sealed"),
        ("MAX_JOBS", "0", "at least 1"),
        ("MAX_JOBS", "two", "two"),
        ("OPKILN_BUILD_TIMEOUT", "-1", "positive"),
        ("OPKILN_MEMORY", "lots", "lots"),
        ("CXXFLAGS", "'unbalanced", "No closing quotation"),
        ("OPKILN_REMOTES", "oci://docker.io/x?token=auth.docker.io", "?tokens=HOST"),
    ],
)
def test_a_value_without_meaning_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    monkeypatch.setenv(name, text)
    setting = next(each for each in table() if name in each.names)
    with pytest.raises(SettingError) as caught:
        setting.resolve()
    assert name in caught.value.what
    assert expected in caught.value.what
    assert caught.value.hint == f"unset {name}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("4GiB", 4 << 30),
        ("1.5k", 1536),
        ("2tb", 2 << 40),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_flags_are_split_as_a_shell_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-DA='x y' -O2")
    assert settings.cxxflags == ("-DA=x y", "-O2")


def test_an_override_holds_in_its_block_and_touches_no_variable() -> None:
    before = dict(os.environ)
    with override(mode="cached", cpu=X86_V1):
        with override(mode="native"):
            assert settings.mode == "native"
            assert settings.cpu == X86_V1
        assert settings.mode == "cached"
    assert settings.mode == "auto"
    assert dict(os.environ) == before


def test_an_override_is_not_seen_by_a_thread_that_runs_beside_it() -> None:
    seen = []
    with override(mode="cached"):
        inside = copy_context()
        threads = [
            threading.Thread(target=lambda: seen.append(settings.mode)),
            threading.Thread(target=lambda: seen.append(inside.run(lambda: settings.mode))),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert seen == ["auto", "cached"]


def test_an_override_of_an_unknown_setting_is_refused() -> None:
    with pytest.raises(SettingError, match="no setting 'jti'"), override(jti=True):
        pass


def test_the_source_of_a_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = next(each for each in table() if each.field == "max_jobs")
    assert setting.resolve() == (None, "default")
    monkeypatch.setenv("MAX_JOBS", "3")
    assert setting.resolve() == (3, "MAX_JOBS")
    with override(max_jobs=5):
        assert setting.resolve() == (5, "call")


def test_an_op_is_selected_by_our_name_its_own_and_the_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert build_switch("adam") == (None, "")
    monkeypatch.setenv("DS_BUILD_ADAM", "1")
    assert build_switch("adam") == (True, "DS_BUILD_ADAM")
    monkeypatch.setenv("MY_ADAM", "0")
    assert build_switch("adam", ("MY_ADAM",)) == (False, "MY_ADAM")
    monkeypatch.setenv("OPKILN_BUILD_ADAM", "1")
    assert build_switch("adam", ("MY_ADAM",)) == (True, "OPKILN_BUILD_ADAM")
    monkeypatch.setenv("OPKILN_BUILD_ADAM", "perhaps")
    with pytest.raises(SettingError, match="OPKILN_BUILD_ADAM"):
        build_switch("adam")


def test_a_child_gets_the_allow_listed_variables_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("CPATH", "/opt/include")
    for name in DROPPED:
        monkeypatch.setenv(name, "x")
    environment = child_environment()
    assert environment["PATH"] == os.environ["PATH"]
    assert not {"SECRET_TOKEN", "CPATH", "CXXFLAGS", *DROPPED} & environment.keys()
    assert set(dropped_variables()) == set(DROPPED)


def test_all_that_reaches_a_compiler_but_path_is_in_its_key_and_in_a_receipts_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of PATH, the programs count that it leads to."""
    for_scripts = {*PASSED[1:], *PASSED_TO_SCRIPTS, *(f"{each}X" for each in PASSED_FAMILIES)}
    for name in (*for_scripts, *DROPPED, "SECRET_TOKEN"):
        monkeypatch.setenv(name, f"of {name}")
    plain = dict(compiler_variables(script=False))
    assert plain.keys() == child_environment().keys() - {"PATH"}
    assert dict(compiler_variables(script=True)) == {name: f"of {name}" for name in for_scripts}
    assert plain.items() <= dict(compiler_variables(script=True)).items()
    for name in for_scripts:
        before = compiler_variables(script=True), fingerprint()
        monkeypatch.setenv(name, "another")
        after = compiler_variables(script=True), fingerprint()
        assert before[0] != after[0]
        assert before[1] != after[1]


def test_every_setting_is_documented_and_named_once() -> None:
    names = [name for each in table() for name in each.names]
    assert len(names) == len(set(names))
    text = reference_pages.settings.page()
    for each in table():
        assert each.doc
        assert f"`{each.variable}`" in text
        assert each.doc in text
    families = (f"{each}*" for each in PASSED_FAMILIES)
    for name in (*DROPPED, *PASSED, *PASSED_TO_SCRIPTS, *families):
        assert f"`{name}`" in text


def test_the_environment_is_touched_in_one_module_and_written_in_none() -> None:
    offenders = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if path.name != "settings.py"
        and any(word in path.read_text() for word in ("os.environ", "getenv", "putenv"))
    ]
    assert offenders == []
    own = (SOURCE / "settings.py").read_text()
    for write in (
        "os.environ[name] =",
        "environ.update",
        "environ.setdefault",
        "putenv",
        "del os.",
    ):
        assert write not in own


STARTING = ("run/process.py", "run/child.py")  # the front, and the life of one child


def test_subprocesses_are_started_in_two_modules() -> None:
    words = ("import subprocess", "os.system", "os.popen", "os.spawn", "posix_spawn", "shell=True")
    offenders = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in STARTING
        and any(word in path.read_text() for word in words)
    ]
    assert offenders == []


def test_opkiln_has_few_names_of_its_own() -> None:
    """Each is one more thing that a user has to know of; a new one replaces another. The two for
    jobs and the three for remote tiers are for what no argument can say: programs that are not
    changed."""
    assert len([each for each in table() if each.variable.startswith("OPKILN_")]) <= 40


def test_a_directory_that_begins_with_an_at_sign_is_no_file_of_words_to_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
        monkeypatch.setenv(name, "@flags:@more")
        found = getattr(settings, name.lower())
        assert found == (f"{tmp_path}/@flags", f"{tmp_path}/@more")
