"""NVRTC through ctypes: what it can do, and one compile."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


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
        """What it compiles for: 75, 80, …"""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def accepts(self, *options: str) -> bool:
        """Whether it compiles an empty program with these options."""
        with _Program(self, "", "probe") as program:
            return program.compiled(options)

    def compile(
        self, text: str, name: str, options: Sequence[str], expressions: Sequence[str], ptx: bool
    ) -> tuple[bytes, list[str], str]:
        """(the image, the lowered name of each expression, the log). Raises CompileFailed."""
        with _Program(self, text, name) as program:
            for each in expressions:
                self._call("nvrtcAddNameExpression", program.handle, each.encode())
            if not program.compiled(options):
                raise CompileFailed(program.log())
            image = program.bytes("nvrtcGetPTX" if ptx else "nvrtcGetCUBIN")
            return image, [program.lowered(each) for each in expressions], program.log()

    def _call(self, function: str, *arguments: object) -> None:
        status = self._library[function](*arguments)
        if status != 0:
            said = self._library["nvrtcGetErrorString"](status).decode()
            raise CompileFailed(f"{function}: {said}")


class _Program:
    def __init__(self, nvrtc: Nvrtc, text: str, name: str) -> None:
        self._nvrtc = nvrtc
        self.handle = ctypes.c_void_p()
        encoded = text.encode("utf-8", "surrogateescape")
        nvrtc._call("nvrtcCreateProgram", ctypes.byref(self.handle), encoded, name.encode(),
                    0, None, None)  # fmt: skip

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._nvrtc._call("nvrtcDestroyProgram", ctypes.byref(self.handle))

    def compiled(self, options: Sequence[str]) -> bool:
        given = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
        function = self._nvrtc._library["nvrtcCompileProgram"]
        return bool(function(self.handle, len(options), given) == 0)

    def bytes(self, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._nvrtc._call(getter + "Size", self.handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._nvrtc._call(getter, self.handle, buffer)
        return buffer.raw

    def log(self) -> str:
        return self.bytes("nvrtcGetProgramLog").rstrip(b"\0").decode("utf-8", "replace").strip()

    def lowered(self, expression: str) -> str:
        name = ctypes.c_char_p()
        self._nvrtc._call("nvrtcGetLoweredName", self.handle, expression.encode(),
                          ctypes.byref(name))  # fmt: skip
        assert name.value is not None
        return name.value.decode()
