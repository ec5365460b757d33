"""What pages show to be printed is what is printed. tests/build/test_docs.py runs other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sample import child

DOCS = Path(__file__).parents[2] / "docs"
_RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["accelerators.md", "clusters.md", "io.md", "quantizers.md"])
def test_every_example_prints_what_it_is_shown_to_print(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    found = _RUN.findall((DOCS / page).read_text())
    assert found
    for code, expected in found:
        assert child.run(code, bare=False) == expected
