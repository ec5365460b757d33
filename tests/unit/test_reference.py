"""docs/reference has every public name, command and error, as the code has them now."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import click
import pytest
from reference_pages import api, commands, compat, failures, pages, source
from reference_pages.markdown import anchor

from opkiln import errors
from opkiln.cli.main import cli
from opkiln.cli.output import FOUND, INTERRUPTED
from opkiln.cli.report import WARNED

DOCS = source.ROOT / "docs"
GENERATED = pages.all_pages()
BY_HAND = {"checks.md", "deepspeed.md", "formats.md", "report-json.md"}

_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<!\[)`[^`\n]+`(?!\])")  # not the text of a link


def headings(text: str) -> list[str]:
    return [found.replace("`", "") for found in _HEADING.findall(_BLOCK.sub("", text))]


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (pages.HERE / name).read_text() == GENERATED[name], "run `make docs`"


def test_no_page_is_left_over() -> None:
    assert {path.name for path in pages.HERE.iterdir()} == {*GENERATED, *BY_HAND}


def test_every_page_is_in_the_index() -> None:
    listed = set(_LINK.findall(GENERATED["index.md"]))
    assert {*GENERATED, *BY_HAND} - {"index.md"} <= listed


def test_every_module_that_exports_names_has_a_page() -> None:
    known = {page.module for page in api.PAGES} | {name for name, *_ in compat.MODULES}
    assert set(source.containing(r"^__all__\b")) == known


def test_every_module_of_the_package_is_on_the_index() -> None:
    package = import_module("opkiln")
    modules = [f"opkiln.{name}" for name in package._MODULES]
    nn = [f"opkiln.nn.{name}" for name in import_module("opkiln.nn")._MODULES]
    for module in (*modules, *nn):
        assert f"[`{module}`](" in GENERATED["index.md"], module


@pytest.mark.parametrize("page", api.PAGES, ids=lambda page: page.module)
def test_every_public_name_is_on_its_page(page: api.Page) -> None:
    if page.module == "opkiln":
        package = import_module("opkiln")
        names = set(package.__all__) - {*package._MODULES, "__version__"}
    else:
        names = set(source.module(page.module).listed())
    assert names
    assert names <= set(headings(GENERATED[page.file]))


@pytest.mark.parametrize("page", api.PAGES, ids=lambda page: page.module)
def test_every_public_name_and_member_has_a_docstring(page: api.Page) -> None:
    missing = []
    for found in api.described(page):
        if found.module.name == "opkiln.errors":
            continue  # on the page of errors
        if not found.doc:
            missing.append(found.name)
        if isinstance(found.node, ast.ClassDef):
            parts = source.members(found, lambda base: base.place in api.homes())
            missing += [f"{found.name}.{each.name}" for each in parts if not each.doc]
    assert not missing


@pytest.mark.parametrize("page", api.PAGES, ids=lambda page: page.module)
def test_every_class_that_a_signature_names_is_on_a_page(page: api.Page) -> None:
    nodes = []
    for found in api.described(page):
        if isinstance(found.node, ast.ClassDef):
            parts = source.members(found, lambda base: base.place in api.homes())
            nodes += [(each.owner.module, each.node) for each in parts if not each.is_attribute]
        elif isinstance(found.node, source.Function):
            nodes.append((found.module, found.node))
    classes = {each.place for each in api.named_types(nodes)}
    in_settings = {
        ("opkiln.settings", "Setting"),
        ("opkiln.settings", "Settings"),
    }  # docs/reference/variables.md
    assert not classes - set(api.homes()) - in_settings


@pytest.mark.parametrize("name", [name for name, *_ in compat.MODULES])
def test_every_compatible_name_is_listed(name: str) -> None:
    for each in import_module(name).__all__:
        assert re.search(rf"^\| `{each}` \| \S", GENERATED["compat.md"], re.MULTILINE), each


# Commands


@pytest.mark.parametrize(("path", "command"), commands.walk("opkiln", cli), ids=str)
def test_every_option_that_help_shows_is_on_the_page(path: str, command: click.Command) -> None:
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    shown = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", command.get_help(context), re.MULTILINE))
    section = GENERATED["commands.md"].partition(f"\n## `{path}`\n")[2].partition("\n## ")[0]
    everywhere = GENERATED["commands.md"].partition("\n## For every command\n")[2]
    assert section
    for option in shown - {"--help"}:
        assert f"`{option}`" in section + everywhere, option


def test_the_exit_codes_on_the_page_are_those_of_the_code() -> None:
    table = (DOCS / "cli.md").read_text().partition("## Exit codes")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    own = {each.exit_code for each in failures.failures() if each.exit_code is not None}
    assert listed == {0, FOUND, WARNED, INTERRUPTED} | own


# Errors


def test_every_error_and_warning_is_on_the_page() -> None:
    shown = headings(GENERATED["errors.md"])
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, (errors.OpkilnError, Warning))
        and value.__module__ == errors.__name__
    ]
    assert len(kinds) > 30
    for kind in kinds:
        assert kind.__name__ in shown
        if issubclass(kind, errors.OpkilnError):
            row = rf"^\| \[`{kind.__name__}`\]\(#\w+\) \| {kind.exit_code} \|"
            assert re.search(row, GENERATED["errors.md"], re.MULTILINE), kind


@pytest.mark.parametrize("each", failures.failures(), ids=lambda each: each.name)
def test_an_error_says_when_it_is_raised_and_what_to_do(each: failures.Failure) -> None:
    if each.found.module.name.startswith("opkiln.cli."):
        return  # never seen outside of its command
    when, _, then = each.found.doc.partition("\n\n")
    assert when
    assert then


# Links


@pytest.mark.parametrize("path", sorted(pages.HERE.glob("*.md")), ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    text = _CODE.sub("", _BLOCK.sub("", path.read_text()))
    for link in _LINK.findall(text):
        name, _, place = link.partition("#")
        target = path.parent / name if name else path
        assert target.is_file(), link
        if place:
            anchors = [anchor(each) for each in headings(target.read_text())]
            assert anchors.count(place) == 1, link


@pytest.mark.parametrize("path", sorted(pages.HERE.glob("*.md")), ids=lambda path: path.name)
def test_no_two_headings_of_a_page_have_one_anchor(path: Path) -> None:
    anchors = [anchor(each) for each in headings(path.read_text())]
    assert len(anchors) == len(set(anchors))
