"""The card is well-formed XML that shows the sentence and the picture as they are."""

import base64
from xml.etree import ElementTree

from assets.views.metadata import margin_histogram
from assets.views.result_card import render_card

SVG = "{http://www.w3.org/2000/svg}"


def test_card_shows_sentence_and_picture() -> None:
    sentence = '5 < 6 & "quoted" </text><script>alert(1)</script> ' * 6
    root = ElementTree.fromstring(render_card(sentence, margin_histogram([0.5, -1.0, 2.0]).md_str))
    lines = [element.text or "" for element in root.findall(f"{SVG}text")]
    assert " ".join(lines).split() == sentence.split()
    [image] = root.findall(f"{SVG}image")
    png = base64.b64decode(image.attrib["href"].partition(",")[2])
    assert png.startswith(b"\x89PNG") and root.find(f".//{SVG}script") is None
    box = float(root.attrib["height"])
    assert all(float(element.attrib["y"]) < box for element in root.findall(f"{SVG}text"))


def test_card_without_picture_has_none() -> None:
    root = ElementTree.fromstring(render_card("Done.", "![seen](http://elsewhere.example/seen.png)"))
    assert root.findall(f"{SVG}image") == []
