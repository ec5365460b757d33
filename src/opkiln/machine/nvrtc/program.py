"""The program that compiles a CUDA source without nvcc: it starts g++ for the host code, and calls
NVRTC for the device code.

    python -I -S -B program.py probe LIBNVRTC BUILTINS
    python -I -S -B program.py cubin LIBNVRTC BUILTINS sm_90a CUBIN SOURCE OPTION ...
    python -I -S -B program.py compile LIBNVRTC BUILTINS --image sm_90a ... --device OPTION ... \
        --host CXX OPTION ... -c SOURCE -o OBJECT

``probe`` prints a JSON object: its version, what it compiles for, the flags that it accepts.
``cubin`` compiles device code alone, to one image. ``compile`` makes one object:
1. g++ preprocesses the source.
2. The bodies of device functions are cut out of that text, and g++ compiles it to assembly text.
3. NVRTC compiles the source, less the host's functions, once for each image; it is told which
   kernels the assembly text refers to.
4. The assembly text gets a record for each kernel, under the kernel's own symbol, and the images as
   a fat binary. g++ assembles it.

Every file that it writes lies beside the object. It imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from opkiln.machine.nvrtc import container, cut, names
from opkiln.machine.nvrtc.library import CompileFailed, Nvrtc

_VARIANTS = "af"  # of architectures, which NVRTC accepts and does not list
_STANDARDS = ("-std=c++17", "-std=c++20")
_RECORD = 0x316C6E6B696B706F  # "opkiknl1", at the start of each kernel's record: op/launch_driver.h


class Failed(Exception):
    """The compile ends here; the message, which may be empty, is for the author."""


def probe(library: str, builtins: str) -> None:
    nvrtc = Nvrtc(library, builtins)
    archs = nvrtc.archs()
    variants = [f"{arch}{suffix}" for arch in archs if arch >= 90 for suffix in _VARIANTS]
    accepts = [name for name in variants if nvrtc.accepts(f"-arch=compute_{name}")]
    accepts += [flag for flag in _STANDARDS if nvrtc.accepts(flag)]
    version = "{}.{}".format(*nvrtc.version())
    sys.stdout.write(json.dumps({"version": version, "archs": archs, "accepts": accepts}))


def compile_cubin(words: list[str]) -> None:
    library, builtins, image, output, source, *options = words
    given = [*options, f"-arch={image}"]
    code, _, log = Nvrtc(library, builtins).compile(_read(source), source, given, (), ptx=False)
    with open(output, "wb") as file:
        file.write(code)
    sys.stderr.write(f"{log}\n" if log else "")


class _Arguments:
    """The command line of ``compile``."""

    def __init__(self, words: list[str]) -> None:
        device, host = words.index("--device"), words.index("--host")
        self.library, self.builtins = words[:2]
        self.images = [word for word in words[2:device] if word != "--image"]
        self.device = words[device + 1 : host]
        self.cxx, *rest = words[host + 1 :]
        *self.host, _, self.source, _, self.object = rest  # -c SOURCE -o OBJECT

    @property
    def unnamed(self) -> str:
        """The name of unnamed namespaces in the host's code, which no other source has."""
        name = os.path.basename(self.sibling(""))
        return "opkiln_unnamed_" + "".join(char if char.isalnum() else "_" for char in name)

    def sibling(self, suffix: str) -> str:
        return self.object.removesuffix(".o") + suffix


def compile_source(words: list[str]) -> None:
    given = _Arguments(words)
    whole = given.sibling(".ii")
    _await(_start(given.cxx, *given.host, "-x", "c++", "-E", given.source, "-o", whole))
    host = cut.HostPart(_read(whole), given.unnamed)
    assembly = given.sibling(".s")
    preprocessed = given.sibling(".host.ii")
    _write(preprocessed, host.text)
    options = _drop_preprocessing(given.host)
    compiling = _start(
        given.cxx, *options, "-x", "c++-cpp-output", "-S", preprocessed, "-o", assembly
    )
    nvrtc = Nvrtc(given.library, given.builtins)
    device = cut.device_text(_read(given.source), host.on_device)
    _await(compiling)
    text = _read(assembly)
    kernels = _kernels(text, host.kernels, given.unnamed)
    made, lowered = _images(given, nvrtc, device, list(kernels.values()))
    binary = given.sibling(".fatbin")
    with open(binary, "wb") as file:
        file.write(container.pack(made))
    # Only the host's symbols are renamed: in the images the kernels keep their names.
    internal = [each for each, name in kernels.items() if names.is_one_of(name, host.internal)]
    suffix = f".{given.unnamed}"
    symbols = [each + suffix if each in internal else each for each in kernels]
    records = dict(zip(symbols, lowered, strict=True))
    text = names.rename_symbols(text, internal, suffix) + _records(
        records, os.path.basename(binary)
    )
    _write(assembly, text)
    # The assembler finds the images by a name without a directory, so that none is in the object.
    os.chdir(os.path.dirname(os.path.abspath(binary)))
    _await(_start(given.cxx, "-c", assembly, "-o", given.object))


_OF_PREPROCESSOR = ("-I", "-D", "-U", "-isystem", "-iquote", "-idirafter", "-include")


def _drop_preprocessing(options: list[str]) -> list[str]:
    """The options for a text that is preprocessed: clang warns of those that have no effect."""
    kept: list[str] = []
    words = iter(options)
    for word in words:
        if word in _OF_PREPROCESSOR:
            next(words, "")
        elif not word.startswith(_OF_PREPROCESSOR):
            kept.append(word)
    return kept


def _kernels(assembly: str, kernels: frozenset[str], unnamed: str) -> dict[str, str]:
    """The kernels that the host's code refers to: symbol -> name expression."""
    symbols = names.find_references(assembly, kernels)
    if not symbols:
        return {}
    demangle = names.demangler()
    found = {each: names.expression(each, kernels, unnamed, demangle) for each in symbols}
    return {symbol: expression for symbol, expression in found.items() if expression}


def _images(
    given: _Arguments, nvrtc: Nvrtc, text: str, expressions: list[str]
) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Each image by name, and the kernels' lowered names."""
    # NVRTC makes the names of internal symbols from the program's name and its first function; if
    # all are internal, from its process id. So names are the same everywhere. Messages name the
    # author's file.
    quoted = given.source.replace("\\", "\\\\").replace('"', '\\"')
    program = f'extern "C" __device__ void opkiln_first() {{}}\n#line 1 "{quoted}"\n{text}'
    made: list[tuple[str, bytes]] = []
    lowered: list[str] = []
    said: dict[str, None] = {}
    for image in given.images:
        options = [*given.device, f"-arch={image}"]
        name = os.path.basename(given.object)
        code, lowered, log = nvrtc.compile(
            program, name, options, expressions, ptx=image.startswith("compute_")
        )
        made.append((image, code))
        said.update(dict.fromkeys(filter(None, [log])))
    for log in said:
        sys.stderr.write(f"{log}\n")
    return made, lowered


def _records(kernels: dict[str, str], binary: str) -> str:
    """The assembly text that defines the kernels' symbols and contains the fat binary. The symbols
    are weak: a template's kernel may be in several objects, each with its own images. They are not
    local ones: of those, gas 2.40 for aarch64 makes the same entry of the GOT."""
    lines = [
        '\t.section .nv_fatbin,"a",@progbits', "\t.balign 8", ".Lopkiln_binary:",
        f'\t.incbin "{binary}"',
        "\t.data", "\t.balign 16", ".Lopkiln_module:", "\t.quad .Lopkiln_binary", "\t.quad 0",
    ]  # fmt: skip
    for number, symbol in enumerate(kernels):
        lines += [
            "\t.balign 16", f"\t.weak {symbol}", f"\t.hidden {symbol}",
            f"\t.type {symbol}, @object", f"{symbol}:",
            f"\t.quad {_RECORD:#x}", f"\t.quad .Lopkiln_name{number}", "\t.quad .Lopkiln_module",
            "\t.quad 0", f"\t.size {symbol}, 32",
        ]  # fmt: skip
    lines += ["\t.section .rodata"]
    for number, lowered in enumerate(kernels.values()):
        lines += [f".Lopkiln_name{number}:", f'\t.string "{lowered}"']
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",@progbits', ""])


def _read(path: str) -> str:
    # The bytes of a source may be in any encoding. They pass through unchanged.
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)


def _start(*argv: str) -> int:
    """Start a program that has this one's environment, session and output: its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            os.execv(argv[0], argv)  # noqa: S606 (a compiler, as nvcc starts it)
        except OSError as error:
            os.write(2, f"{argv[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127)
    return child


def _await(child: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)  # as the compiler died: out of memory, an interrupt
    if status != 0:
        raise Failed("")  # it has said why


def main(words: list[str]) -> int:
    """The exit status."""
    try:
        if words[0] == "probe":
            probe(*words[1:])
        elif words[0] == "cubin":
            compile_cubin(words[1:])
        else:
            compile_source(words[1:])
    except (Failed, CompileFailed, cut.CannotCut, names.UnnamedKernel) as error:
        if str(error):
            sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{place}{error.strerror or error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
