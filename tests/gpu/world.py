"""Where the checks run: on a GPU, or over the imitated driver with tensors of the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmcache_rs import _native

# Long against any copy here: an order that is not kept shows.
LATE_MS = 20.0


class World:
    """A GPU of torch's."""

    is_imitated = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.native = _native.CudaDevice(self.device.index)
        self._cycles_a_ms = 0.0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it, tensors of `new` are on the GPU."""
        yield

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, on the GPU."""
        return tensor.to(self.device)

    def sync(self) -> None:
        """Waits for everything, copies of ours included."""
        torch.cuda.synchronize()
        self.native.settle()

    def forward(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """A forward pass whose writes come late: the engine's stream is busy before them."""
        torch.cuda._sleep(int(self._cycles() * LATE_MS))
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)

    def read(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """An earlier step that still reads, late."""
        self.forward(to, values)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` and all that it gives to the GPU take; the best of a few."""
        best = float("inf")
        for _ in range(5):
            self.sync()
            begun = time.perf_counter()
            work()
            self.sync()
            best = min(best, time.perf_counter() - begun)
        return best

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory of torch's, to compare with."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def facts(self) -> dict[str, Any]:
        """What ran this."""
        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "driver_cuda": self.native.driver_version,
            "capability": self.native.capability,
            "imitated": self.is_imitated,
            **{key: str(value) for key, value in _native.build_info().items()},
        }

    def _cycles(self) -> float:
        if not self._cycles_a_ms:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(10_000_000)
            end.record()
            torch.cuda.synchronize()
            self._cycles_a_ms = 1e7 / start.elapsed_time(end)
        return self._cycles_a_ms


class ImitatedWorld(World):
    """The imitated driver: proves that the checks work, and no figure."""

    is_imitated = True

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fake_cuda"))
        from imitated import Imitated

        self.device = torch.device("cpu")
        self._imitated = Imitated()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._imitated.gpu() as self.native:
            yield

    def sync(self) -> None:
        self._imitated.drain()
        self.native.settle()
        self._imitated.be_late(0)

    def forward(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._imitated.be_late(0)
        for tensor, value in zip(to, values, strict=True):
            self._imitated.engine_writes(tensor, value, 3000)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def facts(self) -> dict[str, Any]:
        return {
            "gpu": self.native.name,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "driver_cuda": self.native.driver_version,
            "imitated": True,
            **{key: str(value) for key, value in _native.build_info().items()},
        }
