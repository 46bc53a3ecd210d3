"""Log-probs of responses: the forward pass, the head, and scoring without gradients."""
