"""Preference losses, as functions of the log-probs of both responses of each pair.

    inputs.py        the inputs of a loss: log-probs, lengths, log-ratios and scores of B pairs, and of their batch
    pairwise.py      losses of a single pair
    batchwise.py     losses that compare a pair with other pairs of the batch
    preference.py    all losses by type; `preference_loss` adds up the terms of a recipe's loss

Every loss is a pure function of `LossInputs`, a `BatchContext` and the settings of its `LossTerm`; `LossType.traits` lists the
inputs that it needs. All is computed in float64, because margins are small differences of large sums.
"""
