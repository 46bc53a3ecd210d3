"""The settings of the proxy in front of `transformers serve`, passed to its process."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from training.contract.config.json_object import JsonObject


@dataclass(frozen=True)
class ProxySettings:
    """The served model and its address, and the address and the model name of `transformers serve`."""

    model: str
    served_as: str
    upstream: str
    host: str
    port: int
    generation: JsonObject  # the model's generation_config.json

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))
