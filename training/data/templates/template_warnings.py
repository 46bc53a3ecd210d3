"""Notes on a chat template before training: whether the trained model will learn to stop, BOS and date."""

from collections import Counter
from collections.abc import Collection, Iterator

from transformers import PreTrainedTokenizerFast

from training.data.templates.chat_template import CLOCK, PROBES, ChatTemplate, ConversationRejected
from training.data.templates.tokenizer import control_ids


def end_of_turn(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> dict[str, int]:
    """Return how often the template writes each control token after a response."""
    return dict(Counter(_control_tokens(tokenizer, template.closing())))


def template_tokens(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> dict[str, int]:
    """Return the added tokens that the template writes for plain conversations, with their ids."""
    added = tokenizer.added_tokens_decoder.keys()
    ids = {id_ for text in _texts(template) for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]}
    return {tokenizer.convert_ids_to_tokens(id_): id_ for id_ in sorted(ids & added)}


def template_notes(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, train_on: str) -> Iterator[str]:
    ends = end_of_turn(tokenizer, template)
    if not ends:
        yield "the chat template writes no control token after a response: a model will not learn when to stop"
    elif train_on == "assistant_turns" and not any(_control_tokens(tokenizer, template.trained_closing())):
        yield (
            f"the chat template writes {', '.join(ends)} after a response outside {{% generation %}}, but `train_on: "
            f"assistant_turns` trains only the text inside: a model will not learn when to stop; put it before "
            f"{{% endgeneration %}}"
        )
    text = template.render(PROBES[0], generation_prompt=True)["text"]
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    if adds_bos and not text.startswith(tokenizer.bos_token):
        yield "the tokenizer adds a BOS to plain text, but the chat template does not write it: conversations lack a BOS"
    if template.date and CLOCK not in template.text:
        yield "`tokenization.date` changes nothing: the chat template does not read the date"


def stop_notes(
    end_tokens: Collection[str], end_ids: Collection[int], eos: Collection[int], names: str
) -> Iterator[str]:
    """Yield a note if the `end_ids` of the template's end of turn are not among the model's `eos` ids, named `names`."""
    if end_ids and not set(end_ids) & set(eos):
        listed = ", ".join(end_tokens)
        yield (
            f"the chat template ends a response with {listed}, but the released model's eos_token_id ({names or 'none'}) "
            f"lacks it: a server would not stop there; set `release.eos_tokens: [{_quote(end_tokens)}]`"
        )


def _quote(tokens: Collection[str]) -> str:
    return ", ".join(f'"{token}"' for token in tokens)


def _control_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    control, ids = control_ids(tokenizer), tokenizer(text, add_special_tokens=False)["input_ids"]
    return [tokenizer.convert_ids_to_tokens(id_) for id_ in ids if id_ in control]


def _texts(template: ChatTemplate) -> Iterator[str]:
    """Yield the texts of the probes. Skip the probes that the template rejects."""
    for turns in PROBES:
        for prompt in (False, True):
            try:
                yield template.render(turns, generation_prompt=prompt)["text"]
            except ConversationRejected:
                continue
