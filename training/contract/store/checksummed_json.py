"""JSON files with a checksum: their field `sha256` is the digest of all other fields.

This field is the only checksum of manifests and derivation records. Decisions depend on both: they hold the accuracy for the
gate, and the derivation of a policy.
"""

import json
from typing import Self

from training.contract.config.fields import StrictModel
from training.contract.identity.fingerprint import value_digest

SEAL = "sha256"


class ChecksummedModel(StrictModel):
    def dumps(self) -> bytes:
        """Return the file's content, indented for human readers."""
        content = json.loads(self.model_dump_json())
        return json.dumps({**content, SEAL: value_digest(content).hex()}, indent=2, ensure_ascii=False).encode()

    @classmethod
    def loads(cls, content: bytes) -> Self:
        """Parse the output of `dumps`. Raises ValueError for bytes without JSON, other fields, or a wrong checksum."""
        try:
            fields = json.loads(content)
            seal = fields.pop(SEAL, None) if isinstance(fields, dict) else None
            digest = value_digest(fields).hex()
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if seal != digest:
            raise ValueError(f"its field {SEAL} is {seal}, but its content has {digest}")
        return cls.model_validate(fields)
