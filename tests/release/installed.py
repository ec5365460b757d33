"""The wheel in an empty environment, used as its users will: without torch, with it, from a type
checker, and by the commands of README.md as they are typed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from archives import Archives
from environments import REPOSITORY
from steps import Failure, Tools, run, say

HERE = Path(__file__).resolve().parent
# Licences that ask nothing more of our users than ours does.
PERMISSIVE = ("Apache", "BSD", "MIT", "PSF")
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)

LICENCES = """
import importlib.metadata, json
found = []
for each in importlib.metadata.distributions():
    said = each.metadata
    licence = said["License-Expression"] or said["License"] or "; ".join(
        c.rpartition(" :: ")[2] for c in said.get_all("Classifier", []) if c.startswith("License")
    )
    found.append((said["Name"], said["Version"], licence))
print(json.dumps(found))
"""

# Without torch: what is typed, how it exits, and what it must say.
WITHOUT_TORCH = (
    ("opkiln --version", 0, "opkiln "),
    ("opkiln report", 0, "torch"),
    ("python -c 'import opkiln; opkiln.optim.CPUAdam'", 1, "needs torch, which is not installed"),
    ("opkiln build cpu_adam", 6, "hint: pip install torch"),
    ("opkiln demo", 3, "hint: pip install torch"),
)

SMOKE = '''
import os, sys
import torch
import opkiln

assert os.path.dirname(opkiln.__file__).startswith(sys.prefix), opkiln.__file__

generator = torch.Generator().manual_seed(0)
weights = torch.randn(1000, generator=generator)
mine, theirs = (weights.clone().requires_grad_() for _ in range(2))
optimizers = opkiln.optim.CPUAdam([mine], lr=0.01), torch.optim.AdamW([theirs], weight_decay=0.0)
optimizers[1].param_groups[0]["lr"] = 0.01
for _ in range(3):
    mine.grad = torch.randn(1000, generator=generator)
    theirs.grad = mine.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)

@opkiln.op(source="""
#include <opkiln/op.h>
opk::Tensor twice(const opk::Tensor& x) {
  opk::Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = 2 * x.data<const float>()[i];
  return out;
}
OPKILN_OP(twice, cpu);
""")
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.check(weights)
print(opkiln.explain("cpu_adam"))
'''


class User:
    """An environment with the wheel and its dependencies, and nothing of the checkout."""

    def __init__(self, place: Path, archives: Archives) -> None:
        self.place = place
        self.clone = archives.clone
        place.mkdir(parents=True)
        run([sys.executable, "-m", "venv", str(place / "env")], place)
        self.bin = place / "env" / "bin"
        self.typed(f"pip install -q {archives.wheel}")

    def typed(self, command: str, cwd: Path | None = None, *, expected: int = 0) -> str:
        """What a command prints that is typed in a shell of this environment. Raises Failure."""
        variables = {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "XDG_CACHE_HOME": str(self.place / "cache"),
        }
        shell = ["bash", "-euo", "pipefail", "-c", command]
        return run(shell, cwd or self.place, expected=expected, **variables)


def check(tools: Tools, archives: Archives, place: Path, torch: str) -> None:
    """Everything below. Raises Failure."""
    user = User(place, archives)
    check_licences(user)
    check_without_torch(user)
    user.typed(f"pip install -q '{torch}'")
    said = user.typed("opkiln demo")
    say(f"opkiln demo, beside {torch}: {said.strip().splitlines()[-1].strip()}")
    (place / "smoke.py").write_text(SMOKE)
    user.typed("python smoke.py")
    say("smoke test: an optimizer steps as torch's, and an op of one file is as its reference")
    check_types(tools, user)
    check_readme(user)


def check_licences(user: User) -> None:
    """What pip installs with the wheel asks nothing more of its users. Raises Failure."""
    (user.place / "licences.py").write_text(LICENCES)
    said = []
    for name, version, licence in json.loads(user.typed("python licences.py")):
        if name in ("pip", "setuptools"):
            continue  # of every environment
        if not licence.startswith(PERMISSIVE):
            raise Failure(f"{name} has the licence {licence!r}")
        said.append(f"{name} {version} ({licence})")
    say(f"installed: {', '.join(sorted(said))}")


def check_without_torch(user: User) -> None:
    """Whoever has no torch is told so, and how to get it. Raises Failure."""
    for command, code, expected in WITHOUT_TORCH:
        said = user.typed(command, expected=code)
        if expected not in said or ("Traceback" in said) != command.startswith("python"):
            raise Failure(f"without torch, `{command}` does not say {expected!r}:\n{said}")
    say(f"without torch: {len(WITHOUT_TORCH)} commands answer in plain words")


def check_types(tools: Tools, user: User) -> None:
    """A typed package is checked against the installed one, and its mistakes are found.

    Raises Failure.
    """
    mypy = [tools.program("mypy"), "--strict", "--python-executable", str(user.bin / "python")]
    mypy += ["--config-file=", "--cache-dir", str(user.place / "mypy"), "--no-error-summary"]
    run([*mypy, "right.py"], HERE / "typed_user")
    said = run([*mypy, "wrong.py"], HERE / "typed_user", expected=1)
    lines = (HERE / "typed_user" / "wrong.py").read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    found = set(map(int, re.findall(r"^wrong\.py:(\d+): error", said, re.MULTILINE)))
    if found != expected:
        raise Failure(f"mypy finds lines {sorted(found)}, not {sorted(expected)}:\n{said}")
    say(f"types: a user's package passes mypy --strict, and {len(found)} mistakes are found")


def check_readme(user: User) -> None:
    """The commands of README.md, in their order. Raises Failure.

    Those for a clone run in one; ``make`` has tests of its own.
    """
    ran = 0
    for block in SHELL.findall((REPOSITORY / "README.md").read_text()):
        if block.startswith("make "):
            continue
        cwd = user.clone if "pip install .\n" in block else user.place
        user.typed(block, cwd)
        ran += len(block.splitlines())
    if not ran:
        raise Failure("README.md shows no commands")
    say(f"README.md: {ran} lines of commands, as typed")
