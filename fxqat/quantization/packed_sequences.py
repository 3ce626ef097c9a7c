"""Packed sequences become padded ones, with the number of steps of each sample.

torch's recurrent modules read samples of several lengths packed. ONNX has no packed sequence, but its recurrent
operators take lengths. The graph of a model shows what ``pack_padded_sequence`` and ``pad_packed_sequence`` do inside:

1. the operations that pack become one call of ``pack_padded_sequence``;
2. a recurrent module that reads this call is split into layers with lengths
   (``fxqat.quantization.split_recurrent``), and another such call packs its output;
3. the operations that pad this call become the padded tensor: with as many steps as the longest sample has, or as
   ``total_length`` says.

Any other operation still reads the packed sequence, and the model cannot be exported.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fxqat.nn.recurrent import step_mask
from fxqat.utils.fx_graph import NodeTracer, argument
from fxqat.utils.node_meta import SHAPE, VALUE
from fxqat.utils.torch_compat import PACK, PAD


class Packed(NamedTuple):
    """The arguments of a call of ``pack_padded_sequence``."""

    values: fx.Node
    lengths: fx.Node
    batch_first: bool
    enforce_sorted: bool


def packed_by(node: object) -> Packed | None:
    """What a node packs; None if it does not."""
    if not isinstance(node, fx.Node) or node.target is not pack_padded_sequence:
        return None
    return Packed(*node.args)  # type: ignore[arg-type]  # such calls are written here only


def gather_packing(graph: fx.Graph) -> None:
    """Write what packs as one call (case 1)."""
    for node in list(graph.nodes):
        packed = _gathered(node) if node.target is PackedSequence else None
        if packed is not None:
            with graph.inserting_before(node):
                call = graph.call_function(pack_padded_sequence, packed)
            call.meta = dict(node.meta)
            _replace(node, call)


def pad_directly(graph: fx.Graph) -> None:
    """Read the padded tensors instead of packing them and padding them again (case 3)."""
    for node in list(graph.nodes):
        packed = _padded_again(node) if node.target is PAD else None
        if packed is None:
            continue
        padded, lengths = ([user for user in node.users if user.args[1] == place] for place in range(2))
        if not packed.enforce_sorted:  # they are read in the order of the samples
            padded, lengths = ([reader for item in items for reader in item.users] for items in (padded, lengths))
            if not all(_is_attribute(_indices(reader), "unsorted_indices") for reader in (*padded, *lengths)):
                continue
        for reader in lengths:
            _replace(reader, packed.lengths)
        for reader in padded:
            with graph.inserting_before(reader):
                _replace(reader, _padded(node, packed, reader))
    for node in reversed(list(graph.nodes)):
        if packed_by(node) is not None and not node.users:
            graph.erase_node(node)


def traced_mask(x: fx.Proxy, lengths: fx.Proxy) -> Any:
    """Whether a sample has a step: a proxy of ``(T, N, 1)``, of ``x`` ``(T, N, ...)`` and lengths ``(N,)``."""
    mask = x.tracer.create_proxy("call_function", step_mask, (x, lengths), {})
    mask.node.meta[VALUE] = "tensor"
    return mask.unsqueeze(2)


def _gathered(node: fx.Node) -> Packed | None:
    """What a packed sequence is made of, if ``pack_padded_sequence`` made it."""
    order = argument(node, 2, "sorted_indices")
    source = _source_of_first(argument(node, 0, "data"), PACK)
    if source is None:
        return None
    given: Any = source.args
    values, lengths, batch_first = given
    if order is not None:  # the samples were sorted by their lengths
        sorting = _source_of_first(lengths, torch.sort)
        if sorting is None or not _is_method(values, "index_select") or values.args[2] is not order:
            return None
        values, lengths = values.args[0], sorting.args[0]
    return Packed(values, _without_list(lengths), bool(batch_first), order is None)


def _without_list(lengths: fx.Node) -> fx.Node:
    """The lengths without the list of numbers that they became in between."""
    numbers: Any = lengths.args[0] if lengths.target is torch.as_tensor else None
    if not _is_method(numbers, "tolist"):
        return lengths
    with lengths.graph.inserting_before(lengths):
        read = lengths.graph.call_method("to", (numbers.args[0], "cpu", torch.int64))
    read.meta = dict(lengths.meta)
    return read


def _padded_again(node: fx.Node) -> Packed | None:
    """What a call pads that is packed before."""
    data: Any = node.args[0]
    sizes: Any = node.args[1]
    is_sequence = _is_attribute(data, "data") and _is_attribute(sizes, "batch_sizes") and data.args[0] is sizes.args[0]
    return packed_by(data.args[0]) if is_sequence else None


def _padded(node: fx.Node, packed: Packed, reader: fx.Node) -> fx.Node:
    """The padded values, as a reader of them gets them.

    Args:
        node: the call that pads them.
        packed: what it pads.
        reader: the reader.
    """
    given: Any = node.args
    _, _, batch_first, value, total = given
    meta = {key: content for key, content in reader.meta.items() if key not in (SHAPE, VALUE)}

    def meant(made: fx.Node) -> fx.Node:
        made.meta = dict(meta)
        return made

    tracer = NodeTracer(node.graph, meant)
    y: Any = fx.Proxy(packed.values, tracer)
    lengths: Any = fx.Proxy(packed.lengths, tracer)
    y = y.transpose(0, 1) if packed.batch_first else y
    if _is_method(total, "size") and _is_attribute(total.args[0], "batch_sizes"):  # as it is without total_length
        y = tracer.create_proxy("call_function", torch.ops.fxqat.up_to_longest, (y, lengths), {})
    else:
        total = fx.Proxy(total, tracer) if isinstance(total, fx.Node) else total
        y = F.pad(y, (0, 0, 0, 0, 0, total - y.size(0)))
    if value != 0:
        y = y.masked_fill(~traced_mask(y, lengths), value)
    made: fx.Node = (y.transpose(0, 1) if batch_first else y).node
    return made


def _indices(reader: fx.Node) -> object:
    """The indices by which a call picks samples."""
    indices: Any = reader.args[-1]
    return indices.args[0] if _is_method(indices, "cpu") else indices


def _replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of a node read another one, and erase it with all calls that only it has read."""
    old.replace_all_uses_with(new)
    unread = [old]
    while unread:
        node = unread.pop()
        sources = list(node.all_input_nodes)
        node.graph.erase_node(node)
        unread += [it for it in sources if not it.users and it.op in ("call_function", "call_method") and it is not new]


def _source_of_first(node: Any, function: Any) -> fx.Node | None:
    """The call of a function whose first result a node is; None if it is something else."""
    is_item = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0
    source = node.args[0] if is_item else None
    return source if isinstance(source, fx.Node) and source.target is function else None


def _is_method(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def _is_attribute(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and bool(node.args[1] == name)
