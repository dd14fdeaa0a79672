"""An inference engine of one page, with lmcache_rs beside it.

A small transformer in plain torch keeps its keys and values in a paged cache, as serving engines
do. Between two prompts that begin alike, the engine loses its pages; lmcache_rs gives the KV of the
common prefix back, and only the rest is computed. Every answer is compared with one computed from
nothing.

    python examples/own_engine.py

What an engine has to do is in `Engine.prefill`: five calls, marked 1 to 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

CHUNK = 64
BLOCK = 16
BLOCKS = 64


@dataclass(frozen=True)
class Shape:
    """The model: its sizes. All weights are random, which suits a comparison as well as any."""

    vocabulary: int = 1000
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head: int = 16

    @property
    def width(self) -> int:
        return self.heads * self.head


class Model:
    """A decoder: attention and a projection a layer, rotary positions, no training."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        made = torch.Generator().manual_seed(seed)

        def weight(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=made) / sizes[0] ** 0.5

        width, kv_width = shape.width, shape.kv_heads * shape.head
        self.embedding = weight(shape.vocabulary, width) * shape.vocabulary**0.5
        self.layers = [
            (weight(width, width), weight(width, 2 * kv_width), weight(width, width))
            for _ in range(shape.layers)
        ]

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `[tokens, heads, head]` at `positions`."""
        half = self.shape.head // 2
        speed = 10000.0 ** (-torch.arange(half) / half)
        angle = (positions[:, None] * speed)[:, None, :]
        left, right = vectors[..., :half], vectors[..., half:]
        turned = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()
        return torch.cat(turned, dim=-1)


class Pages:
    """The engine's KV: a tensor a layer, `[2, blocks, tokens of a block, kv heads, head]`."""

    def __init__(self, shape: Shape) -> None:
        size = (2, BLOCKS, BLOCK, shape.kv_heads, shape.head)
        self.layers = [torch.zeros(size) for _ in range(shape.layers)]
        self._free = list(range(BLOCKS))

    def slots_for(self, num_tokens: int) -> torch.Tensor:
        """Free blocks for so many tokens, a slot each: block * tokens of a block + offset."""
        blocks = torch.tensor([self._free.pop() for _ in range(-(-num_tokens // BLOCK))])
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:num_tokens]

    def lose(self) -> None:
        """Takes every block back and leaves noise in it."""
        self._free = torch.randperm(BLOCKS).tolist()
        for layer in self.layers:
            layer.normal_()

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layers[layer][:, slots // BLOCK, slots % BLOCK]
        return keys, values

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self.layers[layer][:, slots // BLOCK, slots % BLOCK] = kv


class Engine:
    """Model and pages, and the cache that outlives the pages.

    Args:
        model: The model.
        cache: lmcache_rs; None computes everything.
    """

    def __init__(self, model: Model, cache: LMCacheEngine | None = None) -> None:
        self.model = model
        self.cache = cache
        self.pages = Pages(model.shape)

    def prefill(self, req_id: str, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The last token's hidden state, and how many tokens were computed for it."""
        held = 0
        if self.cache is not None:
            # 1. Ask, and lease what is found: it stays until it is loaded, released or forgotten.
            hit_tokens = self.cache.lookup(tokens, lookup_id=req_id)
            # The last token is always computed: its output is what was asked for.
            held = min(hit_tokens, len(tokens) - 1)
        slots = self.pages.slots_for(len(tokens))
        if self.cache is not None and held:
            # 2. Load. -1 keeps a token's slot untouched: here that of the token computed anyway.
            wanted = torch.where(torch.arange(len(tokens)) < held, slots, -1)
            loaded = self.cache.retrieve(
                tokens, kvcaches=self.pages.layers, slot_mapping=wanted, req_id=req_id
            )
            # 3. Believe `ret_mask`, not the lookup: True is a run from the first token on.
            held = int(loaded.sum())
        elif self.cache is not None:
            # 4. Not loaded after all: give the lease back.
            self.cache.release(req_id)
        hidden = self._forward(tokens, slots, held)
        if self.cache is not None:
            # 5. Store. Chunks that are stored already are not copied again.
            self.cache.store(tokens, kvcaches=self.pages.layers, slot_mapping=slots)
        return hidden, len(tokens) - held

    def _forward(self, tokens: torch.Tensor, slots: torch.Tensor, held: int) -> torch.Tensor:
        """Computes the tokens from `held` on; the KV of those before is in the pages."""
        shape, positions = self.model.shape, torch.arange(len(tokens))
        mask = positions[None, :] > positions[held:, None]
        hidden = self.model.embedding[tokens[held:]]
        for layer, (query_weight, kv_weight, out_weight) in enumerate(self.model.layers):
            new = len(tokens) - held
            query = (hidden @ query_weight).view(new, shape.heads, shape.head)
            key, value = (hidden @ kv_weight).view(new, 2, shape.kv_heads, shape.head).unbind(1)
            query, key = (self.model.rotate(part, positions[held:]) for part in (query, key))
            self.pages.write(layer, slots[held:], torch.stack([key, value]))
            keys, values = self.pages.read(layer, slots)
            groups = shape.heads // shape.kv_heads
            keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, keys) / shape.head**0.5
            weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values).reshape(new, shape.width)
            hidden = hidden + mixed @ out_weight
        return hidden[-1]


def main() -> None:
    torch.manual_seed(0)
    model = Model(Shape())
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.05)
    # Whatever decides the KV and is not in the tokens belongs here: it is part of every key.
    metadata = LMCacheMetadata(
        model_name="examples/own_engine", world_size=1, worker_id=0, kv_dtype="float32"
    )
    document = torch.randint(model.shape.vocabulary, (300,))
    questions = [torch.randint(model.shape.vocabulary, (length,)) for length in (10, 41, 84)]
    with LMCacheEngine(config, metadata) as cache:
        engine = Engine(model, cache)
        for number, question in enumerate([*questions, questions[0]]):
            prompt = torch.cat([document, question])
            engine.pages.lose()
            answer, computed = engine.prefill(f"request-{number}", prompt)
            expected, _ = Engine(model).prefill("", prompt)
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)
            print(
                f"prompt {number}: {len(prompt)} tokens, {len(prompt) - computed} from the cache, "
                f"{computed} computed; the answer is right"
            )


if __name__ == "__main__":
    main()
