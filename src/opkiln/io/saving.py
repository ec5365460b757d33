"""``io.save`` and ``io.load``: a dict of tensors in a file that safetensors reads.

The file is the length of a header (8 bytes), the header in JSON, and the tensors' bytes without a
gap. The header is padded with spaces, so that the bytes begin on a page and direct I/O can write
them from where they are.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from opkiln.base.digest import open_replacement
from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.io.handle import AsyncIO, FileRequest, Transfer
from opkiln.store import publish

_PAGE = 4096
_MOST_HEADER = 100_000_000  # safetensors' own limit
_TOGETHER = 16 << 20  # bytes of adjacent tensors that are read together
_HUGE = 2 << 20  # pages of this size save most page faults
_MOST_NUMBER = (1 << 63) - 1  # torch's sizes are so large at most

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16,
    "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Saving:
    """A save that goes on in the background. If it fails and nobody waits for it, it warns."""

    def __init__(self, tensors: dict[str, Tensor], path: str, options: dict[str, Any]) -> None:
        self._errors: list[BaseException] = []  # one at most
        self._arguments = (tensors, path, options)
        # Also at the end of the program. The thread keeps this object until it has ended.
        self._warner = weakref.finalize(self, _warn_of_errors, self._errors, path)
        # The thread is not a daemon: a program that ends waits for its checkpoint.
        self._thread = threading.Thread(target=self._run, name="opkiln-save")
        self._thread.start()

    def _run(self) -> None:
        tensors, path, options = self._arguments
        self._arguments = ({}, path, {})
        try:
            save(tensors, path, **options)
        except BaseException as error:
            self._errors.append(error)
            del self  # the error keeps this frame, and would so keep the object that keeps it

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the file is there. Raises what ``save`` raises."""
        self._thread.join()
        self._warner.detach()
        if self._errors:
            raise self._errors[0]


def _warn_of_errors(errors: list[BaseException], path: str) -> None:
    for error in errors:
        warnings.warn(
            f"{path} was not saved, and nobody waited for it: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def save(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    files: AsyncIO | None = None,
    sync: bool = True,
) -> None:
    """Write tensors to a file in safetensors' layout.

    The file gets its name when all of it is on the disk. If the process or the machine ends before,
    the old file is still there. ``sync=False`` does not wait for the disk, and is only safe if the
    process ends, not the machine. Tensors may be on GPUs, and then must not change before this
    returns. Each of several tensors that share memory is written. ``metadata`` is text by names,
    which ``read_header`` reads. ``files`` is an ``AsyncIO`` to use. Raises OSError, ArgumentError.
    """
    path = os.path.realpath(path)  # a link stays a link
    # The largest elements first: then each tensor begins at a multiple of its elements' size.
    ordered = sorted(_check_tensors(tensors, metadata).items(), key=lambda each: -each[1].itemsize)
    head, offsets = _header(ordered, metadata)
    # From its first byte on, the new file is readable only by those who may read the old one.
    mode = _mode_of(path)
    with open_replacement(path, 0o666 if mode is None else mode | 0o600, sync=sync) as file:
        fd = file.fileno()
        parts = [Transfer(head, fd, 0)]
        parts += [
            Transfer(tensor.detach().resolve_conj().resolve_neg(), fd, offset)
            for (_, tensor), offset in zip(ordered, offsets, strict=True)
        ]
        _run(files, lambda opened: opened.write_all(parts), path)
        if (mode := _mode_of(path)) is not None:
            os.fchmod(fd, mode)
    if sync:
        publish.sync(os.path.dirname(path))


def save_in_background(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    sync: bool = True,
) -> Saving:
    """``save`` of the tensors as they are now, while the program goes on.

    They are copied first, so they may change at once. The copy is freed with the last write.
    Raises ArgumentError.
    """
    copies = {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in _check_tensors(tensors, metadata).items()
    }
    options = {"metadata": dict(metadata or {}), "sync": sync}
    return Saving(copies, os.fspath(path), options)


def load(
    path: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
    files: AsyncIO | None = None,
) -> dict[str, Tensor]:
    """The tensors of a file in safetensors' layout, or only those with these names.

    Nothing is mapped: what is returned does not change with the file. A file that ``save`` replaces
    meanwhile is loaded as it was. Small tensors that lie together in the file share memory. Those
    for a GPU are read to its memory, without a copy of all in the host's. Raises OSError;
    UsageError for a file that is damaged or of another format, and for a name that it does not
    have.
    """
    with open(path, "rb") as file:
        return _load(file, os.fspath(path), names, torch.device(device), files)


def _load(
    file: BinaryIO,
    path: str,
    names: Iterable[str] | None,
    device: torch.device,
    files: AsyncIO | None,
) -> dict[str, Tensor]:
    header = _header_of(file, path)
    if isinstance(names, str):
        raise ArgumentTypeError(f"names= is the text {names!r}", hint=f"names=[{names!r}]")
    wanted = list(header.entries) if names is None else list(names)
    for name in wanted:
        if not isinstance(name, str) or name not in header.entries:
            raise UsageError(f"{path} has no tensor {name!r}")
    groups: list[list[str]] = []
    reached = size = -1
    for name in sorted(wanted, key=lambda each: header.entries[each].begin):
        entry = header.entries[name]
        size += entry.end - entry.begin
        if entry.begin != reached or size > _TOGETHER:
            groups.append([])
            size = entry.end - entry.begin
        groups[-1].append(name)
        reached = entry.end
    found: dict[str, Tensor] = {}
    parts: list[Transfer] = []
    there = torch.device("cpu") if device.type == "meta" else device
    for group in groups:
        begin, end = header.entries[group[0]].begin, header.entries[group[-1]].end
        memory = _memory(end - begin, begin, there)
        parts.append(Transfer(memory, file.fileno(), begin))
        for name in group:
            entry = header.entries[name]
            part = memory[entry.begin - begin : entry.end - begin]
            # Another tool's file may have it anywhere.
            if any(at % entry.dtype.itemsize for at in (part.data_ptr(), part.storage_offset())):
                part = part.clone()
                parts.append(Transfer(part, file.fileno(), entry.begin))
            found[name] = part.view(entry.dtype).view(entry.shape)
    # Getting the pages of fresh memory takes as long as the transfer. Threads do both side by side.
    _run(files, lambda opened: opened.read_all(parts), path, "threads")
    return {name: found[name].to(device) for name in wanted}


class Entry(NamedTuple):
    """A tensor of a file, and where its bytes are."""

    dtype: torch.dtype  # the tensor's
    shape: tuple[int, ...]  # the tensor's
    begin: int  # of its bytes in the file
    end: int  # of its bytes in the file


class Header(NamedTuple):
    """The header of a file."""

    entries: dict[str, Entry]  # by name
    metadata: dict[str, str]  # what was given to `save`


def read_header(path: str | os.PathLike[str]) -> Header:
    """Names, dtypes and shapes of a file's tensors, and its metadata. Raises OSError, UsageError"""
    with open(path, "rb") as file:
        return _header_of(file, os.fspath(path))


def _header_of(file: BinaryIO, path: str) -> Header:
    length = int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        raise _damage_error(path, f"its header would have {length} bytes, and the file has {size}")
    try:
        # As text: of bytes, json would also read UTF-16.
        described = json.loads(file.read(length).decode(), object_pairs_hook=_require_unique_names)
        if not isinstance(described, dict):
            raise ValueError("it is not a JSON object")
        metadata = described.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # the package reads null so
        if (wrong := _not_text(metadata)) is not None:
            raise ValueError(f"its metadata is not text: {wrong}")
        entries = {name: _entry(name, each, 8 + length) for name, each in described.items()}
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, f"its header cannot be read: {error}") from error
    reached = 8 + length
    for name, entry in sorted(entries.items(), key=lambda each: each[1][2:]):
        end = reached + prod(entry.shape) * entry.dtype.itemsize
        if (entry.begin, entry.end) != (reached, end):
            raise _damage_error(path, f"tensor {name!r} has bytes {entry.begin} to {entry.end}")
        reached = entry.end
    if reached != size:
        raise _damage_error(path, f"its tensors end at byte {reached}, and it has {size}")
    return Header(entries, metadata)


def _require_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name is there twice")
    for name in named:
        name.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return named


def _entry(name: str, described: object, start: int) -> Entry:
    """The entry of a tensor's description. Raises ValueError for anything else."""
    match described:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
            type(each) is int and 0 <= each <= _MOST_NUMBER for each in (*shape, begin, end)
        ):
            pass
        case _:
            raise ValueError(f"tensor {name!r} is {repr(described)[:200]}")
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype[:100]!r}")
    most = _MOST_NUMBER // DTYPES[dtype].itemsize
    for each in shape:  # a size of 0 hides that torch cannot count with the others
        most //= max(each, 1)
    if most == 0:
        raise ValueError(f"tensor {name!r} has the shape {repr(shape)[:200]}")
    return Entry(DTYPES[dtype], tuple(shape), start + begin, start + end)


def _damage_error(path: str, why: str) -> UsageError:
    return UsageError(f"{path} is not a whole file of safetensors", why=why)


def _check_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Tensor]:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"tensors= is a {type(tensors).__name__}, expected a dict")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not _is_text(name):
            raise ArgumentTypeError(
                f"{name!r}: {type(tensor).__name__}, expected names and tensors"
            )
        if name == "__metadata__":
            raise ArgumentError("a tensor cannot be called __metadata__")
        if tensor.dtype not in _NAMES:
            raise ArgumentTypeError(f"{name} has dtype {tensor.dtype}, which the format lacks")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ArgumentTypeError(
                f"{name} is {'nested' if tensor.is_nested else tensor.layout}, which the format "
                "lacks",
                hint="save the tensors that it is made of",
            )
    if metadata is not None and (wrong := _not_text(metadata)) is not None:
        raise ArgumentTypeError(
            f"metadata= has {wrong}",
            why="it is a dict of text, by names: the format has nothing else",
            hint="metadata={'step': str(3), 'config': json.dumps(config)}",
        )
    return dict(tensors)


def _not_text(metadata: object) -> str | None:
    """The part that is not a dict of text by names, for a message; None if there is none."""
    if not isinstance(metadata, Mapping):
        return f"the {type(metadata).__name__} {repr(metadata)[:100]}"
    for name, text in metadata.items():
        if not _is_text(name) or not _is_text(text):
            return f"{repr(name)[:100]}: {repr(text)[:100]}"
    return None


def _is_text(value: object) -> bool:
    """Whether it is a str that UTF-8 can encode: one without a lone surrogate."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _header(
    ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None
) -> tuple[Tensor, list[int]]:
    """The beginning of the file, padded to whole pages, and the offset of each tensor."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, at = [], 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.itemsize
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        begins.append(at)
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    whole = -(-(8 + len(text)) // _PAGE) * _PAGE
    text = text.ljust(whole - 8)
    if len(text) > _MOST_HEADER:
        raise ArgumentError(f"the header has {len(text)} bytes, the format allows {_MOST_HEADER}")
    head = bytearray(len(text).to_bytes(8, "little") + text)
    return torch.frombuffer(head, dtype=torch.uint8), [whole + each for each in begins]


def _memory(size: int, offset: int, device: torch.device) -> Tensor:
    """Bytes whose address is that of ``offset`` in a page: direct I/O reads them in place."""
    lead = offset % _PAGE
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        room = torch.empty(size + _PAGE, dtype=torch.uint8, device=device)
        start = (lead - room.data_ptr()) % _PAGE
        return room[start : start + size]
    length = -(-(lead + size) // _HUGE) * _HUGE if size >= _HUGE else lead + size
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE)  # Python's default is shared with forks
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=lead)


def _mode_of(path: str) -> int | None:
    """The permissions of a file, or None if there is none."""
    try:
        return os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        return None


def _run(
    files: AsyncIO | None, begin: Callable[[AsyncIO], FileRequest], path: str, engine: str = "auto"
) -> None:
    """Begin a request and wait for it. If the wait is interrupted, it is cancelled."""
    if files is None:
        with AsyncIO(engine) as opened:
            _run(opened, begin, path)
        return
    request = begin(files)
    try:
        request.wait()
    except EOFError as error:
        raise _damage_error(path, "it became shorter while it was read") from error
    except OSError as error:
        error.filename = path  # in place of a descriptor's number
        raise
    except BaseException:
        request.cancel()
        with suppress(CancelledError, OSError, EOFError):  # the interrupt is what is raised
            request.wait()
        raise
