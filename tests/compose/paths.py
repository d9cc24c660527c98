"""The services of the same tree, and the client of the integration tests; imported for its effect."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / place) for place in ("..", "integration")]
