"""Environment variables: those without meaning, those nobody reads, those kept from compilers."""

from __future__ import annotations

from opkiln.errors import SettingError
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, warned
from opkiln.report.doctor.here import Here
from opkiln.settings import dropped, table, unknown, whole_environment

# What a user who set one of these may want instead.
_INSTEAD = {
    "NVCC_PREPEND_FLAGS": "OPKILN_CUDAFLAGS",
    "NVCC_APPEND_FLAGS": "OPKILN_CUDAFLAGS",
    "HIPCC_COMPILE_FLAGS_APPEND": "OPKILN_CUDAFLAGS",
    "HIPCC_LINK_FLAGS_APPEND": "OPKILN_LDFLAGS",
    "CFLAGS": "OPKILN_CXXFLAGS",
    "C_INCLUDE_PATH": "CPLUS_INCLUDE_PATH",
}


def values(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """Every variable that opkiln reads has a value with a meaning."""
    wrong: dict[str, str] = {}
    given = 0
    for setting in table():
        try:
            given += setting.resolve()[1] != "default"
        except SettingError as error:
            wrong[error.hint.removeprefix("unset ")] = error.what
    if wrong:
        return failed(joined(*wrong.values()), f"unset {' '.join(wrong)}")
    return passed(f"{given} of {len(table())} are set")


def misspelt(here: Here) -> Outcome:  # noqa: ARG001
    """Variables that look like settings and are none."""
    from opkiln.registry import ALL_OPS

    environment = whole_environment()
    known = {name for setting in table() for name in (setting.variable, *setting.aliases)}
    texts, commands = [], []
    for text in unknown():
        name, meant = text.split()[0], text.partition("did you mean ")[2].rstrip("?")
        texts.append(text)
        if meant and meant not in environment:
            commands.append(f'export {meant}="${name}"; unset {name}')
        else:
            commands.append(f"unset {name}")
    ops = {name.rpartition(":")[2].upper() for name in ALL_OPS}
    for prefix in ("OPKILN_BUILD_", "DS_BUILD_"):
        for name in sorted(environment):
            op = name.removeprefix(prefix)
            if name.startswith(prefix) and name not in known and op not in (*ops, "TOKEN"):
                texts.append(f"{name}: there is no op {op.lower()}")
                commands.append(f"unset {name}")
    for name, meant in _near_aliases(environment, known):
        texts.append(f"{name} is not read; did you mean {meant}?")
        commands.append(f'export {meant}="${name}"; unset {name}')
    if texts:
        return warned(joined(*texts), "; ".join(commands))
    return passed("every OPKILN_ variable is one that is read")


def _near_aliases(environment: dict[str, str], known: set[str]) -> list[tuple[str, str]]:
    """DS_ variables that are none of ours, but nearly one: DeepSpeed has many of its own."""
    from difflib import get_close_matches

    aliases = [name for name in known if name.startswith("DS_")]
    found = []
    for name in sorted(environment):
        if name.startswith("DS_") and not name.startswith("DS_BUILD_") and name not in known:
            close = get_close_matches(name, aliases, 1, 0.85)
            if close and close[0] not in environment:
                found.append((name, close[0]))
    return found


def kept_away(here: Here) -> Outcome:  # noqa: ARG001
    """Variables that would change a compiler's result behind its command line."""
    names = dropped()
    if not names:
        return passed("none is set that would change a compiler's result unseen")
    instead = [f"{name}: set {_INSTEAD[name]}" for name in names if name in _INSTEAD]
    return warned(
        joined(f"no compiler that opkiln starts sees {', '.join(names)}", *instead),
        f"unset {' '.join(names)}",
    )
