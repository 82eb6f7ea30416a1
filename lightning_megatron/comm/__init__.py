"""Communication: collectives, their differentiable conjugates, point-to-point messages, and random numbers."""
