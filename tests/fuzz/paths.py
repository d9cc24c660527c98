"""Where the scenes lie that targets are built of, and the services of the same tree; imported for its effect."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / place) for place in ("..", "", "unit", "unit/state_cases", "fuzz")]
