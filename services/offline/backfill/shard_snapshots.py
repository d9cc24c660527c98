"""Write a snapshot of one shard of the catalogue before the process that will serve it starts.

This job reads `index-deltas` and `items` to their ends and encodes the items, with the candidates process's code. The
candidates process later continues from the snapshot in FRESHET_CANDIDATES_SNAPSHOTS.
"""

import time
from dataclasses import dataclass

from services.candidates.config import CandidatesSettings
from services.offline.backfill.scoring import caught_up
from services.platform.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSnapshot:
    """The result. path: "" if nothing changed and no item was encoded.

    position: offset in `index-deltas`; -1 if nothing changed since the bundle.
    """

    shard: str
    items: int
    position: int
    path: str


def write_shard_snapshot(settings: CandidatesSettings) -> ShardSnapshot:
    """Write a snapshot of the settings' shard into the shard's folder below `settings.snapshots`.

    Raises: InvalidRequest if there is no snapshot folder, or if `vote_neighbours` is not 0; BundleError, ConfigError,
    MemoryError, DependencyUnavailable.
    """
    folder = settings.snapshot_folder
    if folder is None or settings.vote_neighbours:
        raise InvalidRequest.of(
            "FRESHET_CANDIDATES_VOTE_NEIGHBOURS", settings.vote_neighbours, "0: snapshots lack remembered interactions"
        )
    live = caught_up(settings)
    served = live.catalogue.served
    path = ""
    main = served.version.main
    if served.position >= 0 or (main is not None and main.segment.codes):
        path = str(live.catalogue.capture(written_s=round(time.time()))(folder))
    return ShardSnapshot(shard=str(settings.shard), items=served.version.num_items, position=served.position, path=path)
