"""The QAT layer: a weighted layer that simulates its deployed weight, BatchNorm and bias."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.straight_through import DynamicQuantizeSTE, rounded_again
from fxqat.nn.bias import fake_quantize_bias, floor_for, round_bias, weight_scale_floor
from fxqat.nn.fold import fold_bn, grid_factor
from fxqat.nn.kept_weights import deployed
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.nn.weighted import WeightedLayer, weighted_layer, weighted_op
from fxqat.utils.tensors import widened
from fxqat.utils.torch_compat import BatchNorm, tensor_version

BN_TRAIN = "train"
BN_FREEZE = "freeze"


class QATLayer(QuantizedLayer):
    """A weighted layer, with fused BatchNorm and activation, and fake-quant of its weight.

    It always quantizes the folded weight ``W * k`` (see ``fxqat.nn.fold``), to the same integers in every mode. In half
    precision, folding and quantization are computed in float32, and the layer itself in the type of its weight.

    1. eval, or no BatchNorm, or ``bn_mode="freeze"``: ``conv(x, fq(W * k)) + fq_int32(folded bias)``. This is the
       deployed layer. The gradients of gamma and beta pass through the folding.
    2. training with ``bn_mode="train"``: ``BN(conv(x, fq(W * k) / k))`` with the statistics of the batch. The division
       by k costs nothing: the quantizer's grid is divided instead. Without quantization this is exactly the float
       layer. The bias belongs to BatchNorm here and stays float.
    3. training with ``bn_mode=N``: as 2 for the first N training steps, then with frozen running statistics. The switch
       is a ``torch.where`` on the statistics: no branch, no device sync.
    4. training after somebody has taken the momentum of BatchNorm away, as ``torch.optim.swa_utils.update_bn`` does: as
       2 for every ``bn_mode``. Statistics that were reset start with those of the float layer on the first batch.

    Args:
        layer: the float layer; the QAT layer uses its parameters, not copies of them.
        bn: the BatchNorm after the layer, or None.
        activation: the activation after both, or None.
        weight_fake_quant: fake-quant of the (folded) weight.
        bn_mode: ``"train"``, ``"freeze"`` or the number of training steps after which the statistics are frozen.

    Source: Krishnamoorthi 2018 (arXiv:1806.08342), section 3.2.2, for folding with batch statistics.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    bn_steps: Tensor

    def __init__(
        self,
        layer: WeightedLayer,
        bn: BatchNorm | None,
        activation: nn.Module | None,
        weight_fake_quant: FakeQuantizeBase,
        bn_mode: str | int = BN_TRAIN,
    ) -> None:
        super().__init__()
        self.op = weighted_op(layer)
        self.layer_type = self.op.layer.__name__
        self._take_tensors(layer)
        self.bn = bn
        self.activation = activation
        self.weight_fake_quant = weight_fake_quant
        self.bn_mode = bn_mode
        self.training = layer.training
        self.cumulative = bn is not None and bn.momentum is None
        if bn is not None and isinstance(bn_mode, int):
            self.register_buffer("bn_steps", torch.zeros((), dtype=torch.int64, device=layer.weight.device))

    def _take_tensors(self, layer: WeightedLayer) -> None:
        self.weight, self.bias = layer.weight, layer.bias  # type: ignore[assignment]  # torch declares them as tensors

    def forward(
        self, x: Tensor, input_fake_quant: FakeQuantizeBase | None = None, dynamic_input: str | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: the input, quantized or not, of any shape that the layer takes.
            input_fake_quant: the fake-quant that produced x, None if x is float; the bias scale depends on it.
            dynamic_input: if x is quantized at run time, by its own range, the name of its integers in the file; it
                is rounded when the weight is.

        Raises:
            ConfigError: Linear and BatchNorm1d are fused, and the input does not have 2 dimensions.
        """
        if self.bn is not None and self.op.is_linear and x.dim() != 2:
            raise ConfigError(
                f"Linear and BatchNorm1d are fused, which needs an input (batch, features), but the input has "
                f"{x.dim()} dimensions {tuple(x.shape)}: BatchNorm1d then normalizes dimension 1, not the features. "
                "Add ('linear', 'batch_norm1d') to extra_fuse_dict['exclude_fusion_pattern']."
            )
        if dynamic_input is not None and self.weight_fake_quant.fake_quant_enabled:
            x = DynamicQuantizeSTE.apply(x)
        measured_anew = self.bn is not None and self._is_measured_anew(self.bn)
        if measured_anew:
            self._start_statistics(x)
        if self.bn is not None and self.training and (measured_anew or self.bn_mode != BN_FREEZE):
            y = self._normalize(self._apply_op(x, self._unfolded_weight(self.bn), self.bias), self.bn)
        else:
            quants = (self.weight_fake_quant, input_fake_quant)
            tensors = deployed(self, quants, lambda: self._deployed_tensors(input_fake_quant), self.bn)
            y = self._apply_op(x, *tensors)
        if self.activation is not None:
            y = self.activation(y)
        return y

    def _is_measured_anew(self, bn: BatchNorm) -> bool:
        # torch.optim.swa_utils.update_bn resets the statistics, and averages them over batches: without a momentum
        return bn.training and bn.momentum is None and not getattr(self, "cumulative", True)

    @torch.no_grad()
    def _start_statistics(self, x: Tensor) -> None:
        bn = self.bn
        if bn is None or bn.running_mean is None or bn.running_var is None or bn.num_batches_tracked is None:
            return
        if not bn.num_batches_tracked:  # the scale of the weight is for the weight folded by real statistics
            y = widened(self._apply_op(x, self.weight, self.bias))
            variance, mean = torch.var_mean(y, [d for d in range(y.dim()) if d != 1])
            bn.running_mean.copy_(mean)
            bn.running_var.copy_(variance)

    def _dtype(self) -> torch.dtype:
        return self.weight.dtype

    def _apply_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = self._dtype()
        with nullcontext() if isinstance(weight, nn.Parameter) else rounded_again(weight):
            return self.op(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with BatchNorm folded in, not quantized; those of a layer in half precision are float32."""
        weight, bias = widened(self.weight), None if self.bias is None else widened(self.bias)
        return (weight, bias) if self.bn is None else fold_bn(self.op, weight, bias, self.bn)

    def weight_values(self) -> tuple[Tensor]:
        """The folded weight."""
        return (self.folded()[0],)

    def weight_tensors(self) -> list[list[Tensor]]:
        """The weight, computed if it is."""
        return [[self.weight]]

    def float_layer(self) -> WeightedLayer:
        """The plain layer, without BatchNorm and activation; it shares its parameters with this layer."""
        layer = weighted_layer(self.op.layer, self.op.options, self.weight, self.bias)
        return layer.train(self.training)

    def deployed_scales(
        self, bias: Tensor | None, input_fake_quant: FakeQuantizeBase | None
    ) -> tuple[Tensor, Tensor | None]:
        """The scales in use for weight and bias; a weight scale is raised where the bias would not fit into int32.

        The bias of a weight in blocks stays float: the products of an output have several scales.

        Args:
            bias: the folded bias, ``(out_channels,)``, or None.
            input_fake_quant: the fake-quant of the layer's input, None if that is float.

        Returns:
            ``(weight_scale, bias_scale)``: the first of the shape of the weight's scale; the second ``()`` if that has
            one scale, else ``(out_channels,)``, or None if the bias stays float.
        """
        weight_scale = self.weight_fake_quant.used_scale()
        if bias is None or input_fake_quant is None or self.weight_fake_quant.scheme.block_size is not None:
            return weight_scale, None
        input_scale = input_fake_quant.used_scale()
        floor = floor_for(weight_scale, weight_scale_floor(bias, input_scale), self.op.groups)
        weight_scale = torch.maximum(weight_scale, floor)
        scale = input_scale * weight_scale
        return weight_scale, scale.repeat(self.op.groups) if scale.dim() and self.op.groups > 1 else scale

    def _deployed_tensors(self, input_fake_quant: FakeQuantizeBase | None) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.folded()
        quant = self.weight_fake_quant
        self._observe(weight)
        if not quant.fake_quant_enabled:
            return weight, bias
        quant.follow(weight)
        is_on = input_fake_quant is not None and input_fake_quant.fake_quant_enabled
        if bias is None or input_fake_quant is None or not is_on or quant.scheme.block_size is not None:
            return quant.quantize(weight), bias
        rounding = round_bias(bias, input_fake_quant, quant) if self.op.groups == 1 else None
        if rounding is not None:
            weight_scale, error = rounding
            return quant.quantize(weight, used_scale=weight_scale), bias + error
        weight_scale, bias_scale = self.deployed_scales(bias, input_fake_quant)
        assert bias_scale is not None
        return quant.quantize(weight, used_scale=weight_scale), fake_quantize_bias(bias, bias_scale)

    def _unfolded_weight(self, bn: BatchNorm) -> Tensor:
        quant, weight = self.weight_fake_quant, self.weight
        if not (quant.observer_enabled or quant.fake_quant_enabled):
            return weight
        factor = grid_factor(bn)
        if self.op.groups > 1:  # channels of several groups share a scale, so a scale has no single factor
            wide = self.op.per_output_channel(factor, weight)
            self._observe(weight * wide, statistics_change=True)
            quant.follow(weight * wide)
            return quant.quantize(weight * wide) / wide if quant.fake_quant_enabled else weight
        if quant.observer_enabled:
            wide = self.op.per_output_channel(factor, weight)
            self._observe(weight * wide, statistics_change=True)
        quant.follow(weight, factor)
        return quant.quantize(weight, factor=factor) if quant.fake_quant_enabled else weight

    def _observe(self, weight: Tensor, statistics_change: bool = False) -> None:
        """Show the folded weight to the observer, unless its tensors are unchanged since the last time.

        Args:
            weight: the folded weight.
            statistics_change: BatchNorm updates its statistics in this call. torch's kernels do not count that in the
                version of the tensor (pytorch issue 13402).
        """
        if self.weight_fake_quant.observer_enabled:
            sources = () if statistics_change else self._weight_sources()
            self.weight_fake_quant.observe_changed(weight, tuple(map(tensor_version, sources)))

    def _weight_sources(self) -> Sequence[Tensor]:
        """The tensors that determine the folded weight; none if they are not known."""
        of_bn = () if self.bn is None else (self.bn.running_var, self.bn.weight)
        return [tensor for tensor in (self.weight, *of_bn) if tensor is not None]

    def _normalize(self, y: Tensor, bn: BatchNorm) -> Tensor:
        if not isinstance(self.bn_mode, int) or not bn.training or self._is_measured_anew(bn):
            normalized: Tensor = bn(y)
            return normalized
        assert bn.running_mean is not None  # the fuse pass fuses no other BatchNorm
        assert bn.running_var is not None
        frozen = self.bn_steps >= self.bn_mode
        z = widened(y)
        variance, mean = torch.var_mean(z, [d for d in range(z.dim()) if d != 1], correction=0)
        old_mean, old_variance = widened(bn.running_mean.clone()), widened(bn.running_var.clone())
        with torch.no_grad():
            self.bn_steps.add_(1)
            count = z.numel() // z.shape[1]
            unbiased = variance * (count / max(1, count - 1))
            momentum = bn.momentum or 0.0
            bn.running_mean.copy_(torch.where(frozen, old_mean, torch.lerp(old_mean, mean, momentum)))
            bn.running_var.copy_(torch.where(frozen, old_variance, torch.lerp(old_variance, unbiased, momentum)))
            if bn.num_batches_tracked is not None:
                bn.num_batches_tracked.add_(torch.where(frozen, 0, 1))
        mean = torch.where(frozen, old_mean, mean)
        factor = torch.rsqrt(torch.where(frozen, old_variance, variance) + bn.eps)
        if bn.weight is not None:
            factor = factor * bn.weight
        shift = -mean * factor if bn.bias is None else bn.bias - mean * factor
        return torch.addcmul(_channels(shift, z), z, _channels(factor, z)).to(y.dtype)

    def extra_repr(self) -> str:
        """The float layer's type, the weight's shape and the BatchNorm mode, for printing."""
        return f"{self.layer_type}, weight={tuple(self.weight.shape)}" + (f", bn={self.bn_mode}" if self.bn else "")


def _channels(values: Tensor, y: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (y.dim() - 2))
