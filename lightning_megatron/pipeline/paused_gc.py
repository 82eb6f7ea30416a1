"""`paused_gc`: Python's garbage collector is paused while a plan is made or simulated.

A large plan is millions of objects, none of them garbage: looking for some takes half of the time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """A context, or a decorator of a function, in which no garbage is looked for."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
