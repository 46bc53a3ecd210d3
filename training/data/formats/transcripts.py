"""Read conversations that are one text, as in HH-RLHF: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""

import re
from typing import Any

from training.data.formats.messages import Message, message
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row, text_of

_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: Any) -> bool:
    """Return whether `value` is text that begins with the name of a speaker."""
    start = _TURN.search(value) if isinstance(value, str) else None
    return start is not None and not value[: start.start()].strip()


def transcript_of(row: Row, name: str) -> tuple[Message, ...]:
    """Return the turns of the transcript in a field, or of one that begins in `prompt`.

    One space after the colon is punctuation. Everything else is content. Raises Quarantined.
    """
    text = text_of(row, name)
    if not is_transcript(text) and is_transcript(row.get("prompt")):
        text = text_of(row, "prompt") + text
    start, *turns = _TURN.split(text)
    if start.strip() or not turns:
        raise Quarantined(QuarantineReason.BAD_TRANSCRIPT, f'`{name}` does not begin with "\\n\\nHuman:"')
    speakers, contents = turns[::2], turns[1::2]
    return tuple(
        message(_SPEAKERS[speaker], content.removeprefix(" "))
        for speaker, content in zip(speakers, contents, strict=True)
    )
