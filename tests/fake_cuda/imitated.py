"""The imitated driver in a Python process, with tensors of the host as if they were on GPU 0.

torch has no GPU here, so its operations are done by the host at once. What a GPU would do in the
order of the engine's stream is imitated by waiting, before any operation of a test's, until that
stream has nothing left to do; the product's own operations wait for nothing. A stream of ours that
the engine's should have waited for, and did not, is then late, and the test sees old bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import lmcache_rs
from lmcache_rs import _native
from lmcache_rs.gpu_connector import residence

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "tests/fake_cuda/libcuda.cpp", ROOT / "csrc/emulation/emulate.cpp"]
HEADERS = ["tests/fake_cuda/*.h", "csrc/*.h", "csrc/*.cu", "csrc/emulation/*.h"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
FLAGS += ["-fno-strict-aliasing", "-Wno-unknown-pragmas"]
SWITCH = "LMCACHE_RS_LIBCUDA"
PACKAGE = str(Path(lmcache_rs.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def build() -> Path:
    """The library; compiled once for its sources."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted([*SOURCES, *(path for some in HEADERS for path in ROOT.glob(some))]):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"lmcache-rs-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"libcuda-{digest.hexdigest()[:16]}.so.1"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        command = ["g++", *FLAGS, *map(str, SOURCES), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(built)
    return built


class Imitated:
    """The library, and what `fake_cuda.h` lets tests do with it.

    With a folder `apart` it is a copy there: a driver, and a GPU, of its own.
    """

    def __init__(self, apart: Path | None = None) -> None:
        self.path = build()
        if apart is not None:
            self.path = Path(shutil.copy(self.path, apart / "libcuda.so.1"))
        # What copies cost is remembered here, and in no folder of the user's.
        self.caches = tempfile.TemporaryDirectory()
        self._library = ctypes.CDLL(str(self.path))
        # Where the engine works; the legacy default stream.
        self.engine_stream = 0

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's memory as the device's."""
        storage = tensor.untyped_storage()
        self._library.fake_cuda_adopt(
            ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        )

    def disown(self) -> None:
        self._library.fake_cuda_disown()

    def allow_pageable(self, allowed: bool) -> None:
        self._library.fake_cuda_allow_pageable(int(allowed))

    def drain(self, stream: int | None = None) -> None:
        """Waits until a stream, the engine's if none is named, has nothing left to do."""
        which = self.engine_stream if stream is None else stream
        self._library.fake_cuda_drain(ctypes.c_size_t(which))

    def be_late(self, most_us: int, seed: int = 1) -> None:
        """Makes each piece of work sleep up to so long before it begins."""
        self._library.fake_cuda_be_late(ctypes.c_uint(most_us), ctypes.c_ulonglong(seed))

    def hold(self, held: bool, stream: int = 0) -> None:
        """Lets a stream begin nothing, or go on."""
        self._library.fake_cuda_hold(ctypes.c_size_t(stream), int(held))

    def fail(self, call: str, code: int = 2, after: int = 0) -> None:
        """Makes one call fail."""
        self._library.fake_cuda_fail(call.encode(), after, code)

    def break_down(self, code: int) -> None:
        """Breaks the device; 0 heals it."""
        self._library.fake_cuda_break(code)

    def limit_registration(self, nbytes: int | None) -> None:
        """Lets no longer piece of memory be page-locked."""
        limit = ctypes.c_size_t(-1 if nbytes is None else nbytes)
        self._library.fake_cuda_limit_registration(limit)

    def calls(self, call: str) -> int:
        """How often a function of the driver was called."""
        self._library.fake_cuda_calls.restype = ctypes.c_long
        return int(self._library.fake_cuda_calls(call.encode()))

    def live(self) -> int:
        """Handles that were not given back."""
        self._library.fake_cuda_live.restype = ctypes.c_long
        return int(self._library.fake_cuda_live())

    def engine_writes(self, to: torch.Tensor, source: torch.Tensor, late_us: int = 0) -> None:
        """Has `source` written to `to` in the order of the engine's stream, `late_us` after its
        turn has come; both must stay."""
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.nbytes == source.nbytes
        self._library.fake_cuda_engine_copy(
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_size_t(to.nbytes),
            ctypes.c_uint(late_us),
            ctypes.c_size_t(self.engine_stream),
        )

    @contextmanager
    def gpu(self) -> Iterator[_native.CudaDevice]:
        """GPU 0, whose memory is whatever tensor the product asks about."""

        def of(tensor: torch.Tensor) -> residence.Residence:
            if tensor.device.type != "cpu":
                return residence.Residence(tensor.device.type, 0, 0)
            self.adopt(tensor)
            return residence.Residence("cuda", 0, self.engine_stream)

        with (
            mock.patch.dict(
                os.environ, {SWITCH: str(self.path), "XDG_CACHE_HOME": self.caches.name}
            ),
            mock.patch.object(residence, "of", of),
            _InOrder(self),
        ):
            device = _native.CudaDevice(0)
            try:
                yield device
            finally:
                self.be_late(0)
                self.hold(False, self.engine_stream)
                device.settle()
                device.force_path(None)
                self.drain()
                self.disown()


class _InOrder(TorchFunctionMode):
    """Lets each operation of a test's begin when the engine's stream has come to it."""

    def __init__(self, imitated: Imitated) -> None:
        super().__init__()
        self._imitated = imitated

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        # Methods that torch has in Python come here through files of its own.
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith((PACKAGE, __file__)):
            self._imitated.drain()
        return func(*args, **(kwargs or {}))
