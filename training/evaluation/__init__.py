"""The sampled answers and the HTML report of an evaluation."""
