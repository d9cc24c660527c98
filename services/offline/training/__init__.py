"""Training: from interactions to a model bundle. Batch jobs; no process imports this package.

`train` fits a model, `run_training` (in `run`) runs the whole job, `export_bundle` (in `export`) writes the encoder as
ONNX.
"""

from services.offline.training.loop import Step, TrainReport, train
from services.offline.training.presets import PRESETS, TrainConfig, preset

__all__ = ["PRESETS", "Step", "TrainConfig", "TrainReport", "preset", "train"]
