"""Gradients and master weights between backward and the next forward: reduced, clipped, stepped, gathered."""
