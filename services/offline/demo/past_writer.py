"""Write a data set's past to `interactions` while the demo trains; the import continues from there, also if this dies.

A process of its own with the lowest priority, so that training does not wait for it: DATASET KAFKA.
"""

import os
import sys

from services.offline.backfill.jobs import write_past
from services.offline.datasets import global_time_split, load_dataset
from services.offline.demo.plan import HELD_OUT_SHARE

if __name__ == "__main__":
    os.nice(19)
    dataset, kafka = sys.argv[1:]
    write_past(global_time_split(load_dataset(dataset), 1 - HELD_OUT_SHARE).train, kafka=kafka)
