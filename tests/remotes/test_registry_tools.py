"""What other tools of registries make of opkiln's artifacts, on a real registry."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import tiers
from sample.remote import Machines

from opkiln.remote import lockfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sample.tiers import Place

pytestmark = pytest.mark.skipif(not tiers.REAL, reason="make test-remotes runs it")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    return Machines(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="module")
def registry(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = tiers.start("docker-registry", tmp_path_factory.mktemp("tier") / "registry")
    machines.push(made.url, **made.variables)
    yield made
    made.stop()


def row(machines: Machines) -> lockfile.LockRow:
    (only,) = lockfile.read(machines.lock())
    return only


def skopeo(*words: str) -> str:
    command = [tiers.program("skopeo"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_skopeo_reads_the_manifest(machines: Machines, registry: Place) -> None:
    image = f"docker://{registry.url.removeprefix('oci://')}:{row(machines).name}"
    login = ("--creds", "me:secret", "--tls-verify=false")
    manifest = json.loads(skopeo("inspect", "--raw", *login, image))
    assert manifest["artifactType"] == "application/vnd.opkiln.bundle.v1"
    assert manifest["annotations"]["org.opkiln.op"] == "small"
    assert manifest["layers"][0]["digest"] == f"sha256:{row(machines).sha256}"


def test_a_layout_that_skopeo_copied_serves_without_a_network(
    machines: Machines, registry: Place, tmp_path: Path
) -> None:
    name = row(machines).name
    skopeo(
        "copy", "--src-creds", "me:secret", "--src-tls-verify=false",
        f"docker://{registry.url.removeprefix('oci://')}:{name}", f"oci:{tmp_path}/layout:{name}",
    )  # fmt: skip
    found = machines.fetch(machines.new(), f"oci://{tmp_path}/layout")
    assert found["value"] == 42, found


def test_oras_pulls_the_file(
    machines: Machines, registry: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("oras.client")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", registry.variables["SSL_CERT_FILE"])
    host, _, repository = registry.url.removeprefix("oci://").partition("/")
    oras = client.OrasClient(hostname=host, auth_backend="basic")
    oras.login(hostname=host, username="me", password="secret", config_path=str(tmp_path / "c"))
    target = f"{host}/{repository}:{row(machines).name}"
    (file,) = oras.pull(target=target, outdir=str(tmp_path))
    assert Path(file).name == "small.opkiln"
    assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == row(machines).sha256
