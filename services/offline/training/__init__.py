"""Training: from interactions to a model bundle.

`train` fits a model, `run.run_training` runs the whole job, `export.export_bundle` writes the encoder as ONNX.
"""

from services.offline.training.loop import Step, TrainReport, train
from services.offline.training.presets import PRESETS, TrainConfig, preset

__all__ = ["PRESETS", "Step", "TrainConfig", "TrainReport", "preset", "train"]
