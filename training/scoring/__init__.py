"""Log-probs of pairs without gradients, and checks of them."""
