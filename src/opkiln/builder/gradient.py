"""The gradient of an op: by default, that of its reference.

The backward pass runs the reference once more on the saved inputs, with autograd, and asks torch
for its gradients. So it is right wherever the reference is, also for the second derivative. An
author who has a faster one gives it with ``@f.backward``.

In forward mode and in the transforms of ``torch.func`` the reference itself runs: a kernel knows
nothing of tangents, and without this they would be zero without an error.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _after_autograd_keyset,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
)
from torch.autograd import forward_ad

from opkiln.builder.variants import add_defaults, autocast_off, tensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Gradient:
    """The kernel of an op at torch's dispatch key Autograd. ``below`` is the overload that it goes
    on to. A graph that is traced below autograd keeps that one: if it has no gradient, the compiled
    graph does not come here in each call."""

    def __init__(self, overload: Any, below: Any, reference: Callable[..., Any]) -> None:
        self.overload, self.below, self.reference = overload, below, reference
        # An author's formula: ``backward(*grads, *inputs)`` gives the inputs' gradients.
        self.backward: Callable[..., Any] | None = None
        self.wants_output = False

    def replace(self, backward: Callable[..., Any]) -> None:
        """Take a formula. A backward pass that has begun ends with the one that it began with."""
        self.backward, self.wants_output = backward, takes_output(backward)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = tuple(tensors(args, kwargs))
        if _are_functorch_transforms_active() or (
            forward_ad._current_level >= 0
            and any(forward_ad.unpack_dual(each).tangent is not None for each in given)  # type: ignore[no-untyped-call]
        ):
            return self.reference(*args, **kwargs)
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            call = _GradientCall(self, keyset, *add_defaults(self.overload._schema, args, kwargs))
            flat = _AutogradFunction.apply(call, *given)  # type: ignore[no-untyped-call]
            return _rebuilt(call.form, iter(flat))
        return _GradientCall(self, keyset, args, kwargs).below_autograd(args, kwargs)


class _GradientCall:
    """One call of an op, with its tensors taken out: autograd follows tensors alone."""

    def __init__(
        self, gradient: Gradient, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.gradient, self._keyset, self._args, self._kwargs = gradient, keyset, args, kwargs
        self.backward, self.wants_output = gradient.backward, gradient.wants_output
        self.form: Any = None  # of the result, which autograd takes and gives as flat tuples

    def below_autograd(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with _AutoDispatchBelowAutograd():
            return self.gradient.below.redispatch(
                self._keyset & _after_autograd_keyset, *args, **kwargs
            )

    def with_tensors(self, given: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with these tensors in the places of those that were taken out."""
        left = iter(given)
        args = [_fill(each, left) for each in self._args]
        return args, {name: _fill(each, left) for name, each in self._kwargs.items()}

    def by_author(self, given: Sequence[Any], output: Any, grads: tuple[Any, ...]) -> list[Any]:
        """The gradients of the tensors by the author's formula, which gives one for each argument.
        Raises TypeError."""
        args, named = self.with_tensors(given)
        told = {**named, "output": output} if self.wants_output else named
        assert self.backward is not None
        found = self.backward(*grads, *args, **told)
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        values = (*self._args, *self._kwargs.values())
        if len(found) != len(values):
            raise TypeError(
                f"the backward of {self.gradient.overload} gives {len(found)} gradients, for "
                f"{len(values)} arguments"
            )
        pairs = zip(values, found, strict=True)
        return [each for value, grad in pairs for each in _match_gradients(value, grad)]


class _AutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _GradientCall, *given: Tensor) -> tuple[Any, ...]:
        args, kwargs = call.with_tensors(given)
        result = call.below_autograd(args, kwargs)
        call.form, flat = _form_of(result), _leaves(result)
        ctx.call, ctx.inputs = call, len(given)
        ctx.save_for_backward(*given, *(flat if call.wants_output else ()))
        ctx.mark_non_differentiable(
            *(each for each in flat if isinstance(each, Tensor) and not _has_gradient(each))
        )
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        given, output = saved[: ctx.inputs], saved[ctx.inputs :]
        with autocast_off(given):
            if call.backward is not None:
                whole = _rebuilt(call.form, iter(output)) if output else None
                return (None, *call.by_author(given, whole, grads))
            return (None, *_reference_gradients(call, given, ctx.needs_input_grad[1:], grads))


def _reference_gradients(
    call: _GradientCall, given: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    """The gradients of the reference, which is computed once more."""
    again = torch.is_grad_enabled()  # whether these gradients are to be differentiated, too
    with torch.enable_grad():
        # A view stays connected to the saved tensor, for the second derivative.
        inputs = [
            (each.view_as(each) if again else each.detach().requires_grad_()) if need else each
            for each, need in zip(given, needed, strict=True)
        ]
        args, kwargs = call.with_tensors(inputs)
        results = tensors([call.gradient.reference(*args, **kwargs)], {})
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        wanted = [each for each, need in zip(inputs, needed, strict=True) if need]
        if not pairs or not wanted:
            return [None] * len(given)
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs], wanted, [grad for _, grad in pairs],
                create_graph=again, allow_unused=True,
            )
        )  # fmt: skip
    return [next(found) if need else None for need in needed]


def takes_output(backward: Callable[..., Any]) -> bool:
    """Whether a formula is to be given the result of the op."""
    return "output" in inspect.signature(backward).parameters


# Not torch's pytree, which takes longer than a small kernel.
def _leaves(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        return (value,)
    return tuple([leaf for part in value for leaf in _leaves(part)])


def _form_of(value: Any) -> Any:
    """The type of a list or tuple, with the forms of its parts; None for anything else."""
    if not isinstance(value, (list, tuple)):
        return None
    return type(value), [_form_of(part) for part in value]


def _rebuilt(form: Any, left: Iterator[Any]) -> Any:
    if form is None:
        return next(left)
    kind, parts = form
    return kind([_rebuilt(part, left) for part in parts])


def _fill(value: Any, left: Iterator[Any]) -> Any:
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, (list, tuple)):
        return [next(left) if isinstance(each, Tensor) else each for each in value]
    return value


def _match_gradients(value: Any, grad: Any) -> Sequence[Any]:
    """The gradients of the tensors of one argument."""
    if isinstance(value, Tensor):
        return (grad,)
    if not isinstance(value, (list, tuple)):
        return ()
    given = grad if grad is not None else [None] * len(value)
    return [each for item, each in zip(value, given, strict=True) if isinstance(item, Tensor)]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
