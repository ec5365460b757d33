"""Runs a command beside busy loops: ``python tests/busy.py 8 make test``. It ends as that does."""

from __future__ import annotations

import subprocess
import sys


def main(loops: int, command: list[str]) -> int:
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(loops)
    ]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for each in busy:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
