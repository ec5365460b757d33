"""In a fresh process: DeepSpeed's ops of some names, built ahead as its setup.py builds them.

``child_deepspeed_aot.py OUT NAME…``: each op's own ``builder()`` gives the extension, torch's
``BuildExtension`` builds all of them in one ``build_ext``. Names that DeepSpeed has no builder for,
or that it says cannot be built here, are left out.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(out: str, *names: str) -> None:
    """Time the one command that builds all."""
    import deepspeed
    from deepspeed.ops.op_builder import cpu as builders
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension

    kinds = {kind.NAME: kind for kind in vars(builders).values() if hasattr(kind, "NAME")}
    skipped = [name for name in names if name not in kinds]
    chosen = {name: kinds[name]() for name in names if name in kinds}
    for name in [name for name, builder in chosen.items() if not builder.is_compatible()]:
        del chosen[name]
        skipped.append(name)
    if not chosen:
        raise SystemExit("Error: DeepSpeed has none of these ops for this environment")
    # Its sources are named from here.
    os.chdir(Path(deepspeed.__file__).parent / "ops")
    begin = time.perf_counter()
    distribution = Distribution(
        {"name": "ops", "ext_modules": [builder.builder() for builder in chosen.values()]}
    )
    command = BuildExtension(distribution)
    command.build_lib, command.build_temp = f"{out}/lib", f"{out}/temp"
    command.ensure_finalized()
    command.run()
    seconds = time.perf_counter() - begin
    built = list(Path(out, "lib").rglob("*.so"))
    if len(built) != len(chosen):
        raise SystemExit(f"Error: {len(built)} libraries of {len(chosen)} ops")
    answer = {"seconds": seconds, "ops": list(chosen), "skipped": skipped}
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(*sys.argv[1:])
