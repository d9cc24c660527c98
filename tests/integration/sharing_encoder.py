"""The encoder's consumer as the process has it, on real Kafka and Redis, with a model in memory; settings as always.

A line on its standard input lets it begin; SIGTERM ends it in order.
"""

import signal
import sys
import threading
from pathlib import Path

# This checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.encoder import HashEncoder
from killed_encoder import VOCABULARY
from prometheus_client import CollectorRegistry

from services.encoder.bootstrap import make_stream, state_writer
from services.encoder.config import EncoderSettings
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.platform.config import load_settings

if __name__ == "__main__":
    settings = load_settings(EncoderSettings)
    metrics = EncoderMetrics(CollectorRegistry())
    consumer = make_stream(settings, state_writer(settings), Model(VOCABULARY, HashEncoder()), metrics).consumer
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    sys.stdin.readline()
    consumer.start()
    ended.wait()
    consumer.stop()
