"""Faults planted in a real environment: the doctor finds each, and the command it prints mends it.

The command is typed into a shell as it is printed, and the check runs again in that shell.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from sample import layer
from sample.child import NOBODY
from sample.compiler import torch_like
from sample.doctor import Patient, can_mount

from opkiln.machine.toolchain import nvcc
from opkiln.report.commands import install_command
from opkiln.store import bundle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
needs_nvcc = pytest.mark.skipif(not nvcc.available(), reason="no nvcc on this machine")


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Path]:
    """Writes a script in front of the real g++."""

    def write(*lines: str, last: str = "") -> Path:
        path = tmp_path / "bin" / "g++"
        path.parent.mkdir(exist_ok=True)
        text = "\n".join(["#!/bin/sh", *lines, f'exec {shutil.which("g++")} "$@" {last}', ""])
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def mountable(tmp_path: Path) -> Path:
    """A directory on which a test may mount what it likes."""
    place = tmp_path / "mounted"
    place.mkdir()
    if not can_mount(place):
        pytest.skip("this user cannot mount a file system")
    return place


# The compiler


def test_a_compiler_without_cpp_20_is_found_and_left_aside(program: Callable[..., Path]) -> None:
    refuse = 'case "$*" in *c++20*) echo "error: unknown argument -std=c++20" >&2; exit 1;; esac'
    patient = Patient({"CXX": str(program(refuse))})
    found = patient.check("compiler")
    assert found.verdict == "FAIL"
    assert "does not take -std=c++20: error: unknown argument" in found.evidence
    assert found.command == "unset CXX"
    mended = patient.check("compiler", after=found.command)
    assert mended.verdict == "PASS"
    assert shutil.which("g++") in mended.evidence


def test_a_compiler_whose_library_headers_are_missing_is_found(
    program: Callable[..., Path],
) -> None:
    patient = Patient({"CXX": str(program(last="-nostdinc++"))})
    found = patient.check("compiler")
    assert found.verdict == "FAIL"
    assert "concepts: No such file" in found.evidence
    assert patient.check("compiler", after=found.command).verdict == "PASS"


def test_no_compiler_at_all_is_found_and_what_to_install_is_said(tmp_path: Path) -> None:
    found = Patient({}).check("compiler", after=f"export PATH='{tmp_path}'")
    assert found.verdict == "FAIL"
    assert "g++ (PATH): not on PATH; clang++ (PATH): not on PATH" in found.evidence
    assert found.command == install_command("g++")
    found = Patient({"CXX": str(tmp_path / "nothing")}).check("compiler")
    assert (found.verdict, found.command) == ("FAIL", "unset CXX")
    assert "nothing (CXX): no such program" in found.evidence


def test_without_a_path_a_compiler_does_not_find_its_own_programs() -> None:
    patient = Patient({})
    found = patient.check("compiler", after="unset PATH")
    if found.verdict == "PASS":
        pytest.skip("this compiler names its programs by their paths")
    assert found.command == "export PATH=/usr/local/bin:/usr/bin:/bin"
    assert patient.check("compiler", after=f"unset PATH; {found.command}").verdict == "PASS"


def test_a_compiler_with_a_static_runtime_is_found(program: Callable[..., Path]) -> None:
    patient = Patient({"CXX": str(program(last="-static-libstdc++"))})
    found = patient.check("c++ runtime")
    assert found.verdict == "WARN"
    assert "would link a static libstdc++" in found.evidence
    assert "libstdc++.so.6" in found.evidence
    assert patient.check("c++ runtime", after=found.command).verdict == "PASS"


def test_a_static_runtime_that_nobody_asked_for_is_avoided_by_naming_another_compiler(
    program: Callable[..., Path],
) -> None:
    first = program(last="-static-libstdc++").parent
    patient = Patient({"PATH": f"{first}{os.pathsep}{os.environ['PATH']}"})
    found = patient.check("c++ runtime")
    assert found.command.startswith("export CXX=/")
    assert patient.check("c++ runtime", after=found.command).verdict == "PASS"


def test_a_launcher_that_is_not_there_is_found_once() -> None:
    patient = Patient({"CXX": "no-such-ccache g++"})
    found = patient.check("launcher")
    assert found.verdict == "FAIL"
    assert "no-such-ccache, which is not on PATH" in found.evidence
    assert patient.check("compiler").verdict == "SKIP"
    assert patient.check("launcher", after=found.command).verdict == "PASS"
    assert patient.check("compiler", after=found.command).verdict == "PASS"


# The store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = tmp_path / "store"
    made.mkdir(mode=0o700)
    return made


def test_a_store_that_others_can_write_to_is_found_and_closed(store: Path) -> None:
    store.chmod(0o777)
    patient = Patient({"OPKILN_CACHE_DIR": str(store)})
    found = patient.check("store mode")
    assert found.verdict == "WARN"
    assert f"{store} has mode 0777" in found.evidence
    elsewhere = patient.check("store")
    assert elsewhere.verdict == "SKIP"
    assert f"the store is {store}/opkiln-" in elsewhere.evidence
    assert patient.check("store mode", after=found.command).verdict == "PASS"
    assert store.stat().st_mode & 0o777 == 0o755
    assert patient.check("store").evidence == str(store)


@needs_root
def test_a_store_of_another_user_is_found_and_taken_over(store: Path) -> None:
    (store / "v1").mkdir()
    os.chown(store / "v1", NOBODY, NOBODY)
    os.chown(store, NOBODY, NOBODY)
    patient = Patient({"OPKILN_CACHE_DIR": str(store)})
    found = patient.check("store owner")
    assert found.verdict == "WARN"
    assert f"{store} belongs to uid {NOBODY}" in found.evidence
    assert patient.check("store owner", after=found.command).verdict == "PASS"
    assert patient.check("store").evidence == str(store)


def _elsewhere(path: Path | str, home: Path) -> dict[str, str]:
    return {"OPKILN_CACHE_DIR": str(path), "HOME": str(home), "XDG_CACHE_HOME": ""}


def _left_alone(patient: Patient, check: str, path: Path) -> None:
    """The check's command mends it, and leaves the directory as it is."""
    before = path.stat()
    found = patient.check(check)
    assert found.verdict == "WARN"
    assert "chmod" not in found.command
    assert "chown" not in found.command
    assert "OPKILN_CACHE_DIR" in found.command
    assert patient.check(check, after=found.command).verdict == "PASS"
    assert patient.check("store", after=found.command).verdict == "PASS"
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "inside"), [(0o1777, ""), (0o777, "thesis.tex"), (0o777, "v1/index.html")]
)
def test_a_directory_that_is_more_than_a_store_keeps_its_mode(
    mode: int, inside: str, store: Path, tmp_path: Path
) -> None:
    if inside:
        (store / inside).parent.mkdir(exist_ok=True, mode=0o700)
        (store / inside).write_text("")
    store.chmod(mode)
    _left_alone(Patient(_elsewhere(store, tmp_path)), "store mode", store)


@pytest.mark.parametrize("options", ["mode=0777", "mode=0777,ro"])
def test_a_file_system_that_others_can_write_to_keeps_its_mode(
    options: str, mountable: Path, tmp_path: Path
) -> None:
    patient = Patient(_elsewhere(mountable, tmp_path), mounts={mountable: options})
    _left_alone(patient, "store mode", mountable)


@pytest.mark.usefixtures("mountable")
def test_no_command_changes_a_directory_on_a_read_only_file_system(
    mountable: Path, tmp_path: Path
) -> None:
    place = mountable / "store"
    patient = Patient(_elsewhere(place, tmp_path), mounts={mountable: "mode=0755"})
    made = f"mkdir -m 777 {place} && chmod 777 {place} && mount -o remount,ro {mountable}"
    found = patient.check("store mode", after=made)
    assert (found.verdict, "chmod" in found.command) == ("WARN", False)
    assert patient.check("store mode", after=f"{made}\n{found.command}").verdict == "PASS"


def test_a_store_that_a_load_stepped_aside_from_is_still_closed(store: Path) -> None:
    store.chmod(0o777)
    patient = Patient({"OPKILN_CACHE_DIR": str(store)})
    assert patient.check("compiler").verdict == "PASS"  # what it learns is remembered
    assert [path.name for path in store.iterdir()] == [f"opkiln-{os.getuid()}"]
    (store / "v70" / "ops").mkdir(parents=True)  # of another version of opkiln
    assert patient.check("store mode").command == f"chmod go-w {store}"


@needs_root
@pytest.mark.parametrize("inside", ["thesis.tex", "v1/index.html", ""])
def test_a_directory_of_another_user_that_is_no_store_is_not_taken(
    inside: str, store: Path, tmp_path: Path
) -> None:
    if inside:
        (store / inside).parent.mkdir(exist_ok=True)
        (store / inside).write_text("")
    os.chown(store, NOBODY, NOBODY)
    _left_alone(Patient(_elsewhere(store, tmp_path)), "store owner", store)


@needs_root
def test_the_store_in_another_users_home_is_not_taken(tmp_path: Path) -> None:
    # As with sudo, which may leave HOME as it was.
    store = tmp_path / "bob" / "store"
    (store / "v1" / "ops").mkdir(parents=True)
    for path in (tmp_path / "bob", store, store / "v1"):
        os.chown(path, NOBODY, NOBODY)
    _left_alone(Patient(_elsewhere(store, tmp_path)), "store owner", store)


def test_a_store_whose_path_is_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    patient = Patient({**home, "OPKILN_CACHE_DIR": str(tmp_path / "file" / "store")})
    found = patient.check("store")
    assert found.verdict == "WARN"
    assert f"{tmp_path}/file/store cannot be the store: Not a directory" in found.evidence
    assert f"the store is {tmp_path}/.cache/opkiln" in found.evidence
    mended = patient.check("store", after=found.command)
    assert (mended.verdict, mended.evidence) == ("PASS", f"{tmp_path}/.cache/opkiln")


def test_a_store_that_refuses_every_write_is_found_and_left(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    patient = Patient({**home, "OPKILN_CACHE_DIR": "/proc/store"})  # root may write there, it seems
    found = patient.check("store")
    assert found.verdict in ("FAIL", "WARN")
    assert "/proc" in found.evidence
    assert patient.check("store clock").verdict in ("SKIP", "PASS")
    assert patient.check("store", after=found.command).verdict == "PASS"


def test_a_store_on_a_noexec_mount_is_found_and_left(mountable: Path, tmp_path: Path) -> None:
    env = {"OPKILN_CACHE_DIR": f"{mountable}/store", "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    patient = Patient(env, mounts={mountable: "noexec"})
    found = patient.check("store noexec")
    assert found.verdict == "FAIL"
    assert f"{mountable}/store/v1 is mounted noexec" in found.evidence
    assert patient.check("store noexec", after=found.command).verdict == "PASS"


def test_a_full_file_system_is_found_and_left(mountable: Path, tmp_path: Path) -> None:
    env = {"OPKILN_CACHE_DIR": f"{mountable}/store", "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    patient = Patient(env, mounts={mountable: "size=64k,nr_inodes=20"})
    for check, evidence in (("store space", "free of 64.0 KiB"), ("store inodes", "left at")):
        found = patient.check(check)
        assert found.verdict == "FAIL"
        assert evidence in found.evidence
        assert patient.check(check, after=found.command).verdict == "PASS"


def test_what_a_killed_publisher_left_is_found_and_swept(store: Path) -> None:
    left = store / "v1" / "staging" / "abandoned"
    left.mkdir(parents=True, mode=0o700)
    (store / "v1").chmod(0o700)
    (left / "op.so").write_text("half of it")
    for path in (left / "op.so", left):
        os.utime(path, (time.time() - 7200,) * 2)
    patient = Patient({"OPKILN_CACHE_DIR": str(store)})
    found = patient.check("store leftovers")
    assert (found.verdict, found.command) == ("WARN", "opkiln cache gc")
    assert "1 directory in" in found.evidence
    assert patient.check("store leftovers", after=f"{found.command} >&2").verdict == "PASS"
    assert not left.exists()


def layered(store: Path, *listed: object) -> Patient:
    layers = os.pathsep.join(map(str, listed))
    return Patient({"OPKILN_CACHE_DIR": str(store), "OPKILN_STORE_LAYERS": layers})


def test_a_layer_that_is_not_there_is_found_by_the_name_it_was_given(
    store: Path, tmp_path: Path
) -> None:
    good, gone = tmp_path / "good", tmp_path / "a layer"
    (good / "v1").mkdir(parents=True)
    patient = layered(store, good, gone)
    found = patient.check("store layers")
    assert (found.verdict, found.evidence) == ("WARN", f"{gone} does not exist")
    assert found.command == f"ls -ld '{gone}'"
    (gone / "v1").mkdir(parents=True)
    mended = patient.check("store layers")
    assert (mended.verdict, mended.evidence) == ("PASS", f"{good}, {gone}")


def test_a_directory_that_is_no_layer_is_found(store: Path, tmp_path: Path) -> None:
    # What is often listed instead: the layout's own directory, or that of its entries.
    inner = tmp_path / "layer" / "v1"
    inner.mkdir(parents=True)
    found = layered(store, inner).check("store layers")
    assert (found.verdict, found.command) == ("WARN", f"ls -ld {inner}")
    assert found.evidence == f"{inner} is not a layer: it has no directory v1"


@pytest.mark.parametrize("opened", ["layer", "layer/v1"])
def test_a_layer_that_everybody_can_write_to_is_found(
    store: Path, tmp_path: Path, opened: str
) -> None:
    (tmp_path / "layer" / "v1").mkdir(parents=True)
    (tmp_path / opened).chmod(0o777)
    patient = layered(store, tmp_path / "layer")
    found = patient.check("store layers")
    assert found.verdict == "WARN"
    assert found.evidence == f"{tmp_path / opened} is writable by everybody"
    assert found.command == f"ls -ld {tmp_path / opened}"  # it may be more than a layer
    (tmp_path / opened).chmod(0o755)
    assert patient.check("store layers").verdict == "PASS"


def test_a_file_that_is_no_bundle_is_found(store: Path, tmp_path: Path) -> None:
    junk, wheel = tmp_path / "ops.bundle", tmp_path / "demo_ops-1.0-py3-none-any.whl"
    for path in (junk, wheel):
        path.write_bytes(b"PK, and then something else")
    why = "it does not begin with opkiln-bundle.json"
    found = layered(store, junk).check("store layers")
    assert (found.verdict, found.evidence) == ("WARN", f"{junk} is not a bundle; {why}")
    assert found.command == f"ls -ld {junk}"
    assert layered(store, wheel).check("store layers").command == f"pip install {wheel}"


def test_a_bundle_that_was_cut_short_is_found(store: Path, tmp_path: Path) -> None:
    whole = tmp_path / "ops.bundle"
    layer.add(tmp_path / "layer", "one", b"\x7fELF")
    bundle.write_bundle(str(tmp_path / "layer"), str(whole))
    patient = layered(store, whole)
    assert patient.check("store layers").verdict == "PASS"
    os.truncate(whole, whole.stat().st_size - 1)
    found = patient.check("store layers")
    assert found.verdict == "WARN"
    assert f"{whole} is damaged: it has " in found.evidence
    assert found.command == f"ls -ld {whole}"


def test_remote_tiers_that_nobody_asks_are_found(store: Path, tmp_path: Path) -> None:
    env = {"OPKILN_CACHE_DIR": str(store), "OPKILN_REMOTES": "oci://host/ops"}
    found = Patient(env).check("remote tiers")
    assert (found.verdict, found.command) == ("WARN", "unset OPKILN_REMOTES")
    assert "oci://host/ops: not asked, nothing says what is trusted" in found.evidence
    assert Patient(env).check("remote tiers", after=found.command).verdict == "PASS"
    missing = tmp_path / "missing.pub"
    found = Patient({**env, "OPKILN_TRUSTED_KEYS": str(missing)}).check("remote tiers")
    assert (found.verdict, found.command) == ("WARN", f"ls -l {missing}")
    lock = tmp_path / "ops.lock"
    lock.write_text("version = 1\n")
    found = Patient({**env, "OPKILN_LOCK": str(lock)}).check("remote tiers")
    said = "oci://host/ops; 0 trusted keys, 0 artifacts in a lock file"
    assert (found.verdict, found.evidence) == ("PASS", said)


def test_a_file_server_with_another_clock_is_found(store: Path, tmp_path: Path) -> None:
    # The clock of this process is put back: the file system's is what it was.
    ahead = "import time; real = time.time; time.time = lambda: real() - 90"
    found = Patient({"OPKILN_CACHE_DIR": str(store)}, stand_ins=ahead).check("store clock")
    assert found.verdict == "WARN"
    assert "90.0 s ahead" in found.evidence


# The directories that builds pass through


def test_a_tmpdir_that_does_not_exist_is_found_and_made(tmp_path: Path) -> None:
    patient = Patient({"TMPDIR": str(tmp_path / "not there")})
    found = patient.check("tmpdir")
    assert found.verdict == "FAIL"
    assert f"TMPDIR={tmp_path}/not there does not exist" in found.evidence
    # One finding, not ten: what else writes temporary files does so elsewhere.
    assert patient.check("compiler").verdict == "PASS"
    assert patient.check("self-check cpu").evidence.endswith(": see tmpdir")
    assert patient.check("tmpdir", after=found.command).verdict == "PASS"
    assert (tmp_path / "not there").stat().st_mode & 0o777 == 0o700


def test_a_noexec_tmpdir_is_found_and_builds_fail_there_until_it_is_left(mountable: Path) -> None:
    patient = Patient({"TMPDIR": str(mountable)}, mounts={mountable: "noexec"})
    found = patient.check("tmpdir noexec")
    assert found.verdict == "FAIL"
    assert f"TMPDIR={mountable} is mounted noexec" in found.evidence
    assert patient.check("self-check cpu").verdict == "FAIL"
    assert patient.check("tmpdir noexec", after=found.command).verdict == "PASS"
    assert patient.check("self-check cpu", after=found.command).verdict == "PASS"


def test_a_tmpdir_without_room_is_found_and_left(mountable: Path) -> None:
    patient = Patient({"TMPDIR": str(mountable)}, mounts={mountable: "size=4M"})
    found = patient.check("tmpdir space")
    assert found.verdict == "FAIL"
    assert "free of 4.0 MiB" in found.evidence
    assert patient.check("tmpdir space", after=found.command).verdict == "PASS"


@pytest.mark.usefixtures("mountable")
def test_a_small_dev_shm_is_found_and_grown() -> None:
    patient = Patient({}, mounts={"/dev/shm": "size=64M"})
    found = patient.check("shared memory")
    assert found.verdict == "WARN"
    assert "free of 64.0 MiB" in found.evidence
    assert patient.check("shared memory", after=found.command).verdict == "PASS"


# Variables


def test_a_misspelt_setting_is_found_and_its_value_goes_to_the_right_one(tmp_path: Path) -> None:
    patient = Patient({"OPKILN_CACHEDIR": str(tmp_path / "meant")})
    del patient.env["OPKILN_CACHE_DIR"]
    found = patient.check("variable names")
    assert found.verdict == "WARN"
    assert "unknown setting OPKILN_CACHEDIR; did you mean OPKILN_CACHE_DIR?" in found.evidence
    assert patient.check("variable names", after=found.command).verdict == "PASS"
    assert patient.check("store", after=found.command).evidence == str(tmp_path / "meant")


def test_names_that_are_nearly_deepspeeds_or_an_ops_are_found() -> None:
    patient = Patient(
        {"DS_SKIP_CUDA_CHEK": "1", "DS_BUILD_CPU_ADAMM": "1", "DS_BUILD_CPU_ADAM": "1"}
    )
    found = patient.check("variable names")
    assert found.verdict == "WARN"
    assert "did you mean DS_SKIP_CUDA_CHECK?" in found.evidence
    assert "there is no op cpu_adamm" in found.evidence
    assert patient.check("variable names", after=found.command).verdict == "PASS"


def test_flags_that_no_compiler_sees_are_found() -> None:
    patient = Patient({"NVCC_APPEND_FLAGS": "-lineinfo", "GCC_EXEC_PREFIX": "/opt/gcc/"})
    found = patient.check("kept-away variables")
    assert found.verdict == "WARN"
    assert "does not pass GCC_EXEC_PREFIX, NVCC_APPEND_FLAGS to" in found.evidence
    assert "NVCC_APPEND_FLAGS: set OPKILN_CUDAFLAGS" in found.evidence
    assert patient.check("kept-away variables", after=found.command).verdict == "PASS"


def test_less_memory_than_one_job_takes_is_found() -> None:
    patient = Patient({"OPKILN_MEMORY": "100M"})
    found = patient.check("memory")
    assert found.verdict == "FAIL"
    assert "100.0 MiB (OPKILN_MEMORY)" in found.evidence
    assert found.command == "unset OPKILN_MEMORY"
    assert patient.check("memory", after=found.command).verdict in ("PASS", "WARN")


def test_a_budget_directory_that_cannot_be_used_is_found(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    patient = Patient({"OPKILN_RUNTIME_DIR": str(tmp_path / "open")})
    found = patient.check("budget")
    assert found.verdict == "WARN"
    assert "it is writable by others (mode 0777)" in found.evidence
    assert patient.check("budget", after=found.command).verdict == "PASS"


# torch


def test_a_torch_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    made = torch_like(tmp_path / "site", "2.13.0+cpu")
    real = os.path.realpath(made / "lib")
    (made / "lib").unlink()
    shutil.copytree(real, made / "lib", copy_function=os.symlink)
    (made / "lib" / "libc10.so").unlink()
    (made / "lib" / "libc10.so").write_text("not a library")
    patient = Patient({})
    patient.env["PYTHONPATH"] = f"{tmp_path / 'site'}{os.pathsep}{patient.env['PYTHONPATH']}"
    found = patient.check("torch libraries")
    assert found.verdict == "FAIL"
    assert "libc10.so: " in found.evidence
    # The very build: by its version alone another may come in its place.
    assert found.command.endswith("-m pip install --force-reinstall --no-deps torch==2.13.0+cpu")
    version = made / "version.py"
    text = version.read_text().replace("2.13.0+cpu", "2.13.0")
    version.unlink()
    version.write_text(text)
    found = patient.check("torch libraries")
    assert (found.verdict, found.command) == ("FAIL", "")


def test_two_openmp_runtimes_are_found(tmp_path: Path) -> None:
    library = tmp_path / "libiomp5.so"
    subprocess.run(["g++", "-shared", "-x", "c++", os.devnull, "-o", str(library)], check=True)
    patient = Patient({"LD_PRELOAD": str(library)})
    found = patient.check("openmp")
    assert found.verdict == "WARN"
    assert f"{library} (LLVM)" in found.evidence
    assert "libgomp" in found.evidence
    assert found.command == "unset LD_PRELOAD"
    assert patient.check("openmp", after=found.command).verdict == "PASS"


def test_an_openmp_runtime_that_another_package_brought_is_found(tmp_path: Path) -> None:
    # As conda and pip's MKL lay it out: in the library directory of the environment.
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.write_text("")
    (tmp_path / "conda-meta").mkdir()
    patient = Patient({}, stand_ins=f"import sys; sys.prefix = {str(tmp_path)!r}")
    found = patient.check("openmp")
    assert (found.verdict, found.command) == ("WARN", "conda install -y nomkl")
    assert f"{library} (LLVM)" in found.evidence
    library.unlink()
    (tmp_path / "lib" / "libgomp.so.1").write_text("")
    assert patient.check("openmp").verdict == "PASS"  # two of one family


# GPUs: what the driver would answer is put in its place

_GPU = """
from opkiln.machine.devices import nvidia
gpu = nvidia.NvidiaGPU(0, 'GPU-0', 'NVIDIA stand-in', {capability!r}, 1 << 30)
nvidia._known['/'] = nvidia.NvidiaDevices((gpu,), '580.65.06', {cuda!r}, 'nvml')
"""


@needs_nvcc
def test_a_gpu_that_the_arch_list_leaves_out_is_found() -> None:
    stand_in = _GPU.format(capability="9.0", cuda="13.0")
    patient = Patient({"TORCH_CUDA_ARCH_LIST": "8.0;9.0b"}, stand_ins=stand_in)
    found = patient.check("cuda arch list")
    assert found.verdict == "FAIL"
    assert "'9.0b' is not a CUDA arch" in found.evidence
    assert patient.check("cuda gpus").verdict == "SKIP"
    patient.env["TORCH_CUDA_ARCH_LIST"] = "8.0"
    assert patient.check("cuda arch list").verdict == "PASS"
    found = patient.check("cuda gpus")
    assert found.verdict == "FAIL"
    assert "nothing in TORCH_CUDA_ARCH_LIST=8.0 runs on 9.0" in found.evidence
    assert found.command == "unset TORCH_CUDA_ARCH_LIST"
    mended = patient.check("cuda gpus", after=found.command)
    assert mended.verdict == "PASS"
    assert "NVIDIA stand-in (9.0)" in mended.evidence


@needs_nvcc
def test_an_arch_that_the_toolkit_lacks_is_found_and_taken_off_the_list() -> None:
    patient = Patient({"TORCH_CUDA_ARCH_LIST": "3.5;9.0a"})
    found = patient.check("cuda arch list")
    assert found.verdict == "FAIL"
    assert "3.5: the toolkit has no 3.5" in found.evidence
    mended = patient.check("cuda arch list", after=found.command)
    assert mended.verdict == "PASS"
    assert "TORCH_CUDA_ARCH_LIST=9.0a is 9.0a" in mended.evidence


@needs_nvcc
def test_a_gpu_that_the_toolkit_does_not_know_is_a_warning() -> None:
    stand_in = _GPU.format(capability="13.5", cuda="14.2")
    found = Patient({}, stand_ins=stand_in).check("cuda gpus")
    assert found.verdict == "WARN"
    assert "capability 13.5, which this CUDA toolkit does not know" in found.evidence
    assert found.command.endswith("-m pip install --upgrade 'opkiln[cuda]'")


# The self-check


def test_the_self_check_compiles_loads_and_calls_and_leaves_nothing_behind(
    tmp_path: Path, cache: Path
) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    # It imports nothing from the current directory.
    (here / "ctypes.py").write_text("raise SystemExit('not the one that was meant')\n")
    there = f"import os, sys; sys.path.remove(''); os.chdir({str(here)!r})"
    found = Patient({"TMPDIR": str(temporary)}, stand_ins=there).check("self-check torch")
    assert found.verdict == "PASS", found.evidence
    assert "compiled, loaded and called" in found.evidence
    assert list(temporary.iterdir()) == []
    assert not (cache / "v1" / "ops").exists()


@needs_nvcc
def test_the_self_check_builds_for_cuda_without_a_gpu_too() -> None:
    found = Patient({"TORCH_CUDA_ARCH_LIST": "9.0"}).check("self-check cuda")
    assert found.verdict == "PASS", found.evidence
    assert "compiled" in found.evidence


def test_an_op_that_crashes_its_process_is_a_failed_self_check(tmp_path: Path) -> None:
    header = tmp_path / "crash.h"
    header.write_text(
        'extern "C" int opkiln_doctor(int, int, int*) { __builtin_trap(); }\n'
        "#define opkiln_doctor opkiln_hidden\n"
    )
    patient = Patient({"CXXFLAGS": f"-include {header}"})
    found = patient.check("self-check cpu")
    assert found.verdict == "FAIL"
    assert "the child died of SIG" in found.evidence
    assert "at the step: call" in found.evidence
    assert found.command == "unset CXXFLAGS"
    mended = patient.check("self-check cpu", after=found.command)
    assert (mended.verdict, mended.evidence[:27]) == ("PASS", "compiled, loaded and called")


@pytest.mark.parametrize(
    ("flags", "evidence"),
    [
        ({"OPKILN_CXXFLAGS": "-Dint=nonsense", "CXXFLAGS": "-Dint=bogus"}, "nonsense"),
        ({"LDFLAGS": "-lno_such_library"}, "cannot find -lno_such_library"),
    ],
)
def test_flags_with_which_nothing_compiles_are_found_and_taken_off(
    flags: dict[str, str], evidence: str
) -> None:
    patient = Patient(flags)
    found = patient.check("self-check cpu")
    assert found.verdict == "FAIL"
    assert evidence in found.evidence
    # Neither lasts: the log and what was compiled are removed with the store.
    assert "log: " not in found.evidence
    assert "command: " not in found.evidence
    assert found.command == f"unset {' '.join(flags)}"
    assert patient.check("self-check cpu", after=found.command).verdict == "PASS"


def test_an_op_that_does_not_compile_by_no_flag_has_no_command_that_cannot_work(
    program: Callable[..., Path],
) -> None:
    # For the self-check alone: what asks the compiler what it is gets its answer.
    refuse = 'case "$*" in *main.cpp*) echo "main.cpp:1:1: error: refused" >&2; exit 1;; esac'
    found = Patient({"CXX": str(program(refuse))}).check("self-check cpu")
    assert (found.verdict, found.command) == ("FAIL", "")
    assert found.evidence.endswith("main.cpp:1:1: error: refused")


# The command as a whole


def test_every_check_runs_and_the_exit_code_says_the_worst(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "opkiln", "doctor", "--no-build", "--json")
    # A ROCm that is installed would be asked for seconds what it is.
    env = {"PYTHONPATH": "", "NVCC_APPEND_FLAGS": "-g", "ROCM_HOME": str(tmp_path)}
    done = Patient(env).shell('exec "$@"', *argv)
    answer = json.loads(done.stdout)
    found = {each["check"]: each["verdict"] for each in answer["findings"]}
    assert found["compiler"] == found["torch"] == found["torch libraries"] == "PASS"
    assert found["kept-away variables"] == "WARN"
    assert not any("self-check" in name for name in found)
    assert answer["worst"] == ("FAIL" if "FAIL" in found.values() else "WARN")
    assert done.returncode == (1 if "FAIL" in found.values() else 8)


def test_settings_without_meaning_are_found_and_what_rests_on_one_is_skipped() -> None:
    patient = Patient({"OPKILN_MODE": "maybe", "OPKILN_MEMORY": "lots"})
    found = patient.check("settings", forked=False)
    assert (found.verdict, found.command) == ("FAIL", "unset OPKILN_MODE OPKILN_MEMORY")
    mended = patient.check("settings", after=found.command, forked=False)
    assert mended.verdict == "PASS"
    skipped = patient.check("memory")
    assert skipped.verdict == "SKIP"
    assert "OPKILN_MEMORY='lots' is not a valid value" in skipped.evidence
