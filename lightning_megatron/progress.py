"""A bar on stderr for work that takes more than five seconds, where somebody watches at a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Shorter work needs no bar.
_DELAY_SECONDS = 5.0


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that is called with how much is done, and of how much; the bar shows both and the time left.

    The first call says how much there is in all.
    """
    # It takes as long to import as all of `--help`.
    from tqdm import tqdm

    is_watched = sys.stderr.isatty()
    with tqdm(desc=what, unit=f" {unit}", delay=_DELAY_SECONDS, file=sys.stderr, disable=not is_watched) as bar:

        def watch(num_done: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_done - bar.n)

        yield watch


def watched_ranges(num_all: int, size: int, *, what: str, unit: str) -> Iterator[range]:
    """Ranges of `size` numbers each, the last of the rest, from 0 to before `num_all`; a bar shows what is done."""
    with progress_bar(what, unit) as watch:
        for first in range(0, num_all, size):
            own = range(first, min(first + size, num_all))
            yield own
            watch(own.stop, num_all)
