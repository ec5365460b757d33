"""CUDA architectures: the grammar of arch lists, filters, coverage and flags. Pure functions.

One grammar covers everything that a user may write: ``8.0;9.0a 10.0f+PTX``, separated by ``;``,
``,`` or white space; ``sm_90a``; names (``Hopper``), ``native``, ``all`` and ``all-major``. A list
becomes a sorted tuple without duplicates, in numeric order: 10.0 comes after 9.0.

This file has no table of existing architectures. A toolkit lists those it compiles for, and
``usable`` compares. The file only knows facts that do not age: no ``a`` variant is older than 9.0,
no ``f`` variant is older than 10.0, and a minor version is one digit, as nvcc's numbers
(``sm_103``) require.

Only this file makes ``-gencode`` flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opkiln.base.lazy import Record
from opkiln.errors import ArchError
from opkiln.machine.arch import lists


class CudaArch(Record):
    """An architecture. ``suffix`` is ``""``, ``"a"`` (this chip only) or ``"f"`` (its family). It
    means a binary image; with ``ptx`` ("+PTX"), the image and its PTX. The tuples sort in numeric
    order."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @property
    def number(self) -> str:
        """The number as nvcc writes it: ``90a``, ``103``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def capability(self) -> CudaArch:
        """The compute capability, without suffix and PTX."""
        return CudaArch(self.major, self.minor)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"


# The names of TORCH_CUDA_ARCH_LIST.
_NAMES = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+PTX",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0;5.2+PTX",
    "pascal": "6.0;6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}

# Integrated GPUs. NVIDIA promises that a binary runs on a later minor version, except for these.
# 10.1 (11.0 since CUDA 13) is not in the family of 10.0.
_TEGRA = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)})

_OLDEST = {"": (1, 0), "a": (9, 0), "f": (10, 0)}

_GRAMMAR = (
    "write MAJOR.MINOR, with one digit for MINOR, and optionally a or f and +PTX (8.0, 9.0a, "
    "10.0f+PTX);\nor a name (Volta, Turing, Ampere, Ada, Hopper, Blackwell), native, all or "
    "all-major"
)
_EXAMPLE = 'OPKILN_CUDA_ARCH_LIST="8.0;9.0a;10.0f+PTX"'


def parse(
    text: str, *, native: Sequence[CudaArch] | None = None, listed: Sequence[CudaArch] | None = None
) -> tuple[CudaArch, ...]:
    """The architectures that a list names, sorted and without duplicates. Raises ArchError.

    ``native`` is what this machine's GPUs need, ``listed`` is what the toolkit compiles for.
    Without them, the words ``native``, ``all`` and ``all-major`` are errors. ``+PTX`` after a name
    or one of these words adds the PTX of its newest architecture. The error quotes the first word
    that is not valid.

    ``compute_80`` and ``80`` are refused. The first means PTX without a binary, which this grammar
    cannot express. The second is ambiguous.
    """
    words = lists.require_words(text, "CUDA", _GRAMMAR, _EXAMPLE)
    return merge(arch for word in words for arch in _parse_word(word, native, listed))


show = lists.show


def merge(archs: Iterable[CudaArch]) -> tuple[CudaArch, ...]:
    """Sorted, without duplicates: ``8.0`` and ``8.0+PTX`` become ``8.0+PTX``."""
    found: dict[tuple[int, int, str], bool] = {}
    for arch in archs:
        key = (arch.major, arch.minor, arch.suffix)
        found[key] = found.get(key, False) or arch.ptx
    return tuple(CudaArch(*key, found[key]) for key in sorted(found))


def _parse_word(
    word: str, native: Sequence[CudaArch] | None, listed: Sequence[CudaArch] | None
) -> tuple[CudaArch, ...]:
    lower = word.lower()
    base = lower.removesuffix("+ptx")
    ptx = base != lower
    if base == "native":
        found = merge(lists.native(word, native, "NVIDIA", _EXAMPLE))
    elif base in {"all", "all-major"}:
        found = _list_all(word, listed, major_only=base == "all-major")
    elif base in _NAMES:
        found = parse(_NAMES[base])
    else:
        found = (_parse_single(word, base),)
    return (*found[:-1], found[-1]._replace(ptx=True)) if ptx else found


def _list_all(
    word: str, listed: Sequence[CudaArch] | None, *, major_only: bool
) -> tuple[CudaArch, ...]:
    # The same as `nvcc -arch=all` and `-arch=all-major`. The PTX is that of the newest x.0, so that
    # every later minor version can use it.
    if not listed:
        raise ArchError(
            f"{word!r} means the architectures of the CUDA toolkit, but there is no toolkit",
            why="no nvcc was found",
            hint="pip install 'opkiln[cuda]'",
        )
    known = merge(arch.capability for arch in listed)
    newest = max((arch for arch in known if arch.minor == 0), default=known[-1])
    wanted = [a for a in known if a.minor == 0 or a in {known[0], newest} or not major_only]
    return tuple(arch._replace(ptx=arch == newest) for arch in wanted)


def _parse_single(word: str, base: str) -> CudaArch:
    if base.startswith("sm_"):
        digits, suffix = _split_suffix(base[3:])
        major, minor = digits[:-1], digits[-1:]
    else:
        digits, suffix = _split_suffix(base)
        major, _, minor = digits.partition(".")
    if not (_is_number(major, 2) and _is_number(minor, 1)) or major == "0":
        why, hint = _GRAMMAR, _EXAMPLE
        if meant := _suggest(base):
            why, hint = f"did you mean {meant}?\n{_GRAMMAR}", f"OPKILN_CUDA_ARCH_LIST={meant}"
        raise ArchError(f"{lists.quote(word)} is not a CUDA architecture", why=why, hint=hint)
    found = CudaArch(int(major), int(minor), suffix)
    oldest = _OLDEST[suffix]
    if (found.major, found.minor) < oldest:
        raise ArchError(
            f"{lists.quote(word)} is not a CUDA architecture",
            why=f"the oldest variant with {suffix!r} is {oldest[0]}.{oldest[1]}{suffix}",
            hint=f"OPKILN_CUDA_ARCH_LIST={found.capability}",
        )
    return found


def _split_suffix(text: str) -> tuple[str, str]:
    return (text[:-1], text[-1]) if text.endswith(("a", "f")) else (text, "")


def _is_number(text: str, most: int) -> bool:
    """Whether it is a plain decimal number: not ``08``, and no digits of other scripts."""
    plain = text.isascii() and text.isdigit() and len(text) <= most
    return plain and (text == "0" or text[0] != "0")


def _suggest(base: str) -> str:
    """A suggestion for ``8``, ``80``, ``sm90a``, ``compute_90`` or ``90-virtual``; "" if none."""
    ptx = base.startswith("compute") or base.endswith("-virtual")
    base = base.removeprefix("sm").removeprefix("compute").removeprefix("_").removeprefix("-")
    digits, suffix = _split_suffix(base.removesuffix("-real").removesuffix("-virtual"))
    major, minor = (digits, "0") if len(digits) == 1 else (digits[:-1], digits[-1:])
    if not (_is_number(major, 2) and _is_number(minor, 1)):
        return ""
    found = CudaArch(int(major), int(minor), suffix, ptx)
    return str(found) if _OLDEST[suffix] <= (found.major, found.minor) < (20, 0) else ""


def images(archs: Iterable[CudaArch]) -> tuple[str, ...]:
    """The images of a fat binary for these architectures: ``sm_80``, ``sm_90a``, ``compute_90a``.
    Without duplicates."""
    return tuple(
        f"{kind}_{arch.number}"
        for arch in merge(archs)
        for kind in (("sm", "compute") if arch.ptx else ("sm",))
    )


def flags(archs: Iterable[CudaArch]) -> tuple[str, ...]:
    """nvcc's ``-gencode`` flags for these, without duplicates. Only this function makes them."""
    return tuple(
        f"-gencode=arch=compute_{image.partition('_')[2]},code={image}" for image in images(archs)
    )


_ARCH_FLAGS = ("-gencode", "--generate-code", "-arch", "--gpu-architecture", "-code", "--gpu-code")


def split_flags(given: Sequence[str]) -> tuple[tuple[str, ...], tuple[CudaArch, ...]]:
    """Split nvcc flags into (other flags, architectures). A binary image gives its architecture,
    and a PTX image gives its architecture with PTX. Raises ArchError for an architecture flag that
    does not name one."""
    rest: list[str] = []
    found: list[CudaArch] = []
    words = iter(given)
    for word in words:
        option, joined, value = word.partition("=")
        if option not in _ARCH_FLAGS:
            rest.append(word)
            continue
        text = value if joined else next(words, "")
        for code in text.rpartition("code=")[2].strip("[]").split(","):
            if code.partition("_")[0] not in {"sm", "compute"}:
                raise ArchError(f"{lists.quote(word)} names no CUDA architecture", hint=_EXAMPLE)
            found.append(_parse_image(code))
    return tuple(rest), merge(found)


def apply_filter(archs: Iterable[CudaArch], rule: lists.Rule) -> lists.Filtered:
    """Apply an op's ``filter_ccs`` to these. Raises SpecError.

    The rule gets plain capabilities ("8.0", "9.0"), each once. Its decision also applies to the
    ``a``, ``f`` and PTX variants. Existing rules do ``int(minor)``, which a suffix would break. The
    rule returns those to keep, in any order, as strings or as ``[major, minor]``. If it returns one
    with a suffix, only that variant is kept, or is compiled instead of the plain one; the PTX of
    the plain one is kept. Apart from that, a rule can only remove.
    """
    return lists.apply_filter(merge(archs), rule, lambda arch: str(arch.capability), _variants)


def _variants(item: str, have: Iterable[CudaArch]) -> list[CudaArch]:
    """Those of ``have`` that a filter's answer names; none if it does not name an architecture."""
    base = item.lower().removesuffix("+ptx")
    try:
        named = _parse_single(item, base)
    except ArchError:
        return []
    ptx = base != item.lower()
    same = [arch for arch in have if arch.capability == named.capability]
    found = [a for a in same if named.suffix in {"", a.suffix} and (a.ptx or not ptx)]
    plain = [arch for arch in same if not arch.suffix]
    if plain and not found and not ptx:
        return [named, *(arch for arch in plain if arch.ptx)]
    return found


def usable(
    archs: Iterable[CudaArch], listed: Iterable[CudaArch], accepts: frozenset[str]
) -> lists.Usable:
    """Which of these a toolkit compiles for, and why it does not compile for the others.

    ``listed`` is what the toolkit lists. Toolkits do not list ``a`` and ``f`` variants. So for a
    variant its capability must be listed. If ``accepts`` (the result of probes, such as "90a") is
    not empty, the variant must also be in it.
    """
    known = merge(arch.capability for arch in listed)
    return lists.usable(merge(archs), lambda arch: _refusal(arch, known, accepts))


def _refusal(arch: CudaArch, known: tuple[CudaArch, ...], accepts: frozenset[str]) -> str:
    capability = arch.capability
    if not known:
        return "the toolkit lists no architecture"
    if capability < known[0]:
        return f"the toolkit has no {capability}; its oldest is {known[0]}"
    if capability > known[-1]:
        return f"the toolkit has no {capability}; its newest is {known[-1]}"
    if capability not in known:
        return f"the toolkit has no {capability}; it has {', '.join(map(str, known))}"
    if arch.suffix and accepts and arch.number not in accepts:
        return f"the toolkit has {capability}, but not its variant {capability}{arch.suffix}"
    return ""


def choose_for_device(
    capability: CudaArch, listed: Iterable[CudaArch], driver_ptx: bool
) -> tuple[CudaArch, str]:
    """(the architecture to compile for a device, the text of a warning).

    The warning is empty if the architecture is the device's own. ``driver_ptx`` says whether the
    device's driver accepts PTX of this toolkit's version. A device that the toolkit does not know
    gets the newest older architecture whose binary it runs. If there is none, it gets the newest
    older one. The PTX is added if the driver accepts it. Raises ArchError if the device is too old
    for the toolkit, and if nothing would run.
    """
    wanted = capability.capability
    known = merge(arch.capability for arch in listed)
    if wanted in known:
        return wanted, ""
    older = [arch for arch in known if arch < wanted]
    what = f"this CUDA toolkit does not compile for a GPU of capability {wanted}"
    if not older:
        raise ArchError(
            what,
            why=f"its oldest architecture is {known[0]}" if known else "it lists no architecture",
            hint="set OPKILN_CUDA_HOME to an older toolkit",
        )
    near = [arch for arch in older if covers([arch], wanted)]
    if not near and not driver_ptx:
        raise ArchError(
            what,
            why=f"its newest older architecture is {older[-1]}, and the driver is too old for PTX "
            "of this toolkit",
            hint="set OPKILN_CUDA_HOME to a newer toolkit, and update the driver to match it",
        )
    chosen = (near or older)[-1]._replace(ptx=driver_ptx)
    how = "it runs the binary" if near else "at load, the driver compiles the PTX"
    return chosen, (
        f"a GPU has capability {wanted}, which this CUDA toolkit does not know: {how} of "
        f"{chosen.capability}"
    )


def covers(images_or_archs: Iterable[CudaArch | str], capability: CudaArch) -> str:
    """How code for these runs on a device: "exact", "binary", "ptx", or "" if it does not.

    "exact" is an image for exactly this capability. "binary" is one for a lower minor version, or
    for the device's family. "ptx" is compiled by the driver. Images have nvcc's names (``sm_90a``,
    ``compute_90``); any other name raises ArchError.
    """
    ways = {
        _runs(_parse_image(name), capability)
        for each in images_or_archs
        for name in ([each] if isinstance(each, str) else images([each]))
    }
    return next((way for way in ("exact", "binary", "ptx") if way in ways), "")


def _parse_image(name: str) -> CudaArch:
    """The architecture of an image, with PTX if it is PTX alone."""
    kind, _, number = name.partition("_")
    if kind not in {"sm", "compute"}:
        raise ArchError(f"{lists.quote(name)} is not an image of a CUDA binary")
    return _parse_single(name, f"sm_{number}")._replace(ptx=kind == "compute")


def _runs(code: CudaArch, device: CudaArch) -> str:
    made, here = (code.major, code.minor), (device.major, device.minor)
    if made == here:
        return "ptx" if code.ptx else "exact"
    if code.suffix == "a" or made > here:
        return ""
    if code.ptx and not code.suffix:
        return "ptx"
    if code.major != device.major or made in _TEGRA or here in _TEGRA:
        return ""
    return "ptx" if code.ptx else "binary"


def has_bf16(archs: Iterable[CudaArch]) -> bool:
    """Whether all of these have bfloat16 arithmetic; False for an empty list."""
    found = tuple(archs)
    return bool(found) and all(arch.major >= 8 for arch in found)
