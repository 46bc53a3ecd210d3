"""The version of the algorithm that scores sequences: another one, and no log-prob known before is used again.

It is part of the memo's rule. It stands here, not beside the model, since whoever only counts what is known (`pedigree
plan`) needs it without torch.
"""

SCORING_VERSION = "shared-prefix-1"
