"""JSON files that show whether they are what was written: their field `sha256` is the digest of all the others.

A manifest vouches for every other file of an artifact, but nothing vouches for the manifest, or for the record of a derivation.
Yet decisions depend on them: the accuracy that the gate reads is there, and how a policy was made.
"""

import json
from typing import Self

from training.contract.config.fields import StrictModel
from training.contract.identity.fingerprint import value_digest

SEAL = "sha256"


class ChecksummedModel(StrictModel):
    def dumps(self) -> bytes:
        """The file's content, which people can read as well."""
        content = json.loads(self.model_dump_json())
        return json.dumps({**content, SEAL: value_digest(content).hex()}, indent=2, ensure_ascii=False).encode()

    @classmethod
    def loads(cls, content: bytes) -> Self:
        """What `dumps` wrote. Raises ValueError for anything else: bytes that are no JSON, another form, a broken seal."""
        try:
            found = json.loads(content)
            seal = found.pop(SEAL, None) if isinstance(found, dict) else None
            digest = value_digest(found).hex()
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if seal != digest:
            raise ValueError(f"its content does not have the {SEAL} that it states, {seal}")
        return cls.model_validate(found)
