"""The topic `exposures`: what was shown to whom. Nothing writes it yet."""

from services.common.stream.topic import Topic

EXPOSURES = "exposures"
_DAY_MS = 24 * 3600 * 1000
TOPIC = Topic(name=EXPOSURES, settings={"retention.ms": str(90 * _DAY_MS)})
