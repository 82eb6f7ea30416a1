"""How a matrix product is done in fewer bits: float8 casts, their scales, and the engines that multiply."""
