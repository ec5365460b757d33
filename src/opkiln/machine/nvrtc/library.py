"""NVRTC through ctypes: what it can do, and one compile."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class CompileFailed(Exception):
    """NVRTC refused a program; the message is its log."""


class Nvrtc:
    """An open libnvrtc. Raises OSError if it cannot be opened."""

    def __init__(self, library: str, builtins: str) -> None:
        # libnvrtc opens its other half by name, which no linker finds where pip has put it.
        self._builtins = ctypes.CDLL(builtins, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        self._library = ctypes.CDLL(library)
        self._library["nvrtcGetErrorString"].restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def archs(self) -> list[int]:
        """The architectures that it compiles for: 75, 80, …"""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def accepts(self, *options: str) -> bool:
        """Whether it compiles an empty program with these options."""
        with self._program("", "probe") as program:
            return self._compiles(program, options)

    def compile(
        self, text: str, name: str, options: Sequence[str], expressions: Sequence[str], ptx: bool
    ) -> tuple[bytes, list[str], str]:
        """(the image, the lowered name of each expression, the log). Raises CompileFailed."""
        with self._program(text, name) as program:
            for each in expressions:
                self._call("nvrtcAddNameExpression", program, each.encode())
            compiled = self._compiles(program, options)
            log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0")
            said = log.decode("utf-8", "replace").strip()
            if not compiled:
                raise CompileFailed(said)
            image = self._bytes("nvrtcGetPTX" if ptx else "nvrtcGetCUBIN", program)
            return image, [self._lowered_name(program, each) for each in expressions], said

    @contextmanager
    def _program(self, text: str, name: str) -> Iterator[ctypes.c_void_p]:
        program = ctypes.c_void_p()
        encoded = text.encode("utf-8", "surrogateescape")
        creating = (ctypes.byref(program), encoded, name.encode(), 0, None, None)
        self._call("nvrtcCreateProgram", *creating)
        try:
            yield program
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _call(self, function: str, *arguments: object) -> None:
        status = self._library[function](*arguments)
        if status != 0:
            said = self._library["nvrtcGetErrorString"](status).decode()
            raise CompileFailed(f"{function}: {said}")

    def _compiles(self, program: ctypes.c_void_p, options: Sequence[str]) -> bool:
        given = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
        return bool(self._library["nvrtcCompileProgram"](program, len(options), given) == 0)

    def _bytes(self, getter: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(getter + "Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter, program, buffer)
        return buffer.raw

    def _lowered_name(self, program: ctypes.c_void_p, expression: str) -> str:
        name = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
        assert name.value is not None
        return name.value.decode()
