"""Values that are never negative, as far as the graph shows it."""

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxqat.custom_quantizer.nonnegative import nonnegative_values
from fxqat.nn.fused import FusedLayer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = FusedLayer(nn.Conv2d(3, 4, 1), None, nn.ReLU())
        self.plain = FusedLayer(nn.Conv2d(3, 4, 1))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x):
        positive, signed = self.conv(x), self.plain(x)
        pooled = F.avg_pool2d(F.max_pool2d(positive, 2).flatten(2).reshape(1, 4, 2, 2), 2)
        return {
            "positive": positive,
            "pooled": pooled,
            "up": self.up(pooled),
            "sum": positive + pooled * 2,
            "joined": torch.cat([positive, positive], 1),
            "first": torch.split(positive, 2, 1)[0],
            "softmax": F.softmax(signed, 1),
            "signed": signed,
            "cubic": F.interpolate(pooled, scale_factor=2, mode="bicubic"),
            "less": positive + -1,
            "mixed": torch.cat([positive, signed], 1),
            "difference": positive - pooled,
            "hardswish": F.hardswish(positive),
        }


def test_it_follows_from_the_ops():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    model = Model()
    gm = fx.GraphModule(model, Tracer().trace(model))
    found = nonnegative_values(gm.graph)
    outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    never = {"positive", "pooled", "up", "sum", "joined", "first", "softmax"}
    assert {name for name, node in outputs.items() if node in found} == never
    assert not any(node in found for node in gm.graph.nodes if node.op == "placeholder")
