"""Data sets (MovieLens, sequences without times, tables, the simulator) as `Interactions`.

This package imports no other offline package.
"""

from .columns import TableOptions
from .interactions import Interactions, from_columns
from .load import load_dataset, read_data
from .locate import DatasetUnavailableError
from .order import OrderTest, order_test
from .sequences import SEQUENCE_NAMES, read_sequences
from .simulator import SimulatorConfig, simulate
from .splits import GlobalTimeSplit, MeasuredSplit, global_time_split, leave_one_out_split, time_split
from .table import read_table
from .validation import Finding, Reading, account_text

__all__ = [
    "SEQUENCE_NAMES",
    "DatasetUnavailableError",
    "Finding",
    "GlobalTimeSplit",
    "Interactions",
    "MeasuredSplit",
    "OrderTest",
    "Reading",
    "SimulatorConfig",
    "TableOptions",
    "account_text",
    "from_columns",
    "global_time_split",
    "leave_one_out_split",
    "load_dataset",
    "order_test",
    "read_data",
    "read_sequences",
    "read_table",
    "simulate",
    "time_split",
]
