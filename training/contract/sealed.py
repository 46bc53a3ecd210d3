"""JSON files that show whether they are what was written: `sha256` in them is that of everything else they say.

Every other file of a store is promised by a manifest, and nothing promises a manifest, nor the record of a derivation. What
they say decides all the same: the accuracy that the gate reads stands there, and how a policy was made. A file from before
there were seals has none, and is believed.
"""

import json
from typing import Self

from training.contract.fields import Frozen
from training.contract.fingerprint import value_digest

SEAL = "sha256"


class Sealed(Frozen):
    def sealed(self) -> bytes:
        """The file's content, for people to read as well."""
        content = json.loads(self.model_dump_json())
        return json.dumps({**content, SEAL: value_digest(content).hex()}, indent=2, ensure_ascii=False).encode()

    @classmethod
    def unseal(cls, content: bytes) -> Self:
        """What `sealed` wrote. Raises ValueError for anything else: bytes that are no JSON, another form, a broken seal."""
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        seal = found.pop(SEAL, None) if isinstance(found, dict) else None
        if seal is not None and seal != value_digest(found).hex():
            raise ValueError(f"what it says has not the {SEAL} that it says")
        return cls.model_validate(found)
