"""What the builders of the host optimizers' ops share. Imports no torch: it is on the hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def host_schemas(op: str, states: Sequence[str], hyper: str) -> tuple[str, ...]:
    """The functions of an op over lists of parameters, gradients and these states in host memory.

    There is one list per role, and all are walked together. ``copies`` is empty or has one tensor
    per parameter. ``<op>_`` makes a step and ``<op>_rollback_`` undoes it; both raise an error for
    a wrong argument. ``<op>_keep`` keeps all lists except the gradients until ``<op>_forget``, and
    returns a ticket for them; the ticket has no elements if it keeps nothing. ``<op>_kept_`` makes
    a step with them and returns a ``Status`` (see op_calls.py). Its schema cannot say which tensors
    it writes to, so its callers count up their versions. Compiled graphs use ``<op>_``.
    """
    marked = [f"Tensor({'bc'[i]}!)[] {name}" for i, name in enumerate(states)]
    plain = [f"Tensor[] {name}" for name in states]
    arguments = (
        f"(Tensor(a!)[] params, Tensor[] grads, {', '.join(marked)}, Tensor(d!)[] copies, "
        f"{hyper}) -> ()"
    )
    return (
        f"{op}_{arguments}",
        f"{op}_rollback_{arguments}",
        f"{op}_keep(Tensor[] params, {', '.join(plain)}, Tensor[] copies) -> Tensor",
        f"{op}_kept_(Tensor ticket, Tensor[] grads, {hyper}) -> int",
        f"{op}_forget(Tensor ticket) -> ()",
    )


class HostBuilder(OpBuilder):
    """An op over lists of tensors in host memory, from ``ops/<name>``."""

    def sources(self) -> list[str]:
        return [f"ops/{self.NAME}/cpu.cpp"]
