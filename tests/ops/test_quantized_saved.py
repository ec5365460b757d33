"""Quantized tensors are saved, read by ``torch.load`` as it is, and moved, as tensors are."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child

from opkiln import quant
from opkiln.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def _made() -> dict[str, Any]:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    return {
        "symmetric": quant.quantize(x, bits=4, group_size=16, narrow_range=False),
        "asymmetric": quant.quantize(x.bfloat16(), group_size=32, symmetric=False),
        "swizzled": quant.swizzle_quantize(x, nodes=2, devices_per_node=3, group_size=16),
        "fp": quant.FPQuantizer("e3m2", group_size=16).quantize(x),
    }


def _back(q: Any) -> torch.Tensor:
    if isinstance(q, quant.FPQuantized):
        return quant.FPQuantizer(q.format, group_size=q.group_size).dequantize(q)
    return quant.dequantize(q)


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert [each for each in one if not isinstance(each, torch.Tensor)] == [
        each for each in other if not isinstance(each, torch.Tensor)
    ]
    assert torch.equal(_back(one), _back(other))


LOADING = """
found = torch.load({path!r})
assert "opkiln.ops" not in str(before), before
print(*(type(each).__name__ for each in found.values()), found["symmetric"].narrow_range)
"""


_OPKILN_FIRST = """
import sys; finders = list(sys.meta_path)
import opkiln; assert 'torch' not in sys.modules
import torch; assert sys.meta_path == finders, "importing opkiln left one behind"
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, opkiln",
        "import torch; from opkiln import quant",
        _OPKILN_FIRST,
        pytest.param("from opkiln import quant; import torch", marks=pytest.mark.full),
    ],
)
def test_torch_load_reads_what_was_saved_in_a_process_that_imports_torch_and_opkiln(
    tmp_path: Path, imports: str
) -> None:
    path = str(tmp_path / "saved.pt")
    torch.save(_made(), path)
    program = f"{imports}\nimport sys; before = [m for m in sys.modules if 'opkiln' in m]\n"
    said = child.run(
        program + LOADING.format(path=path), bare=False, forked=imports.startswith("import torch")
    )
    assert said == "Quantized Quantized Quantized FPQuantized False\n"


_SAVED_HERE = """
import opkiln, io, sys; assert "torch" not in sys.modules
import torch
file = io.BytesIO()
x = torch.ones(32)
made = {"whole": opkiln.quant.quantize(x, group_size=16)} if sys.argv[1] == "whole" else {
    "fp": opkiln.quant.FPQuantizer("e3m2", group_size=16).quantize(x)}
torch.save(made, file)
file.seek(0)
print(*(type(each).__name__ for each in torch.load(file).values()))
"""
_WITHOUT_BACKENDS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OPKILN_MODE": "reference"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fp", "FPQuantized"), pytest.param("whole", "Quantized", marks=pytest.mark.full)],
)
def test_a_process_loads_what_it_saved_also_if_torch_loads_no_backends(
    kind: str, name: str
) -> None:
    said = child.run(_SAVED_HERE, kind, env=_WITHOUT_BACKENDS, bare=False, forked=False)
    assert said == f"{name}\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import opkiln; import torch; from opkiln import quant",
        pytest.param(
            "from opkiln import quant; import torch;"
            " from opkiln.quant import Quantized, FPQuantized",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_process_that_only_loads_needs_a_class_or_the_module_if_torch_loads_no_backends(
    tmp_path: Path, imports: str
) -> None:
    path = str(tmp_path / "saved.pt")
    torch.save(_made(), path)
    program = f"{imports}\nprint(*(type(q).__name__ for q in torch.load({path!r}).values()))"
    said = child.run(program, env=_WITHOUT_BACKENDS, bare=False, forked=False)
    assert said == "Quantized Quantized Quantized FPQuantized\n"


def test_torch_load_gives_the_same_numbers_also_memory_mapped_and_on_another_device(
    tmp_path: Path,
) -> None:
    made, path = _made(), tmp_path / "saved.pt"
    torch.save(made, path)
    for options in ({}, {"mmap": True}, {"weights_only": False}, {"map_location": "cpu"}):
        found = torch.load(path, **options)
        for name, q in made.items():
            _assert_same(found[name], q)
    assert torch.load(path, map_location="meta")["symmetric"].values.is_meta


def test_copies_and_pickles_are_the_same() -> None:
    for q in _made().values():
        for other in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
            _assert_same(other, q)


def test_to_moves_every_tensor_and_sets_what_dequantize_gives() -> None:
    for q in _made().values():
        assert q.device == torch.device("cpu")
        moved = q.to("meta")
        assert moved.device.type == "meta"
        assert {each.device.type for each in moved if isinstance(each, torch.Tensor)} == {"meta"}
        assert (moved.shape, moved.dtype) == (q.shape, q.dtype)
        halves = q.to(torch.float16)
        assert halves.dtype == torch.float16
        assert halves[0] is q[0], "nothing is copied"
        assert _back(halves).dtype == torch.float16
        both = q.to("meta", torch.bfloat16, non_blocking=True)
        assert (both.device.type, both.dtype) == ("meta", torch.bfloat16)
        like = q.to(torch.empty(0, dtype=torch.float16, device="meta"))
        assert (like.device.type, like.dtype) == ("meta", torch.float16)
        _assert_same(q.to(device="cpu"), q)
        assert q.to("cpu")[0] is q[0]
        _assert_same(q.cpu(), q)
        with pytest.raises(UsageError, match=r"dtype is torch\.int8, expected float32"):
            q.to(torch.int8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")
def test_what_needs_a_gpu_says_what_torch_says() -> None:
    for q in _made().values():
        for move in (q.cuda, q.pin_memory):
            with pytest.raises((RuntimeError, AssertionError)) as theirs:
                getattr(torch.zeros(1), move.__name__)()
            with pytest.raises(type(theirs.value), match=str(theirs.value).split("(")[0][:40]):
                move()
