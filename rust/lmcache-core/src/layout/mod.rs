//! Where a chunk's bytes lie: in an engine's paged cache, and in our own stored form.
//!
//! All index arithmetic of the project is here, as a pure plan; executors only follow it.
//!
//! Stored forms are layer-major, so that a layer of a chunk is one run of bytes:
//!
//! * opaque: `[layers][blocks][block_bytes]`, engine blocks as they are, for caches whose tokens cannot be
//!   addressed (vLLM's CPU attention packs K across the tokens of a block);
//! * tokens: `[layers][tokens][planes][heads × run_bytes]`, i.e. `[tokens, 2, hidden]` for split K and V and
//!   `[tokens, hidden]` for a single plane (MLA).

mod plan;

pub use plan::{Axis, CopyPlan, Grid, Placement, Run, Stretch};

use crate::error::CoreError;

/// How one layer of an engine's paged cache lies in memory; distances in bytes from the layer's base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagedLayout {
    /// Only whole blocks have a meaning.
    Opaque {
        /// Tokens in a block.
        block_tokens: usize,
        /// Bytes of a block.
        block_bytes: usize,
        /// From one block to the next.
        block_stride: usize,
    },
    /// Every token of every head and plane can be addressed.
    Tokens {
        /// Tokens in a block.
        block_tokens: usize,
        /// From one block to the next.
        block_stride: usize,
        /// From one token of a block to the next.
        token_stride: usize,
        /// 2 where K and V are apart, 1 where one vector serves for both (MLA).
        planes: usize,
        /// From K to V.
        plane_stride: usize,
        /// Heads of this rank.
        heads: usize,
        /// From one head to the next.
        head_stride: usize,
        /// Contiguous bytes of one head of one token in one plane.
        run_bytes: usize,
    },
}

impl PagedLayout {
    /// Tokens in a block.
    pub fn block_tokens(&self) -> usize {
        match *self {
            Self::Opaque { block_tokens, .. } | Self::Tokens { block_tokens, .. } => block_tokens,
        }
    }

    /// Bytes that one layer of a chunk of `num_tokens` takes in the stored form.
    pub fn layer_bytes(&self, num_tokens: usize) -> Result<usize, CoreError> {
        match *self {
            Self::Opaque {
                block_tokens,
                block_bytes,
                ..
            } => product(&[
                whole_blocks(block_tokens, "the chunk's size", num_tokens)?,
                block_bytes,
            ]),
            Self::Tokens {
                planes,
                heads,
                run_bytes,
                ..
            } => product(&[num_tokens, planes, heads, run_bytes]),
        }
    }

    /// Checks that `num_blocks` blocks of this layout stay within a layer of `layer_len` bytes and that no
    /// two of them overlap.
    pub fn validate(&self, num_blocks: usize, layer_len: usize) -> Result<(), CoreError> {
        let fail = |reason: String| Err(CoreError::Layout { reason });
        // `count` steps of `stride` on top of `bytes`.
        let span = |bytes: usize, count: usize, stride: usize| {
            let steps = count.saturating_sub(1).checked_mul(stride);
            steps
                .and_then(|steps| steps.checked_add(bytes))
                .ok_or_else(too_large)
        };
        let (block_tokens, block_stride, reach) = match *self {
            Self::Opaque {
                block_tokens,
                block_bytes,
                block_stride,
            } => {
                if block_bytes > block_stride {
                    return fail(format!(
                        "block_bytes {block_bytes} exceeds block_stride {block_stride}"
                    ));
                }
                (block_tokens, block_stride, block_bytes)
            }
            Self::Tokens {
                block_tokens,
                block_stride,
                token_stride,
                planes,
                plane_stride,
                heads,
                head_stride,
                run_bytes,
            } => {
                let mut axes = [
                    (num_blocks, block_stride),
                    (block_tokens, token_stride),
                    (planes, plane_stride),
                    (heads, head_stride),
                ];
                // Runs may not overlap: sorted by stride, each axis must step over all that lies within it.
                axes.sort_by_key(|&(_, stride)| stride);
                let mut covered = run_bytes;
                for (count, stride) in axes {
                    if count > 1 && stride < covered {
                        return fail(format!(
                            "a stride of {stride} bytes overlaps a run of {covered}"
                        ));
                    }
                    covered = span(covered, count, stride)?;
                }
                if planes == 0 || heads == 0 || run_bytes == 0 {
                    return fail("planes, heads and run_bytes must be at least 1".into());
                }
                let mut reach = span(run_bytes, block_tokens, token_stride)?;
                reach = span(reach, planes, plane_stride)?;
                reach = span(reach, heads, head_stride)?;
                (block_tokens, block_stride, reach)
            }
        };
        if block_tokens == 0 || reach == 0 {
            return fail("a block needs at least one token and one byte".into());
        }
        if i64::try_from(block_tokens).is_err() {
            return Err(too_large());
        }
        let needed = span(reach, num_blocks, block_stride)?;
        if num_blocks == 0 || needed > layer_len {
            return fail(format!(
                "{num_blocks} blocks need {needed} bytes a layer, found {layer_len}"
            ));
        }
        Ok(())
    }
}

fn product(factors: &[usize]) -> Result<usize, CoreError> {
    let times = |product: usize, factor: &usize| product.checked_mul(*factor);
    factors.iter().try_fold(1, times).ok_or_else(too_large)
}

fn too_large() -> CoreError {
    CoreError::Layout {
        reason: "its sizes multiply to more bytes than an address can name".into(),
    }
}

fn whole_blocks(
    block_tokens: usize,
    what: &'static str,
    tokens: usize,
) -> Result<usize, CoreError> {
    if tokens.is_multiple_of(block_tokens) {
        Ok(tokens / block_tokens)
    } else {
        Err(CoreError::PartialBlock {
            block_tokens,
            what,
            found: tokens,
        })
    }
}

#[cfg(test)]
mod tests;
