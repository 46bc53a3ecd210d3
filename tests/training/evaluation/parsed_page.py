"""An HTML page as a browser parses it, for tests of reports."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, attributes and text of a page, parsed like in a browser."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.addresses: list[str | None] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def lines_of(page: str) -> str:
    return "\n".join(text.strip() for text in Page(page).text if text.strip())
