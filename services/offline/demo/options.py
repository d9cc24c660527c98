"""What a person may choose about the demo, and where it then keeps its files."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_STATE_DIR = Path(".freshet")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What a person may choose; defaults are the replay protocol's."""

    dataset: str = "auto"
    events: int = 24_000
    rate_per_s: float = 200.0
    epochs: int | None = None
    seed: int = 0
    state_dir: Path = DEFAULT_STATE_DIR
    keep: bool = False
    reuse: bool = False
    port_offset: int = 0

    @property
    def folder(self) -> Path:
        """Where the summary, the plots and the replay's record go."""
        return self.state_dir / "demo"

    @property
    def bundle(self) -> Path:
        return self.state_dir / "bundle"
