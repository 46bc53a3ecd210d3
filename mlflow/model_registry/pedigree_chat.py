"""Answer chats with a released model: the code behind MLflow's `python_function` flavor, in the folder `code/` of a version.

MLflow's transformers flavor samples by default, fails at temperature 0, and returns a list for one chat. Here a temperature of
0, the default, is greedy, a higher one samples, and one chat gives one answer. The file imports neither Pedigree nor packages
beyond MLflow's: versions are also used without Pedigree.
"""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow.transformers
import pandas as pd
from mlflow.exceptions import MlflowException

from training.contract.config.json_object import JsonObject

_MAX_TOKENS = 1024  # of an answer, if neither request nor model set it; the default of `transformers serve`
_SUPPORTED = ("messages", "temperature", "max_tokens", "top_p", "stop")
# Values without effect, sent by some clients.
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> "Chat":
    """Load the version in the folder `path`. MLflow calls this function by its name."""
    return Chat(mlflow.transformers.load_model(path), model_config["model"])


class Chat:
    """A model and its tokenizer, in a transformers pipeline, and the model name in answers."""

    def __init__(self, pipeline: Any, name: str) -> None:
        self._model, self._tokenizer, self._name = pipeline.model, pipeline.tokenizer, name

    def predict(
        self, data: pd.DataFrame | Mapping[str, Any], params: Mapping[str, Any] | None = None
    ) -> JsonObject | list[JsonObject]:
        """Answer one chat, or each row of a table of chats, in the form of OpenAI's chat completions."""
        rows: list[Any] = data.to_dict(orient="records") if isinstance(data, pd.DataFrame) else [data]
        answers = [self._answer(_request({**(params or {}), **row})) for row in rows]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, request: Mapping[str, Any]) -> JsonObject:
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
        for stop_text in stop:
            text = text.partition(stop_text)[0]
        reason = "length" if len(tokens) >= limit else "stop"
        return _completion(self._name, text, reason, prompt_tokens, len(tokens))

    def _inputs(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            missing = "tokenizer" if self._tokenizer is None else "chat template"
            raise _refusal(f"this version of {self._name} has no {missing}; release it again with one")
        conversation = [
            {name: value for name, value in message.items() if not _is_absent(value)} for message in messages
        ]
        return self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)


def _request(fields: Mapping[str, Any]) -> JsonObject:
    """Return the fields that are set. Raises MlflowException for an unsupported field.

    MLflow drops fields outside the model's signature. The signature is MLflow's own for chats, so no field of an OpenAI
    client is silently ignored.
    """
    request = {name: value for name, value in fields.items() if not _is_absent(value)}
    for name, value in request.items():
        if name not in _SUPPORTED and value not in _NEUTRAL.get(name, ()):
            raise _refusal(
                f"`{name}` is {value!r}; `mlflow models serve` takes {', '.join(_SUPPORTED)}; leave {name} out, or use "
                "`pedigree serve`"
            )
    if request.get("max_tokens", 1) < 1:
        raise _refusal(f"`max_tokens` is {request['max_tokens']}; expected 1 or more, or leave it out")
    if not len(request.get("messages", ())):
        raise _refusal('`messages` is missing or empty; expected a list such as [{"role": "user", "content": "Hello"}]')
    return request


def _sampling(request: Mapping[str, Any]) -> JsonObject:
    """Return the settings of `generate` for a request."""
    temperature = float(request.get("temperature", 0))
    if not 0 <= temperature < math.inf:
        raise _refusal(f"`temperature` is {temperature}; expected 0, which is greedy, or a number above")
    if temperature == 0:
        return {"do_sample": False}
    settings = {"do_sample": True, "temperature": temperature}
    return settings | ({"top_p": float(request["top_p"])} if "top_p" in request else {})


def _completion(model: str, text: str, reason: str, prompt_tokens: int, completion_tokens: int) -> JsonObject:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}],
        "usage": {**counts, "total_tokens": prompt_tokens + completion_tokens},
    }


def _is_absent(value: object) -> bool:
    """Return whether a value is only a placeholder, set by a table or a client."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _refusal(message: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(message)
