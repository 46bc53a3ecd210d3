"""What the proxy in front of `transformers serve` is told by the process that starts it."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class ProxySettings:
    """What is served where, and where `transformers serve` answers for it under the name `served_as`."""

    model: str
    served_as: str
    upstream: str
    host: str
    port: int
    generation: dict[str, Any]  # the model's generation_config.json

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))
