"""A run within a process group of its own."""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

Given = ParamSpec("Given")
Result = TypeVar("Result")


def joined_by(backend: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator that joins the ranks of a run until everything that it made is gone, except what it returns.

    A process group that DDP's reducer is the last to hold joins its threads with the interpreter locked, and such a
    thread may be waiting for the interpreter: one run of ten hung so on a busy machine.
    """

    def decorated(run: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(run)
        def joined(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            dist.init_process_group(backend)
            result = run(*args, **kwargs)
            gc.collect()
            dist.destroy_process_group()
            return result

        return joined

    return decorated


joined_by_gloo = joined_by("gloo")
