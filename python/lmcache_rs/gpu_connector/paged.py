"""The bulk connector: memory objects to and from an engine's paged KV, all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.gpu_connector.registration import identity, register, slots_of
from lmcache_rs.layouts import Layout, LayoutError, require_layout

if TYPE_CHECKING:
    import torch

    from lmcache_rs.storage import MemoryObj

__all__ = ["PagedConnector", "VLLMPagedMemGPUConnectorV2"]


class PagedConnector:
    """What every connector has: the KV tensors it was made for, once they are registered.

    Args:
        hidden_dim_size: Elements of a token in one plane; checked against the tensors if given.
        num_layers: Layers of a chunk; checked against the tensors if given.
        layout: What the axes of the KV tensors mean.
        block_tokens: Tokens of a block, for `opaque`.
    """

    def __init__(
        self,
        hidden_dim_size: int | None = None,
        num_layers: int | None = None,
        *,
        layout: Layout = "split",
        block_tokens: int | None = None,
    ) -> None:
        require_layout(layout)
        self.layout: Layout = layout
        self._hidden_dim_size = hidden_dim_size
        self._num_layers = num_layers
        self._block_tokens = block_tokens
        self._registered: RegisteredCache | None = None
        self._registered_from: tuple[object, ...] = ()

    def initialize_kvcaches_ptr(self, kvcaches: Sequence[torch.Tensor]) -> RegisteredCache:
        """Registers the tensors, unless they are the registered ones already.

        Raises:
            LayoutError: The tensors are not what this connector was made for.
        """
        which = identity(kvcaches)
        if self._registered is None or self._registered_from != which:
            registered = register(kvcaches, self.layout, block_tokens=self._block_tokens)
            stated = (self._num_layers, self._hidden_dim_size)
            found = (registered.form.num_layers, registered.form.hidden)
            for what, wanted, there in zip(
                ("num_layers", "hidden_dim_size"), stated, found, strict=True
            ):
                if wanted not in (None, there):
                    raise LayoutError(f"{what} is {wanted}, but the KV tensors have {there}")
            self._registered, self._registered_from = registered, which
        return self._registered

    def get_shape(self, num_tokens: int) -> tuple[int, ...]:
        """The shape of a chunk in the stored form.

        Raises:
            RuntimeError: No KV tensors are registered yet.
        """
        return self._require_registered().form.shape(num_tokens)

    def _registered_with(self, kvcaches: Sequence[torch.Tensor] | None) -> RegisteredCache:
        """The registration of these tensors, or the one that is there."""
        if kvcaches is not None:
            return self.initialize_kvcaches_ptr(kvcaches)
        return self._require_registered()

    def _require_registered(self) -> RegisteredCache:
        if self._registered is None:
            raise RuntimeError("no KV tensors are registered; give kvcaches once")
        return self._registered


class VLLMPagedMemGPUConnectorV2(PagedConnector):
    """Moves memory objects between host memory and an engine's paged KV, all layers at once.

    KV on a GPU is copied by streams of ours, in the order of torch's current stream: behind what
    that has been given, and before what it is given next.

    Args:
        hidden_dim_size: Elements of a token in one plane; checked against the tensors if given.
        num_layers: Layers of a chunk; checked against the tensors if given.
        layout: What the axes of the KV tensors mean.
        block_tokens: Tokens of a block, for `opaque`.
    """

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj | _native.MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | Sequence[int],
        kvcaches: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """Fills each object with the tokens `starts[i]:ends[i]`.

        Args:
            memory_objs: Writable objects of the chunks' sizes, in any format of this stored form.
            starts: The first token of each chunk, an index into `slot_mapping`.
            ends: One past its last token.
            slot_mapping: int64, one slot a token; the rows of tokens at -1 are left as they are.
            kvcaches: One tensor a layer; None takes those registered before.

        Returns:
            Bytes copied.

        Raises:
            ValueError, TypeError, LayoutError: Sizes, slots or formats contradict each other.
            RuntimeError: An object is sealed or in use.
        """
        registered = self._take(memory_objs, kvcaches)
        slots = slots_of(slot_mapping)
        return registered.gather(memory_objs, starts, ends, slots)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj | _native.MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | Sequence[int],
        kvcaches: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """Writes each object to the slots of the tokens `starts[i]:ends[i]`; -1 is skipped.

        Arguments, result and errors as for `batched_from_gpu`; the objects may be sealed.
        """
        registered = self._take(memory_objs, kvcaches)
        slots = slots_of(slot_mapping)
        return registered.scatter(memory_objs, starts, ends, slots)

    def _take(
        self,
        memory_objs: Sequence[MemoryObj | _native.MemoryObj],
        kvcaches: Sequence[torch.Tensor] | None,
    ) -> RegisteredCache:
        registered = self._registered_with(kvcaches)
        form = registered.form
        for number, memory_obj in enumerate(memory_objs):
            metadata = getattr(memory_obj, "metadata", None)
            if metadata is None:
                continue
            if metadata.form() != form:
                raise LayoutError(
                    f"memory object {number} is {metadata.form()}, the KV tensors are {form}; "
                    "allocate it with the shape of get_shape(num_tokens)"
                )
        return registered
