//! Errors of this crate: what was asked, what was found, what to change.

use thiserror::Error;

/// Why a pure decision could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CoreError {
    /// A chunk of zero tokens was asked for.
    #[error("chunk_size is 0; set it to the number of tokens in a chunk, e.g. 256")]
    ZeroChunkSize,
    /// A mask had `true` before `false`.
    #[error(
        "mask is True at position {first_true} and False again at {false_at}; a mask is a run of False followed by a run of True"
    )]
    MaskNotPrefix {
        /// Position of the first `true`.
        first_true: usize,
        /// Position of the `false` found behind it.
        false_at: usize,
    },
    /// A mask covers another number of tokens than it was given with.
    #[error("mask has {mask_len} entries for {num_tokens} tokens; give one bool per token")]
    MaskLength {
        /// Entries in the mask.
        mask_len: usize,
        /// Tokens it should cover.
        num_tokens: usize,
    },
    /// A mask's leading run of `false` ends inside a chunk.
    #[error(
        "mask has {num_false} leading False entries, no multiple of chunk_size {chunk_size}; use {floor} or {ceil}"
    )]
    MaskNotChunkAligned {
        /// Leading `false` entries found.
        num_false: usize,
        /// Tokens in a chunk.
        chunk_size: usize,
        /// Nearest valid count below.
        floor: usize,
        /// Nearest valid count above.
        ceil: usize,
    },
    /// A key string could not be read back.
    #[error("cannot read cache key {key:?}: {reason}")]
    KeySyntax {
        /// The string as given, cut to a printable length.
        key: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A namespace is too long to be part of a key.
    #[error(
        "a key's namespace takes {num_bytes} bytes, most of them in {longest}, and may take {limit}; use shorter names and tags (each byte outside A-Z a-z 0-9 . _ - takes three)"
    )]
    NamespaceTooLong {
        /// Bytes of its text form.
        num_bytes: usize,
        /// Bytes it may have.
        limit: usize,
        /// The field that takes the most, cut to a printable length.
        longest: String,
    },
    /// A layout's numbers contradict each other.
    #[error("paged layout is impossible: {reason}")]
    Layout {
        /// Which numbers, and what would be right.
        reason: String,
    },
    /// A block or slot lies outside the registered cache.
    #[error(
        "block {block} is outside the registered cache of {num_blocks} blocks; check the block table or slot mapping"
    )]
    BlockOutside {
        /// The block asked for.
        block: i64,
        /// Blocks in the cache.
        num_blocks: usize,
    },
    /// A whole-block layout was asked for part of a block.
    #[error(
        "this cache can only be copied in whole blocks of {block_tokens} tokens, but {what} is {found}"
    )]
    PartialBlock {
        /// Tokens in a block.
        block_tokens: usize,
        /// The quantity that cuts a block.
        what: &'static str,
        /// Its value in tokens.
        found: usize,
    },
}
