"""The gateway's handlers over memory, for tests that change nothing of how they are made."""

import pytest
from gateway_scene import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()
