"""The Kubernetes recipes against the schemas of Kubernetes: ``make test-cluster``.

kubernetes-validate and its schemas are installed into an environment of their own. A JobSet is not
in them: the jobs in it are checked as the jobs that it will make.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".manifests-venv"
SPLIT = """
import sys, yaml
found = []
for name in sys.argv[2:]:
    for each in yaml.safe_load_all(open(name)):
        if each["kind"] == "JobSet":
            for job in each["spec"]["replicatedJobs"]:
                made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
                found.append({**made, **job["template"]})
        else:
            found.append(each)
with open(sys.argv[1], "w") as file:
    yaml.safe_dump_all(found, file)
"""


def main() -> int:
    if not (HOME / "bin" / "kubernetes-validate").exists():
        venv.create(HOME, with_pip=True)
        pip = [HOME / "bin" / "python", "-m", "pip", "install", "-q", "kubernetes-validate"]
        subprocess.run(pip, check=True)
    recipes = sorted((ROOT / "examples" / "cluster").glob("*.yaml"))
    with tempfile.TemporaryDirectory() as scratch:
        jobs = Path(scratch) / "jobs.yaml"
        subprocess.run([HOME / "bin" / "python", "-c", SPLIT, jobs, *recipes], check=True)
        check = [HOME / "bin" / "kubernetes-validate", "--strict", jobs]
        return subprocess.run(check, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
