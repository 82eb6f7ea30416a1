"""Constants of SplitMix64, a hash of 64-bit patterns, as torch's int64.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)
