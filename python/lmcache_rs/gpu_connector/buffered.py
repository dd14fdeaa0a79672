"""The buffered layerwise connector: chunks restored at other positions than they were stored at."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.gpu_connector.layer_view import pieces_of
from lmcache_rs.gpu_connector.layerwise import (
    VLLMPagedMemLayerwiseGPUConnector,
    checked_spans,
    finish,
    require_sent,
)
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.gpu_connector.registration import int64_tensor, slots_of
from lmcache_rs.gpu_connector.rope import Rope
from lmcache_rs.layouts import Layout, LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["VLLMBufferLayerwiseGPUConnector"]

# A `LayerBuffer` or `CudaLayerBuffer`: each takes the pieces and turns of its own kind.
Buffer = Any


class VLLMBufferLayerwiseGPUConnector(VLLMPagedMemLayerwiseGPUConnector):
    """Restores chunks at any position, one layer a step, in a pipeline of three stages.

    Between the objects and the paged memory a layer lies in one of two buffers, in which its keys
    are turned to their new positions and the tokens between the chunks are zeroed. Storing is that
    of `VLLMPagedMemLayerwiseGPUConnector` with staging. Tokens must be addressable: not `opaque`.

    Args:
        hidden_dim_size: Elements of a token in one plane; checked against the tensors if given.
        num_layers: Layers of a chunk; checked against the tensors if given.
        rope: The model's rotary embedding, or one a layer where they differ (None for a layer
            without). None moves keys as they are: right only for models without rotary embedding,
            and for chunks whose positions do not change.
        layout: What the axes of the KV tensors mean.

    Raises:
        LayoutError: The layout is opaque.
    """

    def __init__(
        self,
        hidden_dim_size: int | None = None,
        num_layers: int | None = None,
        *,
        rope: Rope | Sequence[Rope | None] | None,
        layout: Layout = "split",
    ) -> None:
        super().__init__(hidden_dim_size, num_layers, use_gpu=True, layout=layout)
        _require_addressable(layout)
        self.rope = rope

    def batched_to_gpu(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | Sequence[int],
        sync: bool = False,
        kvcaches: Sequence[torch.Tensor] | None = None,
        positions: torch.Tensor | Sequence[int] | None = None,
        cached_positions: Sequence[torch.Tensor] | None = None,
    ) -> Generator[None, Sequence[Any] | None]:
        """Restores the objects that are sent to it; N + 2 yields for N layers.

        Iteration `i` of N + 2 writes layer `i - 2` to paged memory, turns layer `i - 1`, and then
        yields: up to layer N - 1 for the objects of layer `i`, which `.send()` brings and which are
        copied to a buffer; once more for the caller to wait; and at the end. The first `next` runs
        up to the first of these yields, and the one after the last layer writes the last layer.

        The tokens `starts[0]:ends[-1]` that no chunk covers are zeroed in paged memory, in K and V;
        give those slot -1 that must stay as they are. Closed early, or left by an exception, it
        leaves each layer whole or untouched, and keeps no object.

        Args:
            starts: The first token of each chunk, an index into `slot_mapping`, ascending.
            ends: One past its last token; not beyond the next start.
            slot_mapping: int64, one slot a token; -1 is skipped.
            sync: Whether the step after the last layer's waits for copies on a GPU; else only
                torch's current stream does. Copies in host memory are over when their step returns.
            kvcaches: One tensor a layer; None takes those registered before.
            positions: int64, the new position of each token of `slot_mapping`; None: its index.
            cached_positions: For each chunk the positions its keys were stored at, int64, one a
                token; None takes `cached_positions` of the objects' metadata.

        Raises:
            ValueError, TypeError, LayoutError: Spans, sizes, positions or frequencies contradict
                each other, the chunks' positions are not known, or a step brings no objects where
                a layer is due.
        """
        registered = self._registered_with(kvcaches)
        _require_addressable(registered.layout)
        num_layers = registered.num_layers
        ropes = self._ropes(num_layers)
        restored = _Restored(registered, starts, ends, slot_mapping, positions)
        stored = None if cached_positions is None else restored.stored_at(cached_positions)
        turns = _Turns(registered, restored, [rope for rope in ropes if rope is not None])
        # Layer l is in buffer l % 2 for its three iterations; its writing ends before layer l + 2
        # is loaded.
        buffers = [restored.buffer(), restored.buffer()]
        for iteration in range(num_layers + 2):
            if iteration >= 2:
                restored.write(iteration - 2, buffers[iteration % 2])
            if 1 <= iteration <= num_layers:
                buffer = buffers[(iteration - 1) % 2]
                turns.turn(ropes[iteration - 1], buffer)
                buffer.zero(restored.gaps)
            if iteration < num_layers:
                views = yield
                views = require_sent(iteration, views)
                restored.load(iteration, views, buffers[iteration % 2])
                if ropes[iteration] is not None:
                    turns.stored = stored or restored.stored_at(_positions_of(views))
                # Not held while the caller has its turn: it may be the last to hold them.
                del views
            else:
                if sync and iteration == num_layers + 1:
                    restored.finish()
                yield

    def _ropes(self, num_layers: int) -> Sequence[Rope | None]:
        if self.rope is None or isinstance(self.rope, Rope):
            return [self.rope] * num_layers
        if len(self.rope) != num_layers:
            raise LayoutError(
                f"{len(self.rope)} rotary embeddings for {num_layers} layers; give one a layer"
            )
        return self.rope


def _require_addressable(layout: Layout) -> None:
    if layout == "opaque":
        raise LayoutError(
            "tokens of opaque blocks have no address, so they cannot be moved to other positions; "
            "name a layout whose tokens can be addressed"
        )


def _positions_of(views: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for number, view in enumerate(views):
        metadata = getattr(view, "metadata", None)
        positions = None if metadata is None else metadata.cached_positions
        if positions is None:
            raise ValueError(
                f"the positions that chunk {number} was stored at are not known; allocate it with "
                "cached_positions, or give cached_positions here"
            )
        found.append(positions)
    return found


class _Restored:
    """The tokens from the first chunk's first to the last chunk's last, and the gaps in between."""

    def __init__(
        self,
        registered: RegisteredCache,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor | Sequence[int],
        positions: torch.Tensor | Sequence[int] | None,
    ) -> None:
        import torch

        slots = int64_tensor(slot_mapping, "slot_mapping")
        spans = checked_spans(starts, ends, len(slots))
        for (start, end), (after, _) in pairwise(spans):
            if after < end:
                raise ValueError(
                    f"a chunk of tokens {start} to {end} is followed by one from {after} on; "
                    "give the chunks in order, without overlaps"
                )
        first, last = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        if positions is None:
            self.new = torch.arange(first, last)
        else:
            whole = int64_tensor(positions, "positions")
            if whole.shape != slots.shape:
                raise ValueError(
                    f"{list(whole.shape)} positions for {len(slots)} slots; give one a token"
                )
            self.new = whole[first:last].clone()
        self._form = registered.form
        self._row = registered.layer_bytes(1)
        # Within the restored tokens.
        self._spans = [(start - first, end - first) for start, end in spans]
        self._nbytes = (last - first) * self._row
        self._sizes = [(end - start) * self._row for start, end in spans]
        self._offsets = [start * self._row for start, _ in self._spans]
        self.gaps = [
            (end * self._row, after * self._row)
            for (_, end), (after, _) in pairwise(self._spans)
            if after > end
        ]
        self._registered = registered
        self._copy: Any = registered.layer_copy(
            [0], [last - first], slots_of(slots[first:last].contiguous()), storing=False
        )

    def buffer(self) -> Buffer:
        """Room for one layer."""
        return self._registered.layer_buffer(self._nbytes, storing=False)

    def finish(self) -> None:
        """Returns once the copies are done, and what they held is given back."""
        finish(self._copy)

    def stored_at(self, of_chunks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Checked positions, one tensor a chunk."""
        if len(of_chunks) != len(self._spans):
            raise ValueError(
                f"stored positions of {len(of_chunks)} chunks for {len(self._spans)}; "
                "give one tensor a chunk"
            )
        checked = []
        for number, (positions, (start, end)) in enumerate(
            zip(of_chunks, self._spans, strict=True)
        ):
            positions = int64_tensor(positions, "cached_positions")
            if tuple(positions.shape) != (end - start,):
                raise ValueError(
                    f"chunk {number} has {end - start} tokens and stored positions of shape "
                    f"{list(positions.shape)}; give one a token"
                )
            # Ours from now on: what the caller writes to its own is not in the next layer.
            checked.append(positions.clone())
        return tuple(checked)

    def rows(self, of_chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Positions of every row; those between the chunks stay where they are."""
        rows = self.new.clone()
        for positions, (start, end) in zip(of_chunks, self._spans, strict=True):
            rows[start:end] = positions
        return rows

    def load(self, layer: int, views: Sequence[Any], buffer: Buffer) -> None:
        """Copies one layer of the chunks to their rows."""
        pieces = pieces_of(views, layer, self._sizes, self._form, writable=False)
        buffer.load(pieces, self._offsets)

    def write(self, layer: int, buffer: Buffer) -> None:
        """Writes the rows to their slots."""
        self._copy.scatter(layer, [(buffer, 0, self._nbytes)])


class _Turns:
    """The turns of the keys, planned once for all layers of the same embedding and positions."""

    def __init__(
        self, registered: RegisteredCache, restored: _Restored, ropes: Sequence[Rope]
    ) -> None:
        self._registered = registered
        self._restored = restored
        self._planned: dict[Rope, _native.RopeShift | _native.CudaRopeShift] = {}
        self._planned_for: tuple[torch.Tensor, ...] = ()
        self.stored: tuple[torch.Tensor, ...] = ()
        for rope in set(ropes):
            # Heads and element type that do not fit are found before the first step.
            rope.shift(registered, restored.new[:0], restored.new[:0])

    def turn(self, rope: Rope | None, buffer: Buffer) -> None:
        """Turns the keys in the buffer from `stored` to their new positions."""
        if rope is None:
            return
        if not _same(self._planned_for, self.stored):
            self._planned.clear()
            self._planned_for = self.stored
        if rope not in self._planned:
            stored = self._restored.rows(self.stored)
            self._planned[rope] = rope.shift(self._registered, stored, self._restored.new)
        buffer.rotate(self._planned[rope])


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    import torch

    return len(one) == len(other) and all(map(torch.equal, one, other))
