"""MSE: the range with the smallest quantization error."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import choose_qparams, fake_quantize, min_max_of
from fxqat.observer.base import ObserverBase, weighted_samples
from fxqat.scheme import QuantizeScheme

CACHED_VALUES = 2**17
"""Values of a temporary tensor that fit into the cache."""


class MSEObserver(ObserverBase):
    """Shrinks the min/max range of each batch until the sum of ``|error|**p`` is smallest.

    Formula: ``argmin_r  sum |x - fake_quantize(x; r * min, r * max)|**p`` over a grid of ``num_candidates`` ratios r in
    (0, 1], then a finer grid around the best; per channel for per-channel schemes.
    Source: Banner et al. 2019 (arXiv:1810.05723), section 2.1, the clipping value of least mean squared error; Nagel et
    al. 2021 (arXiv:2106.08295), section 3.1, the grid search and the exponent.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        num_candidates: size of the coarse grid.
        p: exponent of the error; above 2 it clips less, which costs a network less accuracy.
        max_samples: a per-tensor search uses about this many values, see :func:`~fxqat.observer.base.weighted_samples`.
        ema_ratio: weight of the past in a moving average over batches, in [0, 1); None takes their union.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        num_candidates: int = 40,
        p: float = 2.4,
        max_samples: int = 65536,
        ema_ratio: float | None = None,
    ) -> None:
        super().__init__(scheme, axis, num_channels, ema_ratio)
        if num_candidates < 2 or p <= 0 or max_samples < 1:
            raise ConfigError(
                f"{self.name}: needs num_candidates >= 2, p > 0 and max_samples >= 1, got "
                f"num_candidates={num_candidates}, p={p}, max_samples={max_samples}"
            )
        self.num_candidates = num_candidates
        self.p = p
        self.max_samples = max_samples

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range of least error of one tensor."""
        low, high = min_max_of(x, self.axis)
        samples, weights = weighted_samples(x, self.axis, self.max_samples)
        low, high = low.reshape(-1), high.reshape(-1)
        # a few rows at a time, so that their values stay in the cache for all candidates
        rows = max(1, CACHED_VALUES // samples.shape[1])
        parts = zip(samples.split(rows), low.split(rows), high.split(rows), strict=True)
        best = torch.cat([self._search(*part, weights) for part in parts])
        shape = self.min_val.shape
        return (low * best).reshape(shape), (high * best).reshape(shape)

    def _search(self, samples: Tensor, low: Tensor, high: Tensor, weights: Tensor | None) -> Tensor:
        """The best ratio of every row. ``samples``: (rows, n); ``low``, ``high``: (rows,); ``weights``: (1, n)."""
        step = 1.0 / self.num_candidates
        coarse = high.new_tensor([step * (i + 1) for i in range(self.num_candidates)])
        best = self._best_ratio(samples, low, high, weights, coarse.unsqueeze(1).expand(-1, len(high)))
        fine = [(best + step * offset).clamp(step / 2, 1.0) for offset in (-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6)]
        return self._best_ratio(samples, low, high, weights, torch.stack(fine))

    def _best_ratio(self, samples: Tensor, low: Tensor, high: Tensor, weights: Tensor | None, ratios: Tensor) -> Tensor:
        """The ratio of least error in each row. ``ratios``: ``(candidates, rows)``."""
        scheme = self.scheme
        errors = []
        for scale, zero_point in zip(*choose_qparams(low * ratios, high * ratios, scheme), strict=True):
            x_hat = fake_quantize(samples, scale, zero_point, scheme.quant_min, scheme.quant_max, axis=0)
            error = x_hat.sub_(samples)
            error = error.square_() if self.p == 2 else error.abs_().pow_(self.p)
            errors.append((error if weights is None else error.mul_(weights)).sum(1))
        pick = torch.stack(errors).argmin(0)
        return ratios.gather(0, pick.unsqueeze(0)).squeeze(0)
