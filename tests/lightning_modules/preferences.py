"""Pairs of answers to prefer one of, as a file of JSON lines."""

from pathlib import Path
from typing import Any

from tests.data.chats import write_rows
from tests.lightning_modules.pretrained import ANSWERS


def pairs(copies: int = 8) -> list[dict[str, Any]]:
    """Rows of prompt, chosen and rejected: the chosen answer is the right one, the rejected another's."""
    answers = [*ANSWERS.values()]
    return [
        {"prompt": question, "chosen": answer, "rejected": answers[(place + 1) % len(answers)]}
        for place, (question, answer) in enumerate(ANSWERS.items())
    ] * copies


def write_pairs(path: Path, copies: int = 8) -> Path:
    return write_rows(path, pairs(copies))
