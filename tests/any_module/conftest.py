"""The fork server of this room has the models of transformers loaded before `certify` would start one without."""

import pytest

from tests.harness.ranks import start_server


@pytest.fixture(autouse=True, scope="session")
def loaded_server() -> None:
    """Starts the server that the harness's ranks come from."""
    start_server()
