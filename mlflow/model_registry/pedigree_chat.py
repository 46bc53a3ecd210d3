"""Answer chats with a released model: what MLflow's `python_function` flavor loads, from the folder `code/` of a version.

MLflow's transformers flavor samples unless told otherwise, fails at temperature 0, and gives a list for one chat. Here no
temperature, or 0, is greedy, a temperature above 0 samples, and one chat gives one answer. The file imports nothing of
Pedigree, and nothing that MLflow does not bring: a version is used where Pedigree is not installed.
"""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow.transformers
import pandas as pd
from mlflow.exceptions import MlflowException

_MAX_TOKENS = 1024  # of an answer, if neither the request nor the model says: as `transformers serve` has it
_TAKEN = ("messages", "temperature", "max_tokens", "top_p", "stop")
# What a client sends without meaning anything by it.
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> "Chat":
    """Load the version in the folder `path`; MLflow calls this by its name."""
    return Chat(mlflow.transformers.load_model(path), model_config["model"])


class Chat:
    """A model and its tokenizer, in a pipeline of transformers, and the name under which it answers."""

    def __init__(self, pipeline: Any, name: str) -> None:
        self._model, self._tokenizer, self._name = pipeline.model, pipeline.tokenizer, name

    def predict(
        self, data: pd.DataFrame | Mapping[str, Any], params: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one chat, or each row of a table of several, in the form of OpenAI's chat completions."""
        rows: list[Any] = data.to_dict(orient="records") if isinstance(data, pd.DataFrame) else [data]
        answers = [self._answer(_request({**(params or {}), **row})) for row in rows]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        inputs = self._inputs(request["messages"])
        prompt_tokens = inputs["input_ids"].shape[1]
        stop = [request["stop"]] if isinstance(request.get("stop"), str) else list(request.get("stop", ()))
        limit = int(request.get("max_tokens", self._model.generation_config.max_new_tokens or _MAX_TOKENS))
        settings = {**_sampling(request), "max_new_tokens": limit}
        if stop:
            settings |= {"stop_strings": stop, "tokenizer": self._tokenizer}
        [output] = self._model.generate(**inputs, **settings)
        tokens = output[prompt_tokens:]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        for words in stop:
            text = text.partition(words)[0]
        reason = "length" if len(tokens) >= limit else "stop"
        return _completion(self._name, text, reason, prompt_tokens, len(tokens))

    def _inputs(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            lacking = "tokenizer" if self._tokenizer is None else "chat template"
            raise _refused(f"this version of {self._name} has no {lacking}; release it again with one")
        said = [{name: value for name, value in message.items() if not _absent(value)} for message in messages]
        return self._tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)


def _request(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are there. Raises MlflowException if there are others than those that count here.

    MLflow drops fields that the model's signature does not list, so that is MLflow's own for chats: nothing is ignored that
    a client of OpenAI may mean.
    """
    given = {name: value for name, value in fields.items() if not _absent(value)}
    for name, value in given.items():
        if name not in _TAKEN and value not in _NEUTRAL.get(name, ()):
            raise _refused(
                f"`{name}` is {value!r}; `mlflow models serve` takes {', '.join(_TAKEN)}; leave {name} out, or use "
                "`pedigree serve`, which takes more"
            )
    if given.get("max_tokens", 1) < 1:
        raise _refused(f"`max_tokens` is {given['max_tokens']}; expected 1 or more, or leave it out")
    if not len(given.get("messages", ())):
        raise _refused('`messages` is missing or empty; expected a list such as [{"role": "user", "content": "Hello"}]')
    return given


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `generate` that a request asks for."""
    temperature = float(request.get("temperature", 0))
    if not 0 <= temperature < math.inf:
        raise _refused(f"`temperature` is {temperature}; expected 0, which is greedy, or a number above")
    if temperature == 0:
        return {"do_sample": False}
    settings = {"do_sample": True, "temperature": temperature}
    return settings | ({"top_p": float(request["top_p"])} if "top_p" in request else {})


def _completion(model: str, text: str, reason: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}],
        "usage": {**counts, "total_tokens": prompt_tokens + completion_tokens},
    }


def _absent(value: object) -> bool:
    """Whether a table or a client has put it there for nothing."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _refused(message: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(message)
