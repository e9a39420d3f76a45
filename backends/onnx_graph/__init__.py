"""`--backend onnx`: the network as an ONNX model beside its weights, run by onnxruntime."""

from .backend import BACKEND as BACKEND
