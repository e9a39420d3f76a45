"""Shared by ONNX and TensorRT: lowers each op once, to tensor primitives that both support."""
