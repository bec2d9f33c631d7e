"""The ranks live as long as the tests of this folder."""

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    started = Ranks()
    yield started
    started.close()
