"""Turns float32 weights into the graph's type and notes what the type cannot hold."""

from __future__ import annotations

import numpy as np

_LARGEST = 65_504.0  # of float16


class Precision:
    """Casts weights; remembers the tensors whose values left float16's range.

    Values beyond the range are stored as the largest one of their sign: an infinity would turn
    every logit into NaN.
    """

    def __init__(self) -> None:
        self._beyond: dict[str, tuple[int, float]] = {}  # label -> how many, the largest
        self.flushed = 0  # values other than 0 that became 0

    @property
    def overflowed(self) -> list[str]:
        """Labels of tensors with values beyond +-65504."""
        return list(self._beyond)

    def cast(self, label: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """values: float32, the tensor `label` of the source or a run of its rows."""
        if dtype != np.float16:
            return values.astype(dtype, copy=False)
        # max and min, not abs: no second copy of a large matrix.
        largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
        if not largest <= _LARGEST:  # NaN too
            values = self._clipped(label, values, largest)
        half = values.astype(np.float16)
        self.flushed += int(np.count_nonzero(values)) - int(np.count_nonzero(half))
        return half

    def _clipped(self, label: str, values: np.ndarray, largest: float) -> np.ndarray:
        count, before = self._beyond.get(label, (0, 0.0))
        beyond = int(np.count_nonzero(~(np.abs(values) <= _LARGEST)))
        self._beyond[label] = (count + beyond, max(before, largest))
        clipped: np.ndarray = np.clip(values, -_LARGEST, _LARGEST)
        return clipped

    def warnings(self) -> list[str]:
        """One line per tensor."""
        return [
            f"warning: {label} leaves the fp16 range: {count} values beyond 65504 (largest "
            f"{largest:.4g}) are stored as 65504; use --dtype fp32 if answers are bad"
            for label, (count, largest) in self._beyond.items()
        ]
