"""The deployed copy: the prepared model as it computes when it is deployed.

1. on the CPU, in eval mode, without gradients;
2. every fake-quant on, every observer off;
3. its graph only has what runs in eval mode;
4. inputs that the file takes raw are normalized first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.deployed import Normalize
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.raw_inputs import normalize_inputs
from fxqat.utils.train_eval_graph import select_mode


def deployed_copy(gm: QuantGraphModule, normalizers: Sequence[Normalize | None] = ()) -> QuantGraphModule:
    """The deployed copy of a prepared model.

    Args:
        gm: the prepared model; not changed.
        normalizers: what each input passes through first, None for nothing; empty if no input is raw.
    """
    computed = {
        id(buffer): buffer.detach().clone() for buffer in gm.buffers() if not buffer.is_leaf
    }  # torch copies none
    work = copy.deepcopy(gm, computed).cpu().eval().requires_grad_(False)
    for _, quant in named_fake_quants(work):
        quant.observer_enabled = False
        quant.fake_quant_enabled = True
    select_mode(work.graph, training=False)
    normalize_inputs(work, normalizers)
    work.recompile()
    return work
