"""io.save and io.load: safetensors' layout, whole files, the old one or the new one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import signal
import stat
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_rows import whole
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from sample import child

from opkiln import io
from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.io import handle
from opkiln.io.saving import DTYPES


def sample() -> dict[str, torch.Tensor]:
    made = {"large": torch.randn(700, 1000), "scalar": torch.tensor(7), "none": torch.empty(0, 3)}
    made["turned"] = torch.arange(91).view(7, 13).t()
    for name, dtype in DTYPES.items():
        made[name] = torch.randint(0, 2, (5 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    return made


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == each.dtype
        and left[name].shape == each.shape
        and torch.equal(
            left[name].contiguous().view(-1).view(torch.uint8),
            each.contiguous().view(-1).view(torch.uint8),
        )
        for name, each in right.items()
    )


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    tensors, path = sample(), tmp_path / "a.safetensors"
    io.save(tensors, path, metadata={"step": "3", "ä": "ö"})
    assert same(io.load(path, names=tensors), tensors)
    assert sorted(io.load(path)) == sorted(tensors)
    assert same(
        io.load(path, names=["I64", "large"]), {each: tensors[each] for each in ("I64", "large")}
    )
    header = io.read_header(path)
    assert header.metadata == {"step": "3", "ä": "ö"}
    assert header.entries["turned"][:2] == (torch.int64, (13, 7))
    with io.AsyncIO("threads", block_size=4096, depth=2) as files:
        io.save(tensors, path, files=files)
        assert same(io.load(path, names=tensors, files=files), tensors)


def test_the_file_has_the_layout_of_safetensors(tmp_path: Path) -> None:
    """By the format's own rules: see its page; and by the package, where it is installed."""
    tensors, path = sample(), tmp_path / "a.safetensors"
    io.save(tensors, path, metadata={"by": "test"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    assert data[8:9] == b"{"
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"by": "test"}
    reached = 0
    for name, each in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        begin, end = each["data_offsets"]
        assert begin == reached  # no gap
        assert begin % tensors[name].itemsize == 0
        assert each["shape"] == list(tensors[name].shape)
        reached = end
        stored = torch.frombuffer(bytearray(data[8 + length + begin : 8 + length + end] or b"-"),
                                  dtype=torch.uint8)  # fmt: skip
        if begin != end:
            assert torch.equal(stored, tensors[name].contiguous().view(-1).view(torch.uint8))
    assert len(data) == 8 + length + reached


def test_the_package_safetensors_reads_and_writes_the_same(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    tensors = {name: each for name, each in sample().items() if name != "turned"}
    io.save(tensors, tmp_path / "ours")
    theirs = package.load_file(tmp_path / "ours")
    assert same({name: theirs[name] for name in tensors}, tensors)
    package.save_file(tensors, tmp_path / "theirs", metadata={"a": "b"})
    assert same(io.load(tmp_path / "theirs", names=tensors), tensors)
    assert io.read_header(tmp_path / "theirs").metadata == {"a": "b"}


def test_tensors_at_odd_places_of_a_file_are_loaded(tmp_path: Path) -> None:
    header = json.dumps({
        "byte": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "wide": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }).encode()  # fmt: skip
    values = torch.tensor([1.5, -2.0])
    body = b"\1\2\3" + bytes(values.view(torch.uint8).tolist())
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + body)
    found = io.load(tmp_path / "odd")
    assert torch.equal(found["wide"], values)
    assert found["byte"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("spaces", range(4))
def test_the_length_of_the_header_does_not_matter(tmp_path: Path, spaces: int) -> None:
    """With one of them `wide` is aligned in memory, but not within what is read together."""
    header = json.dumps({
        "byte": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "wide": {"dtype": "F32", "shape": [1], "data_offsets": [3, 7]},
        "none": {"dtype": "F64", "shape": [0], "data_offsets": [7, 7]},
    }).encode() + b" " * spaces  # fmt: skip
    body = b"\1\2\3" + bytes(torch.tensor([1.5]).view(torch.uint8).tolist())
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + body)
    found = io.load(tmp_path / "odd")
    assert (found["wide"].tolist(), found["none"].tolist()) == ([1.5], [])


def test_what_is_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    io.save({"x": torch.ones(100_000)}, path)
    found = io.load(path)["x"]
    path.write_bytes(bytes(path.stat().st_size))
    assert found.eq(1).all()
    found.add_(1)  # it is ours to write
    assert found.eq(2).all()


@pytest.mark.parametrize("count", [10, 1 << 20])
def test_a_forked_process_does_not_write_to_what_its_parent_loaded(
    tmp_path: Path, count: int
) -> None:
    io.save({"x": torch.ones(count)}, tmp_path / "a")
    found = io.load(tmp_path / "a")["x"]
    pid = os.fork()
    if pid == 0:
        found[0] = 0  # one element: torch's threads are not in the fork
        os._exit(0)
    os.waitpid(pid, 0)
    assert found.eq(1).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "header would have 0 bytes"),
        (b"\xff" * 8 + b"{}", "header would have 18446744073709551615 bytes"),
        (b"\2\0\0\0\0\0\0\0[]", "cannot be read"),
        (b"\2\0\0\0\0\0\0\0{}more", "its tensors end at byte 10, and it has 14"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(UsageError, match=words):
        io.load(tmp_path / "a")


_NUMBERS = st.integers() | st.integers(min_value=1 << 63) | st.floats() | st.booleans()
_JSON = st.recursive(
    st.none() | _NUMBERS | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _is_right(part: str, value: Any) -> bool:
    """Whether a header of 8 bytes of float32 may have this here."""
    if part == "shape":
        numbers = isinstance(value, list) and all(type(each) is int for each in value)
        return numbers and all(each > 0 for each in value) and math.prod(value) == 2
    if part == "metadata":
        return value is None or (
            isinstance(value, dict)
            and all(type(each) is str and each != "\ud800" for each in value.values())
        )
    return json.dumps(value) in {"dtype": ('"F32"', '"I32"', '"U32"')}.get(part, ("[0, 8]",))


def _refuses(path: Path, header: bytes, data: bytes = bytes(8)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    for read in (io.load, io.read_header):
        with pytest.raises(UsageError, match="is not a whole file of safetensors"):
            read(path)


@given(part=st.sampled_from(["dtype", "shape", "data_offsets", "metadata"]), value=_JSON)
@example(part="shape", value="2")
@example(part="shape", value=[2.0])
@example(part="shape", value=[math.inf])
@example(part="shape", value=[True, 2])
@example(part="shape", value=[2, 10**30])
@example(part="data_offsets", value="08")
@example(part="data_offsets", value=[0, 8.0])
@example(part="data_offsets", value=[0, 4])
@example(part="data_offsets", value=[4, 12])
@example(part="data_offsets", value=[-8, 0])
@example(part="data_offsets", value=[0, 1 << 60])
@example(part="data_offsets", value=[8, 0])
@example(part="dtype", value=["F32"])
@example(part="metadata", value={"step": 3})
@example(part="metadata", value={"step": "\ud800"})
@example(part="metadata", value=[])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_a_wrong_part_is_refused(tmp_path: Path, part: str, value: Any) -> None:
    assume(not _is_right(part, value))
    if part == "metadata":
        header = {"x": _TENSOR, "__metadata__": value}
    else:
        header = {"x": {**_TENSOR, part: value}}
    _refuses(tmp_path / "a", json.dumps(header).encode())


@given(entry=_JSON)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_of_anything_else_is_refused(tmp_path: Path, entry: Any) -> None:
    _refuses(tmp_path / "a", json.dumps(entry).encode())
    _refuses(tmp_path / "a", json.dumps({"x": entry}).encode())


@given(text=st.binary(), at=st.integers(0, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_in_a_header_never_raise_another_error(tmp_path: Path, text: bytes, at: int) -> None:
    header = json.dumps({"x": _TENSOR}).encode()
    header = header[:at] + text + header[at + len(text) :]
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with contextlib.suppress(UsageError):
        assert [each.nbytes for each in io.load(tmp_path / "a").values()] == [8]


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"x":' * 200_000,
        b'{"x":1' + b"0" * 5000 + b"}",
        json.dumps({"x": _TENSOR}).encode("utf-16"),
        json.dumps({"\ud800": _TENSOR}).encode(),
        b'{"x":{"dtype":"I32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    ],
    ids=["lists", "objects", "digits", "utf-16", "surrogate", "twice"],
)
def test_a_header_that_other_readers_refuse_is_refused(tmp_path: Path, header: bytes) -> None:
    _refuses(tmp_path / "a", header)


@pytest.mark.parametrize("shape", [[0, 10**30], [0, 1 << 62, 1 << 62], [1 << 62, 1 << 62, 0]])
def test_an_empty_tensor_whose_sizes_torch_cannot_count_is_refused(
    tmp_path: Path, shape: list[int]
) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    _refuses(tmp_path / "a", json.dumps({"x": entry}).encode(), b"")


_NO_METADATA: list[Any] = [
    {"step": 3}, {"step": None}, {3: "step"}, {"a": {"b": "c"}}, {"a": ...}, {"a": "\ud800"},
    {"\ud800": "a"}, "text", [("a", "b")], 3,
]  # fmt: skip


@pytest.mark.parametrize("metadata", _NO_METADATA, ids=repr)
def test_metadata_that_is_not_text_is_refused_when_it_is_given(
    tmp_path: Path, metadata: Any
) -> None:
    for save in (io.save, io.save_in_background):
        with pytest.raises(ArgumentTypeError, match=r"metadata= has .*\n.*dict of text"):
            save({"x": torch.ones(1)}, tmp_path / "a", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_conjugate_and_a_negative_view_are_saved_as_the_numbers_that_they_are(
    tmp_path: Path,
) -> None:
    x = torch.complex(torch.randn(3), torch.randn(3))
    views = {"conjugate": x.conj(), "negative": x.conj().imag}
    assert views["conjugate"].is_conj()
    assert views["negative"].is_neg()
    io.save(views, tmp_path / "a")
    found = io.load(tmp_path / "a")
    assert all(torch.equal(found[name], each) for name, each in views.items())


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"x has dtype torch\.complex128"):
        io.save({"x": torch.empty(1, dtype=torch.complex128)}, tmp_path / "a")
    with pytest.raises(ArgumentTypeError, match="expected names and tensors"):
        io.save({"x": 3}, tmp_path / "a")  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError, match="expected names and tensors"):
        io.save({"\ud800": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(ArgumentTypeError, match="tensors= is a list, expected a dict"):
        io.save([torch.ones(1)], tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"x is torch\.sparse_coo, which the format lacks"):
        io.save({"x": torch.eye(3).to_sparse()}, tmp_path / "a")
    with pytest.raises(ArgumentError, match="__metadata__"):
        io.save({"__metadata__": torch.empty(1)}, tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        io.save({"x": torch.empty(1)}, tmp_path / "no" / "a")
    assert list(tmp_path.iterdir()) == []
    io.save({}, tmp_path / "a")
    assert io.load(tmp_path / "a") == {}
    with pytest.raises(UsageError, match="has no tensor 'x'"):
        io.load(tmp_path / "a", names=["x"])
    with pytest.raises(UsageError, match=r"has no tensor \['x'\]"):
        io.load(tmp_path / "a", names=[["x"]])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match=r"names= is the text 'x'\nhint: names=\['x'\]"):
        io.load(tmp_path / "a", names="x")


def test_links_and_permissions_of_the_old_file_stay(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    io.save({"x": torch.ones(3)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    assert io.load(tmp_path / "real")["x"].tolist() == [1, 1, 1]


class Watched(io.AsyncIO):
    """Does something else first, and keeps the requests."""

    def __init__(self, first: Any, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.first, self.requests = first, []

    def read_all(self, *arguments: Any, **keywords: Any) -> io.FileRequest:
        self.first()
        self.requests.append(super().read_all(*arguments, **keywords))
        return self.requests[-1]

    def write_all(self, *arguments: Any, **keywords: Any) -> io.FileRequest:
        self.first()
        self.requests.append(super().write_all(*arguments, **keywords))
        return self.requests[-1]


def test_a_file_that_is_replaced_meanwhile_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    io.save({"x": torch.ones(10_000)}, path)
    with Watched(lambda: io.save({"x": torch.zeros(10_000)}, path)) as files:
        assert io.load(path, files=files)["x"].eq(1).all()
    assert io.load(path)["x"].eq(0).all()


def test_a_file_that_becomes_shorter_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    io.save({"x": torch.ones(10_000)}, path)
    with (
        Watched(lambda: os.truncate(path, 20_000)) as files,
        pytest.raises(UsageError, match="became shorter"),
    ):
        io.load(path, files=files)


def test_the_hidden_file_has_the_old_ones_permissions(tmp_path: Path) -> None:
    path, seen = tmp_path / "a", []
    path.write_text("old")
    path.chmod(0o400)

    def look() -> None:
        seen.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob(".a.*"))

    with Watched(look) as files:
        io.save({"x": torch.ones(3)}, path, files=files)
    assert (seen, stat.S_IMODE(path.stat().st_mode)) == ([0o600], 0o400)


@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
def test_an_interrupt_cancels_the_transfer(
    tmp_path: Path, save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = tmp_path / "a", {"x": torch.ones(4 << 20)}
    io.save(tensors, path)
    poll = handle.FileRequest._poll

    def interrupted(request: handle.FileRequest, milliseconds: int) -> bool:
        monkeypatch.setattr(handle.FileRequest, "_poll", poll)
        raise KeyboardInterrupt

    with Watched(lambda: None, block_size=4096, depth=1) as files:
        monkeypatch.setattr(handle.FileRequest, "_poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            io.save(tensors, path, files=files) if save else io.load(path, files=files)
        (request,) = files.requests
        assert isinstance(request.error(), CancelledError)
        assert sum(request.sizes) < 16 << 20
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path, before = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            io.save({"x": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_background_save_warns_if_nobody_waits(tmp_path: Path) -> None:
    tensors, path = {"x": torch.ones(3)}, tmp_path / "no" / "a"
    with pytest.warns(RuntimeWarning, match="a was not saved, .*: FileNotFoundError: "):
        io.save_in_background(tensors, path)._thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saving = io.save_in_background(tensors, path)
        with pytest.raises(FileNotFoundError):
            saving.wait()
        del saving


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_a_program_can_end_with_a_background_save(tmp_path: Path, mode: str) -> None:
    code = """
        import sys, torch
        from opkiln import io
        kept = io.save_in_background({"x": torch.ones(1 << 20)}, sys.argv[1] + "/no/a")
        io.save_in_background({"x": torch.ones(1 << 20)}, sys.argv[1] + "/a")
    """
    running = child.start(code, str(tmp_path), bare=False, env={"OPKILN_MODE": mode})
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "/no/a was not saved, and nobody waited for it" in err
    assert io.load(tmp_path / "a")["x"].eq(1).all()


def test_a_background_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    x = torch.ones(1 << 20)
    saving = io.save_in_background({"x": x}, tmp_path / "a")
    x.zero_()
    saving.wait()
    assert saving.done()
    assert io.load(tmp_path / "a")["x"].eq(1).all()
    with pytest.raises(FileNotFoundError):
        io.save_in_background({"x": x}, tmp_path / "no" / "a").wait()


def test_a_killed_save_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "a"
    code = """
        import sys, torch
        from opkiln import io
        tensors = {str(i): torch.empty(300_001) for i in range(8)}
        for step in range(10_000):
            for each in tensors.values():
                each.fill_(step)
            io.save(tensors, sys.argv[1], metadata={"step": str(step)})
            print(step, flush=True)
    """
    for _ in range(20 if whole(request.config) else 3):
        running = child.start(code, str(path), bare=False)
        assert running.stdout is not None
        assert running.stdout.readline() == "0\n", running.communicate()
        time.sleep(random.uniform(0, 0.3))
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
        found = io.load(path)
        step = int(io.read_header(path).metadata["step"])
        assert len(found) == 8
        assert all(each.eq(step).all() for each in found.values())
