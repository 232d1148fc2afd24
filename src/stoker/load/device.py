"""Batches on a device. The one home of torch in the load stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stoker.load.batch import Batch


def as_tensors(batch: Batch) -> Batch:
    """The arrays of a batch as tensors over the same memory."""
    if isinstance(batch, dict):
        return {name: _tensor(value) for name, value in batch.items()}
    made: Batch = _tensor(batch)
    return made


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) for one in value):
        same = all(one.shape == value[0].shape for one in value)
        return torch.stack(value) if same else value
    return value
