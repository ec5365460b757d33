"""Shared by the builders of the optimizers' ops. Imports no torch: it is on the hit path."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from opkiln.base.model import CUDA
from opkiln.builder import CUDAOpBuilder, OpBuilder

# Whatever may change between two replays of a captured graph is a tensor on the parameters' device.
# - `masters` is empty, or has an fp32 tensor per parameter, without elements if that parameter has
#   no master.
# - `steps` is one tensor for all parameters, or one for each, no two of them the same. Parameters
#   that have always been stepped together share one; others still go in the same call. The op adds
#   1 to each.
# - `lr_tensor` replaces `lr`; `grad_scale` and `found_inf` are those of torch.amp. Clipping needs
#   no argument of its own: its factor is part of `grad_scale`.
_NUMBERS = "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None"


def fused_schemas(op: str, states: Sequence[str], hyper: str) -> tuple[str, str, str]:
    """The functions of an op over lists of parameters, gradients and these states.

    ``<op>_`` makes a step, and raises an error for a wrong argument. ``<op>_plan`` prepares lists
    that stay the same from step to step: the plan, on the device, has the addresses of all tensors,
    and its ledger has what the host must know. If both have no elements, there is no plan.
    ``<op>_planned_`` makes a step with a plan and new gradients, and returns a ``Status`` (see
    op_calls.py). The caller must keep the tensors alive, and count up their versions: a schema
    cannot say what is written through addresses. Compiled graphs use ``<op>_``.
    """
    marked, plain = _lists(states)
    rest = f"{hyper}, {_NUMBERS}"
    written = f"{marked}, Tensor(d!)[] masters, Tensor(e!)[] steps"
    read = f"{plain}, Tensor[] masters, Tensor[] steps"
    return (
        f"{op}_(Tensor(a!)[] params, Tensor[] grads, {written}, {rest}) -> ()",
        f"{op}_plan(Tensor[] params, Tensor[] grads, {read}) -> (Tensor, Tensor)",
        f"{op}_planned_(Tensor(a!) plan, Tensor(b!) ledger, Tensor[] grads, {rest}) -> int",
    )


def _reference(builder: OpBuilder) -> SimpleNamespace:
    """The functions of ``ops/<name>/reference.py``, and those for kept lists and plans."""
    from opkiln.ops.optimizing.references import reference_of

    return reference_of(builder.NAME)


class FusedBuilder(CUDAOpBuilder):
    """An op over lists of tensors, from ``ops/<name>``."""

    BACKENDS = ("cuda", "rocm", "cpu")
    reference = _reference

    def sources(self) -> list[str]:
        return [f"ops/{self.NAME}/{'cpu.cpp' if self.build_for_cpu else 'cuda.cu'}"]

    def kernels(self) -> Sequence[str]:
        # A plan saves launches, and a CPU has no launches.
        return [f"{self.NAME}_"] if self.build_for_cpu else super().kernels()

    def fake(self) -> SimpleNamespace:
        from opkiln.ops.optimizing.references import fakes

        return fakes(self.NAME)

    def nvcc_args(self) -> list[str]:
        # Division and root may be off by two units in the last place. They then have no branch for
        # special numbers, which takes registers. Their error affects only the change of a
        # parameter. -O is of the host's code, which makes checks and launches: optimizing it all
        # would take longer than compiling the kernels.
        if self.backend != CUDA:
            return []
        return ["-prec-div=false", "-prec-sqrt=false", "-O1"]


def host_schemas(op: str, states: Sequence[str], hyper: str) -> tuple[str, ...]:
    """The functions of an op over lists of parameters, gradients and these states in host memory.

    There is one list per role, and all are walked together. ``copies`` is empty or has one tensor
    per parameter. ``<op>_`` makes a step and ``<op>_rollback_`` undoes it; both raise an error for
    a wrong argument. ``<op>_keep`` keeps all lists except the gradients until ``<op>_forget``, and
    returns a ticket for them; the ticket has no elements if it keeps nothing. ``<op>_kept_`` makes
    a step with them and returns a ``Status`` (see op_calls.py). Its schema cannot say which tensors
    it writes to, so its callers count up their versions. Compiled graphs use ``<op>_``.
    """
    marked, plain = _lists(states)
    arguments = (
        f"(Tensor(a!)[] params, Tensor[] grads, {marked}, Tensor(d!)[] copies, {hyper}) -> ()"
    )
    return (
        f"{op}_{arguments}",
        f"{op}_rollback_{arguments}",
        f"{op}_keep(Tensor[] params, {plain}, Tensor[] copies) -> Tensor",
        f"{op}_kept_(Tensor ticket, Tensor[] grads, {hyper}) -> int",
        f"{op}_forget(Tensor ticket) -> ()",
    )


class HostBuilder(OpBuilder):
    """An op over lists of tensors in host memory, from ``ops/<name>``."""

    reference = _reference

    def sources(self) -> list[str]:
        return [f"ops/{self.NAME}/cpu.cpp"]


def _lists(states: Sequence[str]) -> tuple[str, str]:
    """The lists of states in a schema: as arguments that are written to, and as others."""
    marked = [f"Tensor({'bc'[i]}!)[] {name}" for i, name in enumerate(states)]
    return ", ".join(marked), ", ".join(f"Tensor[] {name}" for name in states)
