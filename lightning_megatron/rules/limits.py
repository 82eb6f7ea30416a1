"""Numbers that no run has: refused before anything is computed with them, which would take hours or overflow.

Each limit is far above what is known to be trained: of 2026 about 128 layers, 1e5 GPUs, 1e7 tokens of a sample, and
some thousand microbatches of a data-parallel rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

MOST = 10**12
"""Largest of any number."""
MOST_LAYERS = 4096
MOST_OF_A_KIND = 65_536
"""Largest number of heads, experts and the like."""
MOST_STAGES = 16_384
"""Largest number of ranks of a pipeline x chunks on each."""
MOST_MICROBATCHES = 100_000
"""Largest number of microbatches in a batch on a data-parallel rank."""
MOST_PROCESSES = 1024
"""Largest number of processes of a machine, and of workers of one of them."""
MOST_TOKENS = 10**8
"""Largest number of tokens in a sample."""


def limit_faults(numbers: Mapping[str, int | None], most: int) -> list[str]:
    """One sentence for each number, by its name, that is above `most`."""
    return [
        f"{name} ({shown(number)}) must be at most {most:,}, which is far above what is trained; give a smaller number"
        for name, number in numbers.items()
        if number is not None and number > most
    ]


@lru_cache(maxsize=16)
def model_limit_faults(model: Any) -> tuple[str, ...]:
    """One sentence for each number of a model's configuration that no model has."""
    faults = list[str]()
    for name, number in _numbers_of(model):
        last = name.rpartition(".")[2]
        kinds = MOST_OF_A_KIND if last.startswith("num_") else MOST
        faults += limit_faults({name: number}, MOST_LAYERS if last.endswith("_layers") else kinds)
    return tuple(faults)


def shown(number: int) -> str:
    """A number as text, in its digits where these are few: Python writes none of more than some thousand."""
    return str(number) if abs(number) < 10**20 else f"of about {number.bit_length() * 3 // 10} digits"


def _numbers_of(config: Any) -> Iterator[tuple[str, int]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{name}", number) for name, number in _numbers_of(value))
        elif isinstance(value, int):
            yield field.name, value
