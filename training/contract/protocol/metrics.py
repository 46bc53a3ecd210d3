"""The metrics in the events of a job and in MLflow, with their meanings; the documentation is made from these tables.

A name in angle brackets stands for a type of loss, or for the name of a source.
"""

from training.contract.protocol.votes import ACCURACY_VOTES, WIN_VOTES

# Of a step: means over the pairs of the global batch.
STEP_METRICS = {
    "loss": "The loss.",
    "losses/<type>": "Each term of a mixture, before its weight.",
    "rewards/chosen": "The reward of the chosen response.",
    "rewards/rejected": "The reward of the rejected response.",
    "rewards/margins": "The chosen reward minus the rejected reward.",
    "rewards/accuracies": "The share of pairs with a higher chosen reward. Ties do not count.",
    "logps/chosen": "The policy's log-prob of the chosen response, in nats.",
    "logps/rejected": "The policy's log-prob of the rejected response, in nats.",
    "aux_loss": "The load-balancing loss of a mixture of experts, before its coefficient.",
    "grad_norm": "The norm of the gradient before clipping.",
    "learning_rate": "The learning rate of the step; with Muon, of the layers' matrices.",
    "tokens_per_second": "Tokens of the batch's sequences per second. A prompt counts with each response.",
    "peak_memory_mb": "The highest memory of any process, on its GPU if it has one.",
}
# Of the held-out pairs. During training they lack sources.
HELD_OUT_METRICS = {
    **{f"eval/{name}": text for name, text in STEP_METRICS.items() if "/" in name or name == "loss"},
    "eval/pairs": "The number of held-out pairs.",
    "eval/prompts": "The number of their prompts, if some pairs share one.",
    "eval/accuracies/chosen_longer": "The accuracy on pairs whose chosen response has more tokens.",
    "eval/accuracies/chosen_shorter": "The accuracy on pairs whose chosen response has fewer tokens.",
    "eval/accuracies/same_length": "The accuracy on pairs with equally long responses.",
    "eval/sources/<name>/loss": "The loss on the pairs of named sources.",
    "eval/sources/<name>/rewards/margins": "Their mean margin.",
    "eval/sources/<name>/rewards/accuracies": "Their accuracy.",
    "eval/sources/<name>/pairs": "Their number.",
}
# With `evaluation.disclosure: votes`, instead of all held-out metrics.
VOTED_METRICS = {
    ACCURACY_VOTES: "The accuracy, as the mean of 100 votes.",
    WIN_VOTES: "The share of pairs with a lower loss than the champion's, as the mean of 100 votes; ties count half.",
}
