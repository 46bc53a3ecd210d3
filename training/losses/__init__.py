"""Preference losses: what to minimize, given the log-probs of both responses of each pair.

    inputs.py        what a loss is computed from: log-probs, lengths, log-ratios and scores of B pairs, and of their batch
    pairwise.py      losses of one pair alone
    batchwise.py     losses of a pair among the others of the batch
    preference.py    all of them by type; `preference_loss`, which adds up the terms of a recipe's loss

Every loss is a pure function of `LossInputs`, a `BatchContext` and the settings of its `Term`; its `LossType` says which of
them it needs. All is computed in float64: margins are small differences of large sums.
"""
