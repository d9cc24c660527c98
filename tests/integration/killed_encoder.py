"""The encoder's consumer with its real Kafka and Redis adapters and a model in memory, as a process to be killed.

`python killed_encoder.py <kafka> <redis url> <interactions topic> <forgets topic> <group>` applies until it is stopped.
"""

import sys
import threading
from pathlib import Path

# This checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.encoder import HashEncoder
from prometheus_client import CollectorRegistry

from services.contracts.topic_reader import TopicReader
from services.encoder.adapters.kafka_outbox import KafkaOutbox
from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.forget_users import ForgetUsers
from services.encoder.metrics import EncoderMetrics
from services.platform.stream.kafka import BulkProducer
from services.user_state.forgetting import ForgetTopic, Forgotten, KnownForgets
from services.user_state.writer import StateWriter

VOCABULARY = Vocabulary(
    model_version="model-1",
    item_index={f"item-{number}": number for number in range(50)},
    user_index={},
    max_history=8,
)
KEY = b"key"


def build(kafka: str, redis_url: str, topic: str, forgets_topic: str, group: str) -> Consumer:
    """Small polls, so that there is much to be interrupted."""
    outbox, store, encoder = KafkaOutbox(BulkProducer(kafka)), StateWriter(redis_url), HashEncoder()
    forgotten = Forgotten()
    return Consumer(
        stream=TopicReader(kafka, topic, group_id=group),
        handler=ApplyRecords(
            store=store,
            outbox=outbox,
            encoder=encoder,
            vocabulary=VOCABULARY,
            pseudonym_key=KEY,
            forgotten=forgotten,
        ),
        forgets=ForgetUsers(
            known=KnownForgets(
                topic=ForgetTopic(TopicReader(kafka, forgets_topic, group_id=group)), forgotten=forgotten
            ),
            store=store,
            outbox=outbox,
            encoder=encoder,
            model_version=VOCABULARY.model_version,
            pseudonym_keys=(KEY,),
            reader=group,
        ),
        metrics=EncoderMetrics(CollectorRegistry()),
        limits=ConsumerLimits(poll_ms=20, min_records=8, max_records=8, commit_every_s=0.0),
    )


if __name__ == "__main__":
    build(*sys.argv[1:]).start()
    threading.Event().wait()
