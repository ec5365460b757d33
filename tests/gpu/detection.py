"""Detection on a machine with NVIDIA GPUs: one line per check. Needs torch, and no pytest.

PYTHONPATH=src python tests/gpu/detection.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

from opkiln.machine.devices import nvidia, nvidia_driver


def _timed(what: str) -> nvidia.NvidiaDevices:
    nvidia._known.clear()
    began = time.perf_counter()
    found = nvidia.devices(MEMORY)
    print(f"{what}: {(time.perf_counter() - began) * 1e3:.2f} ms, by {found.how}")
    return found


MEMORY = (tempfile.mkdtemp(),)


def main() -> int:
    asked, remembered = _timed("first"), _timed("again")
    print(asked)
    assert asked.gpus == remembered.gpus, "what was remembered is not what was asked"
    told = nvidia.make_devices(nvidia_driver.ask_nvidia_smi())
    assert [gpu[:4] for gpu in asked.gpus] == [gpu[:4] for gpu in told.gpus], told
    assert (asked.driver, asked.cuda) == (told.driver, told.cuda), told
    assert "torch" not in sys.modules
    # A context in this process would make CUDA fail in its forked child.
    child = os.fork()
    if child == 0:
        import torch

        assert torch.ones(2, device="cuda").sum().item() == 2
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        assert capability == asked.gpus[0].capability
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "CUDA fails in a child forked after detection"
    print("PASS detection: NVML, nvidia-smi and CUDA agree; no context was made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
