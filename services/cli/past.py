"""Past interactions into a stack before it goes live: the one call that `freshet import` and the demo share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.offline.datasets import Interactions

if TYPE_CHECKING:
    from services.offline.backfill.bulk_import import ImportReport


def import_interactions(
    past: Interactions,
    *,
    bundle: Path,
    kafka: str,
    redis_url: str,
    inference_server: str,
    attributes: bool = True,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> "ImportReport":
    """Write `past` onto the stream and fill histories, seen items and states; `progress(phase, done, total)`.

    Without `attributes` it teaches items nothing (what a model was trained on is in it already).

    Raises: BundleError; InvalidRequest, PreconditionFailed (the stream holds something else), DependencyUnavailable.
    """
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_import
    from services.offline.backfill.past_interactions import PastInteractions

    settings = EncoderSettings(
        bundle=bundle, kafka_bootstrap=kafka, redis_url=redis_url, inference_server=inference_server
    )
    columns = PastInteractions(
        # Equal data, equal event ids: an import that broke off is found again.
        name=f"{past.name}-{past.fingerprint()}",
        users=past.users,
        items=past.items,
        timestamps=past.timestamps,
        values=past.values,
        types=past.types,
        user_ids=past.user_ids,
        item_ids=past.item_ids,
        type_names=past.type_names,
    )
    return run_import(settings, columns, progress, attributes=attributes)
