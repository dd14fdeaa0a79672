"""Watches a step that goes layer by layer: which layers are written when, and saved when.

A load must have written a layer when ``wait_for_layer_load`` returns and may not be more than
``LOOK_AHEAD`` layers further; layers not yet asked for hold noise, so whatever is written shows.
Of a save the bytes must be in the chunk ``LOOK_AHEAD`` layers later: the blocks are then
overwritten with noise until the step ends, and the next load of the chunk tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from probe import ProbeConnector, Version

LOOK_AHEAD = 2


class LayerWatch:
    """One step under watch. ``probe`` names and compares chunks."""

    def __init__(self, probe: ProbeConnector, forward_context: Any) -> None:
        self._probe = probe
        self._layers = probe.layers
        targets = probe.load_targets()
        # A chunk that shares a block with computed tokens is written before the pass begins.
        self._at_once = [target for target in targets if target.is_shared]
        self._targets = [target for target in targets if not target.is_shared]
        self._computed = self._computed_blocks(forward_context)
        self._before: Version = []
        self._noise: Version = []
        self._unseen = set(range(len(self._layers)))
        self._wrong: list[list[list[int]]] = []
        self._held: dict[int, torch.Tensor] = {}
        self._saved_blocks = probe.saved_blocks()
        self.fault: str | None = None

    @property
    def loads(self) -> bool:
        return bool(self._targets or self._at_once)

    # Loads.

    def before_start(self) -> None:
        """Noise where a load must write, flipped bits where it must not."""
        every = self._targets + self._at_once
        self._probe.fill_with_noise([target.block_id for target in every])
        self._probe.wait_for_copies()
        self._before = [layer.clone() for layer in self._layers]
        ids = [target.block_id for target in self._targets]
        self._noise = [layer[ids].clone() for layer in self._layers]
        self._others = self._probe.other_blocks(every)
        self._others[self._computed] = False
        for layer in self._layers:
            bits = self._probe.bits(layer)
            bits[self._others] = ~bits[self._others]
        versions = (self._probe.recorded.get(target.key, []) for target in self._targets)
        self._wrong = [[[] for _ in known] for known in versions]

    def after_start(self) -> None:
        self._probe.compare(self._at_once)
        self._require_untouched(LOOK_AHEAD + 1, "start_load_kv")

    def after_wait(self, number: int) -> None:
        """The layer is written, those far ahead are not, and nothing else was touched."""
        self._probe.totals["awaited_layers"] += 1
        self._require_untouched(number + LOOK_AHEAD + 1, f"wait_for_layer_load({number})")
        self._see(number)

    def _see(self, number: int) -> None:
        if number not in self._unseen:
            return
        self._unseen.discard(number)
        self._restore_others(number)
        if self.fault is not None:
            every = self._targets + self._at_once
            self._probe.plant_in(self.fault, every, self._before, [number])
        for target, wrong in zip(self._targets, self._wrong, strict=True):
            versions = self._probe.recorded.get(target.key, [])
            for version, layers in zip(versions, wrong, strict=True):
                if not self._probe.is_right(target, version, number):
                    layers.append(number)

    def _require_untouched(self, first: int, when: str) -> None:
        ids = [target.block_id for target in self._targets]
        for number in range(first, len(self._layers)):
            if not ids or number not in self._unseen:
                continue
            found = self._probe.bits(self._layers[number][ids])
            if not torch.equal(found, self._probe.bits(self._noise[number])):
                self._probe.note("early_layers", f"{when}: layer {number} is written already")

    def _restore_others(self, number: int) -> None:
        layer, old = self._layers[number], self._before[number]
        keep = self._others.nonzero().flatten()
        bits = self._probe.bits
        # Compared as integers: a NaN equals itself.
        written = (bits(layer)[keep] != ~bits(old)[keep]).flatten(1).any(1)
        for block in keep[written].tolist():
            self._probe.note("stray_blocks", f"block {block} layer {number}: not to be written")
        layer[keep] = old[keep]

    # Saves.

    def after_save(self, number: int) -> None:
        """What was saved some layers ago is in the chunk: its blocks may hold anything now."""
        old = number - LOOK_AHEAD
        if old < 0 or old in self._held or not self._saved_blocks:
            return
        layer = self._layers[old]
        self._held[old] = layer[self._saved_blocks].clone()
        layer[self._saved_blocks] = torch.randn_like(self._held[old])
        self._probe.totals["spoiled_layers"] += 1

    # The end.

    def finish(self) -> None:
        """After the step's last hook: what no hook has shown, and the account."""
        for number, held in self._held.items():
            self._layers[number][self._saved_blocks] = held
        self._held.clear()
        if not self.loads:
            return
        for number in sorted(self._unseen):
            self._see(number)
        self._probe.account(self._targets, self._wrong)

    def _computed_blocks(self, forward_context: Any) -> list[int]:
        """Blocks that the engine writes itself in this step."""
        mappings = getattr(forward_context, "slot_mapping", None)
        if not isinstance(mappings, dict):
            return []
        blocks: set[int] = set()
        for slots in mappings.values():
            blocks.update((slots[slots >= 0] // self._probe.block_size).tolist())
        return sorted(blocks)
