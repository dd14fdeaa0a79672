"""The layerwise connector: generators that move one layer a step.

Both protocols have a fixed number of steps for `N` layers, whatever there is to move:

- `batched_from_gpu` yields N + 1 times: the first `next` sets up, each one after it copies a layer;
- `batched_to_gpu` yields N + 2 times: the first `next` sets up, each `.send(objects)` brings and
  copies a layer, and one more `next` waits for what is still on its way.

A step after the last raises StopIteration, as with any generator, and moves nothing.

KV on a GPU moves on streams of ours, in the order of the stream that is torch's current one when a
generator begins. A store comes behind what that stream has been given; its blocks must not be
written, and its objects not be read, before its last step. A load's step lets the stream wait for
the layer, so that what it is given next finds it there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.gpu_connector.layer_view import pieces_of
from lmcache_rs.gpu_connector.paged import PagedConnector
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.gpu_connector.registration import int64_tensor, slots_of
from lmcache_rs.layouts import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["VLLMPagedMemLayerwiseGPUConnector"]


class VLLMPagedMemLayerwiseGPUConnector(PagedConnector):
    """Moves chunks between host memory and an engine's paged KV, one layer a step.

    One layer of a chunk is a `LayerView` of its memory object, or a memory object, a tensor or a
    contiguous buffer of that layer's bytes: `[tokens, 2, hidden]`, `[tokens, hidden]` (MLA), or
    whole blocks (opaque). Several generators of one connector may be under way at once.

    Args:
        hidden_dim_size: Elements of a token in one plane; checked against the tensors if given.
        num_layers: Layers of a chunk; checked against the tensors if given.
        use_gpu: Stage each layer in one buffer between the paged memory and the chunks, which keeps
            the copies to and from a GPU long; without, each chunk is copied by itself. The buffer
            is where the tensors are.
        layout: What the axes of the KV tensors mean.
        block_tokens: Tokens of a block, for `opaque`.
    """

    def __init__(
        self,
        hidden_dim_size: int | None = None,
        num_layers: int | None = None,
        use_gpu: bool = False,
        *,
        layout: Layout = "split",
        block_tokens: int | None = None,
    ) -> None:
        super().__init__(hidden_dim_size, num_layers, layout=layout, block_tokens=block_tokens)
        self.use_gpu = use_gpu

    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[Any]],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | Sequence[int],
        sync: bool = False,
        kvcaches: Sequence[torch.Tensor] | None = None,
    ) -> Generator[None]:
        """Fills the objects with the tokens `starts[i]:ends[i]`; N + 1 yields for N layers.

        Yield 0 follows the set-up, yield `l + 1` the copy of layer `l`. Nothing is copied before
        the second step. Closed early, or left by an exception, it leaves the layers done so far
        filled and the others as they were, and keeps nothing.

        Args:
            memory_objs: One list a layer, in it one writable object a chunk; see `by_layer`.
            starts: The first token of each chunk, an index into `slot_mapping`. Chunks may lie
                anywhere in it, in any order.
            ends: One past its last token.
            slot_mapping: int64, one slot a token; the rows of tokens at -1 are left as they are.
            sync: Whether the last step waits for the copies. It does in any case: the objects are
                filled when it returns.
            kvcaches: One tensor a layer; None takes those registered before.

        Raises:
            ValueError, TypeError, LayoutError: Sizes, slots or formats contradict each other: from
                the first step, or before any byte of a layer moves.
            RuntimeError: An object is sealed or in use.
        """
        registered = self._registered_with(kvcaches)
        if len(memory_objs) != registered.num_layers:
            raise ValueError(
                f"memory objects of {len(memory_objs)} layers for KV tensors of "
                f"{registered.num_layers}; give one list a layer"
            )
        path = _path(registered, starts, ends, slot_mapping, staged=self.use_gpu, storing=True)
        for views in memory_objs[:1]:
            path.require(0, views, writable=True)
        try:
            yield
            for layer, views in enumerate(memory_objs):
                path.gather(layer, views)
                if layer == registered.num_layers - 1:
                    path.finish()
                yield
        finally:
            path.finish()

    def batched_to_gpu(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | Sequence[int],
        sync: bool = False,
        kvcaches: Sequence[torch.Tensor] | None = None,
    ) -> Generator[None, Sequence[Any] | None]:
        """Writes the objects that are sent to it to their slots; N + 2 yields for N layers.

        The first `next` sets up (yield 0); `.send(objects)` with one object a chunk, layer by
        layer, copies them (yields 1 to N); one more `next` waits for the copies (yield N + 1).
        A layer is written whole or not at all. Closed early, or left by an exception, it leaves
        the layers sent so far in place and the others untouched, and keeps no object.

        Args:
            starts: The first token of each chunk, an index into `slot_mapping`.
            ends: One past its last token.
            slot_mapping: int64, one slot a token; -1 is skipped.
            sync: Whether the last step but one, the one after the last layer's, waits for copies on
                a GPU; else only torch's current stream does. Copies in host memory are over when
                their step returns.
            kvcaches: One tensor a layer; None takes those registered before.

        Raises:
            ValueError, TypeError, LayoutError: As for `batched_from_gpu`, or a step brings no
                objects where a layer is due.
        """
        registered = self._registered_with(kvcaches)
        path = _path(registered, starts, ends, slot_mapping, staged=self.use_gpu, storing=False)
        for layer in range(registered.num_layers):
            views = yield
            path.scatter(layer, require_sent(layer, views))
            # Not held while the caller has its turn: it may be the last to hold them.
            del views
        yield
        if sync:
            path.finish()
        yield


def require_sent(layer: int, views: Sequence[Any] | None) -> Sequence[Any]:
    """The objects of a layer that a step brought.

    Raises:
        ValueError: It brought none: to go on without would leave a layer as it was.
    """
    if views is None:
        raise ValueError(
            f"layer {layer} is due, but the step brought no objects; give them with .send()"
        )
    return views


def _path(
    registered: RegisteredCache,
    starts: Sequence[int],
    ends: Sequence[int],
    slot_mapping: torch.Tensor | Sequence[int],
    *,
    staged: bool,
    storing: bool,
) -> DirectPath | StagedPath:
    path = StagedPath if staged else DirectPath
    return path(registered, starts, ends, slot_mapping, storing=storing)


Copy = _native.LayerCopy | _native.CudaLayerCopy


def finish(copy: Copy) -> None:
    """Returns once the copies are done, and what they held is given back."""
    if isinstance(copy, _native.CudaLayerCopy):
        copy.finish()


class DirectPath:
    """Chunk by chunk between paged memory and the objects."""

    def __init__(
        self,
        registered: RegisteredCache,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor | Sequence[int],
        *,
        storing: bool,
    ) -> None:
        self._form = registered.form
        slots = slots_of(slot_mapping)
        self._copy: Any = registered.layer_copy(starts, ends, slots, storing=storing)
        self._sizes: list[int] = self._copy.layer_bytes

    def require(self, layer: int, views: Sequence[Any], *, writable: bool) -> None:
        """Raises what moving these objects would raise for what they are."""
        pieces_of(views, layer, self._sizes, self._form, writable=writable)

    def gather(self, layer: int, views: Sequence[Any]) -> None:
        """Fills one layer of the objects."""
        pieces = pieces_of(views, layer, self._sizes, self._form, writable=True)
        self._copy.gather(layer, pieces)

    def scatter(self, layer: int, views: Sequence[Any]) -> None:
        """Writes one layer of the objects to their slots."""
        pieces = pieces_of(views, layer, self._sizes, self._form, writable=False)
        self._copy.scatter(layer, pieces)

    def finish(self) -> None:
        """Returns once the copies are done, and what they held is given back."""
        finish(self._copy)


class StagedPath:
    """All chunks of a layer through one buffer, in which they lie side by side."""

    def __init__(
        self,
        registered: RegisteredCache,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor | Sequence[int],
        *,
        storing: bool,
    ) -> None:
        import torch

        self._form = registered.form
        slots = int64_tensor(slot_mapping, "slot_mapping")
        spans = [slots[start:end] for start, end in checked_spans(starts, ends, len(slots))]
        of_chunks = torch.cat([slots[:0], *spans])
        # Rows without a slot keep what the objects have, so those must pass through the buffer.
        self._has_holes = bool((of_chunks == -1).any())
        self._sizes = [registered.layer_bytes(len(span)) for span in spans]
        *self._offsets, self._nbytes = accumulate(self._sizes, initial=0)
        self._copy: Any = registered.layer_copy(
            [0], [len(of_chunks)], slots_of(of_chunks), storing=storing
        )
        self._buffer: Any = registered.layer_buffer(self._nbytes, storing=storing)

    def require(self, layer: int, views: Sequence[Any], *, writable: bool) -> None:
        """Raises what moving these objects would raise for what they are."""
        pieces_of(views, layer, self._sizes, self._form, writable=writable)

    def gather(self, layer: int, views: Sequence[Any]) -> None:
        """Fills one layer of the objects."""
        pieces = pieces_of(views, layer, self._sizes, self._form, writable=True)
        if self._has_holes:
            self._buffer.load(pieces, self._offsets)
        self._copy.gather(layer, [(self._buffer, 0, self._nbytes)])
        self._buffer.unload(pieces, self._offsets)

    def scatter(self, layer: int, views: Sequence[Any]) -> None:
        """Writes one layer of the objects to their slots."""
        pieces = pieces_of(views, layer, self._sizes, self._form, writable=False)
        self._buffer.load(pieces, self._offsets)
        self._copy.scatter(layer, [(self._buffer, 0, self._nbytes)])

    def finish(self) -> None:
        """Returns once the copies are done, and what they held is given back."""
        finish(self._copy)


def checked_spans(
    starts: Sequence[int], ends: Sequence[int], num_tokens: int
) -> list[tuple[int, int]]:
    """The spans as pairs, each within `num_tokens`.

    Raises:
        ValueError: There are not as many ends as starts, or a span is outside.
    """
    if len(starts) != len(ends):
        raise ValueError(f"{len(starts)} starts and {len(ends)} ends; give one of each a chunk")
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start <= end <= num_tokens:
            raise ValueError(
                f"tokens {start} to {end} are not within a slot_mapping of {num_tokens} tokens"
            )
    return list(zip(starts, ends, strict=True))
