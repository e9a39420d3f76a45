"""`--backend onnx`: exports an ONNX model that references the engine's weight files; runs on
onnxruntime."""

from .backend import BACKEND as BACKEND
