"""Names that the probe and the tests share; imports neither torch nor vLLM."""

from __future__ import annotations

# The scheduler's half writes its counters into a file of this folder.
FOLDER_VARIABLE = "KV_PROBE_FOLDER"
SCHEDULER_FILE = "scheduler.json"
# Set to 1, the probe only counts: nothing is kept, compared or overwritten.
LIGHT_VARIABLE = "KV_PROBE_LIGHT"

# What may be done to the next load, after the connector has done it. Of several loads in
# a step the first request's chunks come first; chunks_swapped takes the first and the
# last of all, chunks_reordered the first two.
FAULTS = (
    "nothing_loaded",
    "chunk_zeroed",
    "chunks_swapped",
    "kv_swapped",
    "byte_first_layer",
    "byte_last_layer",
    "chunks_reordered",
)
