"""The devices of tests that only a GPU can answer: each runs on the CPU too, so that it is known to run."""

import pytest

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
