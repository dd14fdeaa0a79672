"""Where tensors lie, and on which stream of a GPU they are worked on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Residence", "of"]


class Residence(NamedTuple):
    """A device and the stream that orders what is done there.

    Args:
        device_type: `cpu`, `cuda`, or what else torch knows.
        ordinal: Number of the GPU; 0 in host memory.
        stream: The current stream of this thread as an integer; 0 is the legacy default stream.
    """

    device_type: str
    ordinal: int
    stream: int


def of(tensor: torch.Tensor) -> Residence:
    """Where a tensor lies, and the stream that torch gives this thread's work on it to."""
    device = tensor.device
    if device.type != "cuda":
        return Residence(device.type, 0, 0)
    import torch

    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return Residence("cuda", ordinal, torch.cuda.current_stream(device).cuda_stream)
