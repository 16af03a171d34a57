"""An HTML page as a test reads it.

from page import Page       tests/conftest.py makes this module importable
"""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Start tags with their attributes, and the text inside each kind of element."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "line", "path", "use", "rect"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def all(self, *names):
        return [attributes for tag, attributes in self.tags if tag in names]
