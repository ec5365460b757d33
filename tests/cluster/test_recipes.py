"""The recipes in examples/cluster: all of them are checked, and most are run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_rows import whole
from ranks import free_port
from sample import forks, known, pool

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "cluster"
SCRIPTS = ("torchrun.sh", "slurm.sbatch")
MANIFESTS = ("job.yaml", "jobset.yaml")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_sound_and_ends_at_the_first_error(name: str) -> None:
    text = (RECIPES / name).read_text()
    subprocess.run(["bash", "-n", RECIPES / name], check=True)
    assert text.startswith("#!/bin/bash\n")
    assert "\nset -euo pipefail\n" in text
    assert re.search(r"^[^#]*\bexport \w+=\$\(", text, re.MULTILINE) is None  # hides a failure
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", RECIPES / name], check=True)


@pytest.mark.parametrize("name", [*SCRIPTS, *MANIFESTS])
def test_recipe_names_only_settings_that_exist(name: str) -> None:
    named = set(re.findall(r"OPKILN_\w+", (RECIPES / name).read_text()))
    assert named
    assert named <= known_settings()


def known_settings() -> set[str]:
    page = ROOT / "docs" / "reference" / "variables.md"
    return set(re.findall(r"OPKILN_\w+", page.read_text()))


@pytest.mark.parametrize("name", ["train.py", "ray_train.py"])
def test_program_is_valid_python_and_ensures_its_op_first(name: str) -> None:
    tree = ast.parse((RECIPES / name).read_text())
    calls = [ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)]
    assert "opkiln.ensure" in calls


def pods(name: str) -> list[dict[str, Any]]:
    """The pods that a manifest describes."""
    yaml = pytest.importorskip("yaml")
    found = []
    for each in yaml.safe_load_all((RECIPES / name).read_text()):
        if each["kind"] == "Job":
            found.append(each["spec"]["template"]["spec"])
        for job in each["spec"].get("replicatedJobs", ()):
            found.append(job["template"]["spec"]["template"]["spec"])
    return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_fetches_before_it_runs_and_both_see_one_store(name: str) -> None:
    (pod,) = pods(name)
    (init,), (main,) = pod["initContainers"], pod["containers"]
    assert init["command"][:3] == ["opkiln", "cache", "pull"]
    volumes = {each["name"] for each in pod["volumes"]}
    for container in (init, main):
        assert {each["name"] for each in container["volumeMounts"]} == volumes
    stores = {variables(each)["OPKILN_CACHE_DIR"] for each in (init, main)}
    assert len(stores) == 1
    assert variables(main)["OPKILN_LOCK"] == init["command"][init["command"].index("--lock") + 1]


def test_both_manifests_describe_the_same_pod() -> None:
    (job,), (jobset,) = pods("job.yaml"), pods("jobset.yaml")
    endpoint = "--rdzv-endpoint="
    assert job.pop("subdomain") == "train"  # of a JobSet, its network says it
    for pod in (job, jobset):
        command = pod["containers"][0]["command"]
        command[:] = [each for each in command if not each.startswith(endpoint)]
    assert job == jobset


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.slow
def test_init_container_fetches_by_lock_file_what_the_sealed_container_then_loads(
    tmp_path: Path,
) -> None:
    """The commands and the variables of job.yaml, with a directory for the registry."""
    builder = known.make_store(tmp_path / "builder")
    here = {**clean(), "OPKILN_CACHE_DIR": str(builder), "OPKILN_STORE_LAYERS": str(pool.LAYER)}
    tier = f"file://{tmp_path / 'tier'}"
    for words in (["build", "utils"], ["cache", "push", "utils", "--remote", tier],
                  ["lock", "utils", "-o", "ops.lock"]):  # fmt: skip
        opkiln(words, here, tmp_path)
    pool.add(builder)
    volume = tmp_path / "ops"
    volume.mkdir()
    volume.chmod(0o777)  # as an emptyDir is
    (pod,) = pods("job.yaml")

    def there(container: dict[str, Any]) -> dict[str, str]:
        given = {k: v for k, v in variables(container).items() if v}
        if "OPKILN_REMOTES" in given:
            given["OPKILN_REMOTES"] = tier
        return {**clean(), **{k: moved(v) for k, v in given.items()}}

    def moved(value: str) -> str:
        return value.replace("/etc/ops/", f"{tmp_path}/").replace("/ops/store", f"{volume}/store")

    (init,), (main,) = pod["initContainers"], pod["containers"]
    opkiln([moved(each) for each in init["command"][1:]], there(init), tmp_path)
    opkiln(["check", "utils"], there(main), tmp_path)


def opkiln(words: list[str], env: dict[str, str], where: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forks.Fork(["-m", "opkiln", *words], env=env, cwd=where, **pipes) as process:
        told = process.communicate(timeout=200)
    assert process.returncode == 0, (words, told)


def clean() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPKILN_", "PYTHON"))}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "OPKILN_PROGRESS": "off", "PATH": programs}


@pytest.mark.slow
def test_torchrun_recipe_on_two_nodes_builds_once_and_fetches_once(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not whole(request.config):
        pytest.skip("imports torch four times: --full-counts")
    port = free_port()
    nodes = [
        subprocess.Popen(
            [RECIPES / "torchrun.sh", f"localhost:{port}", "2", "1"],
            env={
                **clean(), "OPKILN_CACHE_DIR": str(tmp_path / name), "LOCAL_ADDR": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo", "OPKILN_JOB_SECRET": "a secret of the job",
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    said = ""
    try:
        for node in nodes:
            out, err = node.communicate(timeout=400)
            assert node.returncode == 0, err
            said += out
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    found = re.findall(r"^rank (\d) of 2: cpu_adam (\w+), library ([0-9a-f]{16})$", said, re.M)
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    assert sorted(how for _, how, _ in found) == ["built", "fetched"]
    assert len({library for *_, library in found}) == 1
