"""Freshet: one Python package, one folder per deployed process. See CONTRIBUTING.md."""

import os

# ONNX Runtime on Linux sends its maker usage figures and keeps a device id, unless this is set before it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
