"""Words that people search for, and a look at whether the search of the built site leads from each to a page.

The search puts stems into its index, a text in JavaScript, and looks for pages that have every stem of a query.
"""

import json
import re
from collections.abc import Callable

WORDS = [
    *("migration", "FAQ", "tutorial", "W&B", "wandb", "profiling", "multi-node", "checkpointing", "FSDP", "ZeRO"),
    *("mixed precision", "SLURM", "Kubernetes", "Ray", "LoRA", "FP8", "MFU", "Megatron-LM", "NeMo", "DeepSpeed"),
]


def unfound(index: str, stem: Callable[[str], str]) -> list[str]:
    """The words for which the search has no page, by its index (`searchindex.js`)."""
    found = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    return [word for word in WORDS if not set.intersection(*(_pages(found, stem(part)) for part in _parts(word)))]


def _parts(query: str) -> list[str]:
    return re.findall(r"\w+", query.lower())


def _pages(index: dict[str, dict[str, int | list[int]]], stem: str) -> set[int]:
    """Numbers of the pages that have a stem in their text or in a title."""
    pages: set[int] = set()
    for kind in ("terms", "titleterms"):
        numbers = index[kind].get(stem, [])
        pages |= set(numbers if isinstance(numbers, list) else [numbers])
    return pages
