"""What tests of commands get: measurements of plans are kept in a folder of these tests."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache that is empty when the tests begin, and that all of a worker share."""
    pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
