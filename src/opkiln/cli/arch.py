"""``opkiln arch LIST``: what a build makes of a list of GPU architectures."""

from __future__ import annotations

from typing import Any

import click

from opkiln.cli import output
from opkiln.cli.options import complete_op, json_option
from opkiln.errors import ArchError, ToolchainError
from opkiln.report.layout import columns, fields


@click.command("arch", short_help="Show what a build makes of an arch list.")
@click.argument("archs", nargs=-1, metavar="[LIST]")
@click.option("--op", shell_complete=complete_op, metavar="OP", help="Apply the filter of this op.")
@json_option
def command(archs: tuple[str, ...], op: str | None, as_json: bool) -> int:
    """Show what a build makes of the GPU architectures in LIST: how they are read, what the op's
    filter removes, what the toolkit refuses, and the compiler's flags.

    LIST is a value of OPKILN_CUDA_ARCH_LIST: 8.0, 9.0a, 10.0f+PTX, Hopper, native, all, all-major,
    separated by ; , or spaces; or a value of PYTORCH_ROCM_ARCH: gfx90a, gfx942:xnack-. Without
    LIST: that of the settings, else this machine's GPUs, else all that the toolkit has. Exits with
    1 if a build for the list would fail.
    """
    answer = _read_arch_list(" ".join(archs) if archs else None, op)
    output.answer(as_json, answer, columns(_rows(answer)))
    return output.FOUND if answer["refused"] or not answer["archs"] else 0


def _read_arch_list(given: str | None, name: str | None) -> dict[str, Any]:
    """The steps by which a build reads a list, and the flags that come of it."""
    from opkiln.base.model import CUDA
    from opkiln.builder.registry import get_builder
    from opkiln.decision import archs
    from opkiln.machine.toolchain import choice
    from opkiln.settings import origin_of
    from opkiln.store.layers import Store

    backend = _backend(given)
    op = get_builder(name, backend=backend).op() if name else None
    toolkit, no_toolkit = None, ""
    try:
        toolkit = choice.choose(Store().memory, backend).device
    except ToolchainError as error:
        no_toolkit = error.what
    language = archs.grammar(backend)
    listed = archs.parse_names(backend, toolkit.archs) if toolkit else ()
    natives = archs.devices(backend)
    asked, origin = origin_of(archs.SETTINGS[backend]) if given is None else (given, "LIST")
    if given is None and not asked:
        # As for precompiling: all. Without a toolkit, `native` raises the error for a missing GPU.
        everything = backend == CUDA and listed and not natives
        asked, origin = ("all", "toolkit") if everything else ("native", "devices")
    try:
        parsed = language.parse(asked, native=natives, listed=listed)
    except ArchError as error:
        where = f"{origin}: " if origin.isupper() and origin != "LIST" else ""
        raise ArchError(where + error.what, why=error.why, hint=error.hint) from None
    rule = op.rule if op else None
    kept, removed = language.apply_filter(parsed, rule) if rule else (parsed, ())
    refused: tuple[tuple[Any, str], ...] = ()
    notes: tuple[str, ...] = ()
    if toolkit and listed:
        if backend == CUDA and asked.strip().lower() == "native":
            kept, notes = archs.archs_for_devices(kept, toolkit)
        else:
            kept, refused = language.usable(kept, listed, toolkit.accepts)
    known_toolkit = None
    if toolkit is not None:
        variants = sorted(name for name in toolkit.accepts if name[:1].isdigit())
        known_toolkit = {**fields(toolkit, "family version home archs"), "variants": variants}
    return {
        "backend": backend,
        "asked": asked,
        "origin": origin,  # LIST, a variable, devices, toolkit
        "parsed": tuple(map(str, parsed)),
        "op": name or "",
        "filter": getattr(rule, "__qualname__", repr(rule)) if rule else "",
        "removed": tuple(map(str, removed)),  # by the filter
        "toolkit": known_toolkit,
        "no_toolkit": no_toolkit,  # why there is none
        "refused": [{"arch": str(arch), "reason": reason} for arch, reason in refused],
        "notes": notes,  # on devices that use code for another architecture
        "archs": tuple(map(str, kept)),
        "images": language.images(kept),
        "flags": language.flags(kept),
    }


def _backend(given: str | None) -> str:
    """ROCm if the list names a ``gfx…``, else CUDA. Without a list, the backend of torch."""
    from opkiln.base.model import CUDA, ROCM
    from opkiln.machine.arch import hip
    from opkiln.machine.toolchain import torch_sdk

    if given is not None and given.strip().lower() != "native":
        return ROCM if hip.is_hip(given) else CUDA
    torch = torch_sdk.find()
    return ROCM if torch is not None and torch.hip else CUDA


def _rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("asked", f"{answer['asked']} ({answer['origin']})"),
        ("read as", ";".join(answer["parsed"])),
    ]
    if answer["op"]:
        removed = f"{answer['filter']} removed {';'.join(answer['removed']) or 'nothing'}"
        rows.append(("filter", removed if answer["filter"] else f"op {answer['op']} has none"))
    told = f"none: {answer['no_toolkit']}"
    if tool := answer["toolkit"]:
        listed = f" has {';'.join(tool['archs'])}" if tool["archs"] else ""
        told = f"{tool['family']} {tool['version']} in {tool['home']}{listed}"
    rows.append(("toolkit", told))
    rows += [("refused", f"{each['arch']}: {each['reason']}") for each in answer["refused"]]
    rows += [("note", note) for note in answer["notes"]]
    rows.append(("left", ";".join(answer["archs"]) or "nothing"))
    rows += [("flags" if i == 0 else "", flag) for i, flag in enumerate(answer["flags"])]
    return rows
