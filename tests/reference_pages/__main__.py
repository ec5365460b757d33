"""Writes every generated page of docs/reference."""

from reference_pages.pages import HERE, all_pages

HERE.mkdir(exist_ok=True)
for name, text in all_pages().items():
    (HERE / name).write_text(text)
