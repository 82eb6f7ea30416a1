"""Amounts as text: sizes in bytes, and numbers of things."""


def byte_text(number: float) -> str:
    """Size in text, as "1.3 GB"; a GB is 10^9 bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def num_text(number: int, what: str) -> str:
    """Number of things in text, as "1 tensor" and "2 tensors"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
