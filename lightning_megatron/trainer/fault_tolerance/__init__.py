"""A rank that fails, and a signal that ends the run: all ranks stop together."""
