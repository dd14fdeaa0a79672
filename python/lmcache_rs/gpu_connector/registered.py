"""An engine's registered KV tensors, and the copies that can be made of them, on a host or a GPU.

On a GPU nothing here waits for a copy unless it says so: our streams and the engine's are ordered
by events. A store comes behind what the engine's current stream has been given, and that stream
then waits for the store before it does more; a load likewise. Memory that a copy needs is held
until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.gpu_connector import residence
from lmcache_rs.layouts import Layout, StoredForm
from lmcache_rs.transfers import Ticket

if TYPE_CHECKING:
    import torch

__all__ = ["RegisteredCache"]


@dataclass(frozen=True)
class RegisteredCache:
    """An engine's KV tensors, registered for copies.

    Args:
        native: The registration, in host memory or on a GPU; keeps the tensors alive.
        layout: How they are copied: the layout asked for, or `opaque` where that one failed.
        layout_id: Everything about the form that decides a chunk's bytes, as text.
        form: The form of a chunk.
        block_tokens: Tokens of a block.
        num_blocks: Blocks of each layer.
        heads: Heads of a token in one plane; 1 where they are not told apart.
        fallback_reason: Why the layout asked for is not the one in use, if so.
        tensor: One of the tensors, by which the engine's stream is asked for.
    """

    native: _native.PagedCache | _native.CudaCache
    layout: Layout
    layout_id: str
    form: StoredForm
    block_tokens: int
    num_blocks: int
    heads: int = 1
    fallback_reason: str | None = None
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        """Registered layers."""
        return self.form.num_layers

    def layer_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer of so many tokens.

        Raises:
            ValueError: The tokens are no whole number of opaque blocks.
        """
        return self.native.chunk_bytes(num_tokens) // self.num_layers

    @property
    def kv_dtype(self) -> str:
        """Element type, without the `torch.` prefix."""
        return self.form.dtype

    @property
    def device(self) -> _native.CudaDevice | None:
        """The GPU that the tensors are on, if they are."""
        return self.native.device if isinstance(self.native, _native.CudaCache) else None

    @property
    def copy_path(self) -> str:
        """Who copies, in words."""
        device = self.device
        if device is None:
            return "by the CPU"
        major, minor = divmod(device.driver_version // 10, 100)
        return f"by GPU {device.ordinal} ({device.name}, driver of CUDA {major}.{minor})"

    def _stream(self) -> int:
        assert self.tensor is not None, "a registration on a GPU has one"
        return residence.of(self.tensor).stream

    # --- whole chunks -------------------------------------------------------------------------

    def gather(
        self,
        memory_objs: Sequence[_native.MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Any,
    ) -> int:
        """Fills the i-th object with the tokens `starts[i]:ends[i]` of `slots`: bytes copied.

        The objects are filled when it returns.
        """
        if isinstance(self.native, _native.CudaCache):
            return self.native.gather(memory_objs, starts, ends, slots, self._stream())
        return _native.gather(self.native, memory_objs, starts, ends, slots)

    def scatter(
        self,
        memory_objs: Sequence[_native.MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Any,
    ) -> int:
        """Writes the i-th object to the slots of the tokens `starts[i]:ends[i]`: bytes copied."""
        if isinstance(self.native, _native.CudaCache):
            return self.native.scatter(memory_objs, starts, ends, slots, self._stream())
        return _native.scatter(self.native, memory_objs, starts, ends, slots)

    def store(
        self,
        local_cpu: _native.LocalCpu,
        namespace: str,
        hashes: bytes,
        *,
        wait: bool,
        **where: Any,
    ) -> tuple[int, int, int, int]:
        """Stores what is new: chunks, tokens, bytes, refused chunks.

        Without `wait` chunks of a GPU become visible once their copies are done, and not by the
        time that this returns.
        """
        if isinstance(self.native, _native.CudaCache):
            return self.native.store(
                local_cpu, namespace, hashes, stream=self._stream(), wait=wait, **where
            )
        return _native.store(local_cpu, self.native, namespace, hashes, **where)

    def load(
        self,
        local_cpu: _native.LocalCpu,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        **where: Any,
    ) -> tuple[int, int, int]:
        """Writes what is stored of the tokens from `skip` on: end, tokens, bytes."""
        if isinstance(self.native, _native.CudaCache):
            return self.native.load(
                local_cpu, lookup_id, namespace, hashes, stream=self._stream(), **where
            )
        return _native.load(local_cpu, self.native, lookup_id, namespace, hashes, **where)

    def begin_store(
        self,
        queue: _native.TransferQueue,
        local_cpu: _native.LocalCpu,
        namespace: str,
        hashes: bytes,
        **where: Any,
    ) -> Ticket:
        """As `store`, behind the caller's back; a GPU needs no queue of ours for that.

        The engine's stream does not wait for it: the blocks stay as they are until it is done.
        """
        if isinstance(self.native, _native.CudaCache):
            return _native.begin_cuda_store(
                self.native, local_cpu, namespace, hashes, stream=self._stream(), **where
            )
        return queue.begin_store(local_cpu, self.native, namespace, hashes, **where)

    def begin_load(
        self,
        queue: _native.TransferQueue,
        source: _native.LocalCpu | _native.RegionReader,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        **where: Any,
    ) -> Ticket:
        """As `load`, behind the caller's back; the blocks are not used until it is done.

        Into host memory it may come from another process's pool.
        """
        if isinstance(source, _native.RegionReader):
            assert isinstance(self.native, _native.PagedCache), "not served on a GPU"
            return _native.begin_shared_load(
                queue, source, self.native, lookup_id, namespace, hashes, **where
            )
        if isinstance(self.native, _native.CudaCache):
            return _native.begin_cuda_load(
                self.native,
                source,
                lookup_id,
                namespace,
                hashes,
                stream=self._stream(),
                **where,
            )
        return queue.begin_load(source, self.native, lookup_id, namespace, hashes, **where)

    # --- a layer at a time --------------------------------------------------------------------

    def layerwise_step(
        self, local_cpu: _native.LocalCpu, chunk_size: int, *, wait: bool
    ) -> _native.LayerwiseStep | _native.CudaLayerwiseStep:
        """Loads and saves of requests that share a forward pass; `wait` as for `store`."""
        if isinstance(self.native, _native.CudaCache):
            return _native.CudaLayerwiseStep(
                local_cpu, self.native, chunk_size=chunk_size, stream=self._stream(), wait=wait
            )
        return _native.LayerwiseStep(local_cpu, self.native, chunk_size=chunk_size)

    def layer_copy(
        self, starts: Sequence[int], ends: Sequence[int], slots: Any, *, storing: bool
    ) -> _native.LayerCopy | _native.CudaLayerCopy:
        """Copies of one layer of the tokens `starts[i]:ends[i]` of `slots`, in one direction."""
        if isinstance(self.native, _native.CudaCache):
            return _native.CudaLayerCopy(
                self.native, starts, ends, slots, stream=self._stream(), storing=storing
            )
        return _native.LayerCopy(self.native, starts, ends, slots)

    def layer_buffer(
        self, nbytes: int, *, storing: bool
    ) -> _native.LayerBuffer | _native.CudaLayerBuffer:
        """Memory to stage one layer in, where the tensors are."""
        if isinstance(self.native, _native.CudaCache):
            return _native.CudaLayerBuffer(self.native.device, nbytes, storing=storing)
        return _native.LayerBuffer(nbytes)

    def rope_shift(
        self, inv_freq: Sequence[float], old: Any, new: Any, **rows: Any
    ) -> _native.RopeShift | _native.CudaRopeShift:
        """The turn of one row a token, for the buffers of `layer_buffer`."""
        if isinstance(self.native, _native.CudaCache):
            return _native.CudaRopeShift(self.native.device, inv_freq, old, new, **rows)
        return _native.RopeShift(inv_freq, old, new, **rows)

    # --- the end ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Returns once copies under way are done: memory and leases are back, stores visible."""
        device = self.device
        if device is not None:
            device.settle()
