"""Writes every generated page of docs/reference, and docs/settings.md."""

from reference_pages import settings
from reference_pages.pages import HERE, all_pages

HERE.mkdir(exist_ok=True)
for name, text in all_pages().items():
    (HERE / name).write_text(text)
(HERE.parent / "settings.md").write_text(settings.page())
