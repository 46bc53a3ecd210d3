"""Whether a chat template writes all of a conversation.

Many templates silently drop tools, calls, results, the reasoning before an answer or a later system message. The model would
then learn to answer a question that it never saw. A marked copy of the conversation shows what is dropped (template_probe.py).
Other templates take the text before a closing tag in an answer for reasoning, and cut it off. So the text of the answer must
appear unchanged, except for blanks.
"""

from training.data.templates.chat_template import ChatTemplate, ConversationRejected, Rendered
from training.data.templates.template_probe import Conversation, MarkedConversation, Shape, left_out, marked

_SHOWN = 60


class TemplateCoverage:
    """Finds what is wrong with a template's rendering; with `by_spans`, also of what it marks as the assistant's."""

    def __init__(self, template: ChatTemplate, by_spans: bool) -> None:
        self._template, self._by_spans = template, by_spans
        self._faults: dict[Shape, str | None] = {}

    def render(self, given: Conversation) -> Rendered:
        """With a generation prompt where there is no answer. Raises Rejected."""
        return self._template.render(
            given.turns, generation_prompt=not given.answer, tools=given.tools, template_kwargs=given.template_kwargs
        )

    def fault(self, given: Conversation, text: str) -> str | None:
        """What the template does wrong in writing `given` as `text`; None if that is nothing."""
        return self._parts_problem(given) or _answer_problem(given, text)

    def _parts_problem(self, given: Conversation) -> str | None:
        if (shape := given.shape) is None:
            return self._tested(given)
        if shape not in self._faults:
            self._faults[shape] = self._tested(given)
        return self._faults[shape]

    def _tested(self, given: Conversation) -> str | None:
        fault = self._copy_problem(marked(given, in_ids=False), if_refused=None)
        return fault and self._copy_problem(marked(given, in_ids=True), if_refused=fault)

    def _copy_problem(self, test: MarkedConversation, if_refused: str | None) -> str | None:
        """The fault in how the copy is written; `if_refused` where the template refuses it.

        It may know which functions there are, or how long an id is.
        """
        try:
            rendered = self.render(test.copy)
        except ConversationRejected:
            return if_refused
        if missing := left_out(rendered["text"], test.marks):
            return f"does not write {missing}"
        if not self._by_spans:
            return None
        trained = "".join(rendered["text"][start:end] for start, end in rendered["spans"])
        if missing := left_out(trained, test.of_assistant):
            return f"does not write {missing} inside {{% generation %}}"
        if any(mark in trained for mark in test.of_tools):
            return "has the result of a tool inside {% generation %}"
        return None


def _answer_problem(given: Conversation, text: str) -> str | None:
    for said in given.said:
        if said.strip() not in text and _squeezed(said) not in _squeezed(text):
            return f"does not write all that the assistant says: {said[:_SHOWN]!r}"
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
