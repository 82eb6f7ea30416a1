"""A run that cannot end says why, and leaves nothing behind."""

from typing import Any
from unittest import mock

import pytest

from lightning_megatron.trainer.setup import metric_sync
from tests.harness.ranks import on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


def fail(*_: Any) -> None:
    raise ValueError("its own")


@on_ranks(1, init=False)
def test_what_fails_as_a_run_ends_is_told() -> None:
    # Lightning ends a run again whose end has failed.
    with (
        mock.patch.object(metric_sync, "restore_metrics", fail),
        pytest.raises(ValueError, match="its own"),
    ):
        make_trainer(Layout(microbatches=2), max_epochs=1).fit(Small(), Data())
    make_trainer(Layout(microbatches=2), max_epochs=1).fit(Small(), Data())
