"""Two tasks in turns: who runs when, what happens where one fails, and that outside of it nothing waits."""

import threading

import pytest
import torch

from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap


def overlap() -> ForwardBackwardOverlap:
    return ForwardBackwardOverlap(torch.device("cpu"))


def test_turns_change_where_a_task_gives_way_and_nowhere_else() -> None:
    turns, events = overlap(), list[str]()

    def task(name: str, parts: int) -> None:
        for part in range(parts):
            events.append(f"{name}{part} begins")
            events.append(f"{name}{part} ends")
            turns.yield_to_peer()

    turns.run(lambda: task("a", 2), lambda: task("b", 4))
    order = ["a0", "b0", "a1", "b1", "b2", "b3"]
    assert events == [f"{part} {what}" for part in order for what in ("begins", "ends")]


def test_a_task_that_never_yields_runs_to_its_end() -> None:
    turns, events = overlap(), list[str]()
    turns.run(lambda: events.append("first"), lambda: events.append("second"))
    assert events == ["first", "second"]


def test_outside_of_a_run_giving_way_waits_for_nobody() -> None:
    turns = overlap()
    turns.yield_to_peer()
    turns.run(turns.yield_to_peer, turns.yield_to_peer)
    turns.yield_to_peer()


def test_a_second_thread_of_the_second_task_gives_way_for_it() -> None:
    turns, events = overlap(), list[str]()

    def second() -> None:
        # As autograd runs backwards of a GPU.
        worker = threading.Thread(target=lambda: (events.append("b"), turns.yield_to_peer(), events.append("d")))
        worker.start()
        worker.join()

    def first() -> None:
        events.append("a")
        turns.yield_to_peer()
        events.append("c")

    turns.run(first, second)
    assert events == ["a", "b", "c", "d"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_where_one_task_fails_its_error_is_raised_and_the_other_abandoned(failing: int, is_at_once: bool) -> None:
    turns, events = overlap(), list[str]()

    def fails() -> None:
        if not is_at_once:
            turns.yield_to_peer()
        raise ValueError("broken")

    def goes_on() -> None:
        try:
            for _ in range(3):
                turns.yield_to_peer()
            events.append("went on")
        finally:
            events.append("cleaned up")

    tasks = (fails, goes_on) if failing == 0 else (goes_on, fails)
    with pytest.raises(ValueError, match="broken"):
        turns.run(*tasks)
    assert "went on" not in events
    # A second task that had not begun has nothing to clean up.
    assert events == ([] if failing == 0 and is_at_once else ["cleaned up"])
    turns.run(lambda: events.append("again"), lambda: None)
    assert events[-1] == "again"
