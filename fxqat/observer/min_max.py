"""MinMax: the smallest and the largest value seen."""

from __future__ import annotations

from fxqat.observer.base import ObserverBase


class MinMaxObserver(ObserverBase):
    """Keeps the smallest and the largest value of all tensors seen.

    Formula: ``min_val = min over batches of min(x)``, ``max_val = max over batches of max(x)``.
    With ``ema_ratio`` it is ``EMAMinMax``.
    Source: Jacob et al. 2018 (arXiv:1712.05877), section 3.1, for weights.

    Args: as :class:`~fxqat.observer.base.ObserverBase`.

    Example:
        >>> import torch
        >>> from fxqat.scheme import QuantizeScheme
        >>> observer = MinMaxObserver(QuantizeScheme())
        >>> _ = observer(torch.tensor([1.0, 2.0])), observer(torch.tensor([-3.0, 0.0]))
        >>> observer.min_val.item(), observer.max_val.item()
        (-3.0, 2.0)
    """
