"""Around a training loop: averages of gradients, uneven inputs, state dicts, seeds."""
