"""Check that a chat template writes all of a conversation.

Many templates silently drop tools, calls, results, the reasoning before a response or a later system message. The model would
then learn to respond to text that it never saw. A marked copy of the conversation shows the dropped parts (template_probe.py).

Other templates cut off the text before a closing tag such as `</think>`. So the text of the response must appear unchanged,
except for blanks.
"""

from training.data.templates.chat_template import ChatTemplate, ConversationRejected, Rendered
from training.data.templates.template_probe import Conversation, MarkedConversation, Shape, left_out, marked

_SHOWN = 60


class TemplateCoverage:
    """Finds parts that a template does not write; with `by_spans`, also parts outside {% generation %}."""

    def __init__(self, template: ChatTemplate, by_spans: bool) -> None:
        self._template, self._by_spans = template, by_spans
        self._problems: dict[Shape, str | None] = {}

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation; without a response, with a generation prompt. Raises ConversationRejected."""
        return self._template.render(
            conversation.turns,
            generation_prompt=not conversation.answer,
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
        )

    def problem(self, conversation: Conversation, text: str) -> str | None:
        """Return the problem of `text`, which the template wrote for `conversation`; None without one."""
        return self._parts_problem(conversation) or _response_problem(conversation, text)

    def _parts_problem(self, conversation: Conversation) -> str | None:
        if (shape := conversation.shape) is None:
            return self._test_copies(conversation)
        if shape not in self._problems:
            self._problems[shape] = self._test_copies(conversation)
        return self._problems[shape]

    def _test_copies(self, conversation: Conversation) -> str | None:
        problem = self._copy_problem(marked(conversation, in_ids=False), if_rejected=None)
        return problem and self._copy_problem(marked(conversation, in_ids=True), if_rejected=problem)

    def _copy_problem(self, test: MarkedConversation, if_rejected: str | None) -> str | None:
        """Return the problem of a marked copy; `if_rejected` if the template rejects the copy.

        A template may check the names of functions or the length of ids.
        """
        try:
            rendered = self.render(test.copy)
        except ConversationRejected:
            return if_rejected
        if missing := left_out(rendered["text"], test.marks):
            return f"does not write {missing}"
        if not self._by_spans:
            return None
        trained = "".join(rendered["text"][start:end] for start, end in rendered["spans"])
        if missing := left_out(trained, test.assistant_marks):
            return f"does not write {missing} inside {{% generation %}}"
        if any(mark in trained for mark in test.result_marks):
            return "has the result of a tool inside {% generation %}"
        return None


def _response_problem(conversation: Conversation, text: str) -> str | None:
    for content in conversation.response_texts:
        if content.strip() not in text and _without_blanks(content) not in _without_blanks(text):
            return f"does not write all of the assistant's text: {content[:_SHOWN]!r}"
    return None


def _without_blanks(text: str) -> str:
    return "".join(text.split()).casefold()
