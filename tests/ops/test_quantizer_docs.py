"""What docs/quantizers.md shows to be printed is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

from sample import child

PAGE = Path(__file__).parents[2] / "docs" / "quantizers.md"
_RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_every_example_prints_what_it_is_shown_to_print() -> None:
    found = _RUN.findall(PAGE.read_text())
    assert len(found) >= 5
    for code, expected in found:
        assert child.run(code, bare=False) == expected
