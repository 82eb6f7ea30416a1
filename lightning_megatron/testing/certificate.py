"""`Certificate`: what came of `certify`, for a test to assert and a person to read."""

from dataclasses import dataclass
from typing import Any

from lightning_megatron.testing.outcome import LayoutResult, Outcome
from lightning_megatron.testing.report import record_of, text_of

__all__ = ["Certificate", "LayoutResult"]


@dataclass(frozen=True, kw_only=True)
class Certificate(Outcome):
    """A module on one device beside itself under layouts; true where a layout is equal to it and none differs."""

    @property
    def text(self) -> str:
        """The table, and what differs, with causes and mends."""
        return text_of(self)

    @property
    def record(self) -> dict[str, Any]:
        """Record of the certificate for a program: numbers, texts, lists and dictionaries."""
        return record_of(self)

    def __bool__(self) -> bool:
        return not self.differing and self._has_run

    def __str__(self) -> str:
        return self.text

    def assert_equal(self) -> None:
        """Raises AssertionError with the whole text where something differs, or where no layout ran."""
        if self.differing:
            raise AssertionError(self.text)
        if not self._has_run:
            raise AssertionError(f"no layout ran:\n{self.text}")

    @property
    def _has_run(self) -> bool:
        return any(result.verdict == "equal" for result in self.results)
