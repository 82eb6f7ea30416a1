"""Gradients from the end of backward to the optimizer's step: reduced over the right axes, measured, clipped."""
