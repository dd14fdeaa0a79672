//! Errors of this crate: what was asked, what was found, what to change.

use lmcache_core::error::CoreError;
use thiserror::Error;

/// Why chunks could not be moved.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The plan could not be made.
    #[error(transparent)]
    Plan(#[from] CoreError),
    /// A registered layer has no address.
    #[error("layer {layer} has a null address; register tensors that own memory")]
    NullLayer {
        /// Index of the layer.
        layer: usize,
    },
    /// No layer was registered.
    #[error("no layer given; register at least one KV tensor")]
    NoLayers,
    /// Hashes and offsets do not describe one chain.
    #[error("{hashes} hashes for {chunks} chunks; give one hash a chunk, from the first chunk on")]
    HashCount {
        /// Hashes given.
        hashes: usize,
        /// Chunks they should name.
        chunks: usize,
    },
    /// A chunk is larger than any memory.
    #[error(
        "{num_tokens} tokens take {layer_bytes} bytes in each of {num_layers} layers, more than an address can name; ask for fewer tokens"
    )]
    ChunkTooLarge {
        /// Tokens of the chunk.
        num_tokens: usize,
        /// Bytes they take in one layer.
        layer_bytes: usize,
        /// Layers.
        num_layers: usize,
    },
    /// An object does not hold the chunk it is to be copied with.
    #[error(
        "a memory object of {found} bytes for {num_tokens} tokens, which take {expected}; allocate one of that size"
    )]
    ObjectSize {
        /// Tokens of the chunk.
        num_tokens: usize,
        /// Bytes they take over all layers.
        expected: usize,
        /// Bytes of the object.
        found: usize,
    },
    /// Only whole blocks come out of another process's pool.
    #[error("a load out of another process's pool was given slots; give it a block table")]
    NoBlockTable,
    /// A layer that is not there.
    #[error("layer {layer} of a cache of {num_layers} layers; count layers from 0")]
    NoSuchLayer {
        /// Layer asked for.
        layer: usize,
        /// Layers registered.
        num_layers: usize,
    },
    /// One layer's memory was given for another number of spans.
    #[error("memory of {found} chunks for {spans} spans of tokens; give one layer of each chunk")]
    SpanCount {
        /// Pieces of memory given.
        found: usize,
        /// Spans planned.
        spans: usize,
    },
    /// A piece of memory is not one layer of its span.
    #[error(
        "memory of {found} bytes for one layer of {num_tokens} tokens, which takes {expected}; give one layer of the chunk"
    )]
    LayerSize {
        /// Tokens of the span.
        num_tokens: usize,
        /// Bytes they take in one layer.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// Keys could not be shifted to other positions.
    #[error("keys cannot be shifted: {reason}; check the frequencies, the heads and the positions")]
    Rope {
        /// What does not fit.
        reason: String,
    },
}
