"""A program that runs one .tflite file in LiteRT's interpreter; :func:`fxqat.tflite.run_tflite.run_tflite` starts it.

It reads ``(content, inputs, whether with reference kernels, threads)`` as a pickle from stdin, and writes the list of
outputs, or the text of LiteRT's error, to stdout. It imports nothing of fxqat, and so starts in a fifth of a second.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def main() -> None:
    """Run the file."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what LiteRT prints is no answer
    given = pickle.load(sys.stdin.buffer)  # noqa: S301  from the process that started this one
    try:
        answer: list[np.ndarray] | str = _outputs(*given)
    except (RuntimeError, ValueError) as error:
        answer = str(error)
    with answers:
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)


def _outputs(content: bytes, inputs: list[np.ndarray], reference: bool, threads: int) -> list[np.ndarray]:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = OpResolverType.BUILTIN_REF if reference else OpResolverType.AUTO
    interpreter = Interpreter(model_content=content, num_threads=threads, experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, in which nothing is to be imported
    main()
