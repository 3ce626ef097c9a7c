"""Read, run and check .tflite files: bytes in, bytes out, no torch."""
