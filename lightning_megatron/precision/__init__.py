"""FP8: float8 casts, their scales, and the GEMMs that multiply in it."""
