"""In a fresh process: the commands that opkiln would build the CUDA op by, into ``STAGE``.

``child_plan.py STAGE``. The compilers are probed where the store does not know them yet.
"""

import json
import os
import sys

from peers import cuda_opkiln_builder

from opkiln.building.asking import plan_here
from opkiln.decision.terms import BUILD, Request
from opkiln.plan import plan as plans


def main(stage: str) -> None:
    """Print each step's argv."""
    plan = plan_here(Request(cuda_opkiln_builder.builder().op(), BUILD))
    places = plans.anchors(plan, stage)
    answer = {
        "steps": [
            {"kind": s.kind, "argv": list(plans.command(s, places).argv)} for s in plan.steps
        ],
        "environment": dict(plan.environment),
        "output": os.path.join(stage, plan.output),
    }
    print("\nBENCH-ANSWER " + json.dumps(answer), flush=True)


main(sys.argv[1])
