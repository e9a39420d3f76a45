"""The part that ONNX and TensorRT share: each op once, in tensor primitives that both have."""
