"""Talking between ranks: collectives, their differentiable conjugates, point-to-point messages and random streams."""
