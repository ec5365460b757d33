"""One library of op.h on several torches: ``light.py build`` prints its path, ``light.py run PATH``
opens it with the torch of this interpreter and calls it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sample"))

from light.op import LightBuilder


def build() -> None:
    """Compile the library with the torch of this interpreter, and print where it is."""
    from opkiln.decision.terms import Request
    from opkiln.loading import loader

    print(loader.obtain(Request(LightBuilder().op(), must_be_native=True))[0].path)


def run(path: str) -> None:
    """Values of each type cross unchanged, and errors come back. Raises AssertionError."""
    import torch

    from opkiln.loading import register
    from opkiln.loading.native import open_artifact

    op = LightBuilder().op()
    assert op.registration is not None
    functions = register.register(op.spec.name, op.registration)
    open_artifact(op.spec, path)
    x = torch.arange(5.0)
    assert torch.equal(functions.scaled_add(x, x, 2.0), 3 * x)
    lists = ([1], [2.5], [True], ["text"])
    assert functions.lists(x, *lists) == lists
    given = (None, 1.0, None, "text", [3])
    assert functions.optionals(x, *given) == given
    assert functions.twice(x, "ab") == "abab"
    assert torch.equal(functions.doubled(x.bfloat16()), 2 * x.bfloat16())
    assert torch.equal(functions.topk(x, 2)[0], x.topk(2)[0])
    for call, said in (
        (lambda: functions.scaled_add(x, x[:3], 1.0), "scaled_add: y has shape [3], x has [5]"),
        (lambda: functions.refused_by_torch(x), "refused_by_torch: aten::mm failed: "),
        (lambda: functions.fail_in_part(x, 3), "fail_in_part: the part with the number failed"),
    ):
        heard = ""
        try:
            call()
        except RuntimeError as error:
            heard = str(error)
        assert heard.startswith(said), heard
    print(f"op.h on torch {torch.__version__}: all calls agree")


if __name__ == "__main__":
    build() if sys.argv[1] == "build" else run(sys.argv[2])
