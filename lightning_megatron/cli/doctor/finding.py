"""What the doctor says: findings in sections, as text and as JSON.

A finding is ok, or something to mind, or wrong; the last two say how they are mended.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["ok", "mind", "wrong"]
KINDS: tuple[Kind, ...] = ("ok", "mind", "wrong")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at, and how it is."""

    kind: Kind
    about: str
    """The thing: a package, a GPU, a variable."""
    found: str
    mend: str = ""
    """What to do about it; empty where it is ok."""

    def __post_init__(self) -> None:
        assert (self.kind == "ok") == (not self.mend), f"{self.about}: what is not ok has a mend, and nothing else has"


Sections = Mapping[str, Sequence[Finding]]
"""Findings by what they are about, in the order in which they are printed."""


def ok(about: str, found: str) -> Finding:
    """A finding that leaves nothing to do."""
    return Finding(kind="ok", about=about, found=found)


def mind(about: str, found: str, mend: str) -> Finding:
    """A finding that may slow a run down or surprise its user."""
    return Finding(kind="mind", about=about, found=found, mend=mend)


def wrong(about: str, found: str, mend: str) -> Finding:
    """A finding that ends a run, or makes it another than the one that was meant."""
    return Finding(kind="wrong", about=about, found=found, mend=mend)


def section_text(title: str, findings: Sequence[Finding]) -> str:
    """A section as lines: its title, and under it one line for each finding and one for each mend."""
    lines = [title]
    for finding in findings:
        lines.append(f"  {finding.kind:<5}  {finding.about}: {finding.found}")
        if finding.mend:
            lines.append(f"         mend: {finding.mend}")
    return "\n".join(lines)


def counts_of(sections: Sections) -> dict[Kind, int]:
    """Number of findings of each kind."""
    counts = Counter(finding.kind for findings in sections.values() for finding in findings)
    return {kind: counts[kind] for kind in KINDS}


def summary_text(sections: Sections) -> str:
    """The last line: the number of findings of each kind."""
    return ", ".join(f"{number} {kind}" for kind, number in reversed(counts_of(sections).items()))


def record_of(sections: Sections) -> dict[str, Any]:
    """All findings for a program."""
    return {
        "findings": [
            {"section": title, **asdict(finding)} for title, findings in sections.items() for finding in findings
        ],
        "counts": counts_of(sections),
    }
