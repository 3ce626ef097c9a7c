"""Passes on the exported ONNX model: model in, model out, without torch."""
