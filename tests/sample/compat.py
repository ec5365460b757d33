"""The same call on torch.utils.cpp_extension and on opkiln's of the same name, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = """
#include <Python.h>
#ifndef ANSWER
#define ANSWER 42
#endif
static PyObject* answer(PyObject*, PyObject*) { return Py_BuildValue("i", ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, "What the answer is."}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", "By hand.", -1, methods};
PyMODINIT_FUNC PyInit_NAME() { return PyModule_Create(&definition); }
"""


def module(name: str) -> str:
    """A module without any of torch's headers, which compiles in a moment."""
    return MODULE.replace("NAME", name)


class Outcome(NamedTuple):
    """What a call gave, or what it raised."""

    value: Any
    error: BaseException | None


def outcome(call: Callable[[Any], Any], system: Any) -> Outcome:
    try:
        return Outcome(call(system), None)
    except Exception as error:
        return Outcome(None, error)


def both(call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(torch's, opkiln's) value of a call that gets the module with ``load`` and the others."""
    import torch.utils.cpp_extension as theirs

    import opkiln.compat.torch as ours

    return call(theirs), call(ours)


def both_raise(call: Callable[[Any], Any]) -> tuple[BaseException, BaseException]:
    """What both raise. What catches torch's error catches opkiln's, too."""
    import torch.utils.cpp_extension as theirs

    import opkiln.compat.torch as ours

    expected, found = outcome(call, theirs), outcome(call, ours)
    assert expected.error is not None, f"torch gave {expected.value!r}"
    assert found.error is not None, f"opkiln gave {found.value!r}, torch raised {expected.error!r}"
    assert isinstance(found.error, type(expected.error)), (expected.error, found.error)
    return expected.error, found.error


def described(found: Any) -> dict[str, Any]:
    """What a caller sees of a module: its kind, its names, their kinds and texts."""
    names = [name for name in dir(found) if not name.startswith("__")]
    return {
        "type": type(found),
        "doc": found.__doc__,
        "names": {name: (type(getattr(found, name)), getattr(found, name).__doc__)
                  for name in names},
    }  # fmt: skip
