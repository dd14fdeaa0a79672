//! The copies of one chunk, told by strides: a few numbers for the layout, and one entry for each stretch of
//! rows that lie at even distances. A plan serves every layer and stays small enough to be in cache for each.

use super::{PagedLayout, whole_blocks};
use crate::error::CoreError;

/// Where the tokens of a chunk lie in the paged cache.
#[derive(Debug, Clone, Copy)]
pub enum Placement<'a> {
    /// The blocks that hold the chunk, in order.
    Blocks(&'a [u32]),
    /// One slot a token, block × tokens per block + offset; -1 is skipped.
    Slots(&'a [i64]),
}

/// Equal steps through the paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Steps.
    pub count: usize,
    /// From one to the next in the paged cache, in bytes.
    pub stride: usize,
}

/// What every row of a plan is made of. A row is a token, or a block of which only the whole has a meaning.
///
/// In the chunk a row is contiguous: `outer.count × inner.count` runs, the inner axis innermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// From one row of a stretch to the next in the paged cache, in bytes.
    pub row_stride: usize,
    /// Planes, unless they are part of the run.
    pub outer: Axis,
    /// Heads, unless they are part of the run.
    pub inner: Axis,
    /// Bytes that lie together on both sides.
    pub run_bytes: usize,
}

/// Rows that follow each other in the chunk, and at even distances in the paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Distance of the first row from the base of the engine's layer, in bytes.
    pub paged: usize,
    /// Distance of the first row from the start of the layer in the chunk, in bytes.
    pub chunk: usize,
    /// Rows.
    pub rows: usize,
}

/// One contiguous copy within a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Distance from the base of the engine's layer, in bytes.
    pub paged: usize,
    /// Distance from the start of the layer in the chunk, in bytes.
    pub chunk: usize,
    /// Bytes to copy.
    pub len: usize,
}

/// The copies that move a chunk's tokens for one layer; the same for all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    grid: Grid,
    stretches: Vec<Stretch>,
}

impl Grid {
    /// Of a layout that `validate` has accepted.
    fn of(layout: &PagedLayout) -> Self {
        let once = Axis {
            count: 1,
            stride: 0,
        };
        match *layout {
            PagedLayout::Opaque {
                block_bytes,
                block_stride,
                ..
            } => Self {
                row_stride: block_stride,
                outer: once,
                inner: once,
                run_bytes: block_bytes,
            },
            PagedLayout::Tokens {
                block_tokens,
                block_stride,
                token_stride,
                planes,
                plane_stride,
                heads,
                head_stride,
                run_bytes,
            } => {
                let mut grid = Self {
                    // A block of one token never takes a step from token to token.
                    row_stride: if block_tokens == 1 {
                        block_stride
                    } else {
                        token_stride
                    },
                    outer: Axis {
                        count: planes,
                        stride: plane_stride,
                    },
                    inner: Axis {
                        count: heads,
                        stride: head_stride,
                    },
                    run_bytes,
                };
                // Neighbours on both sides are one run.
                if heads == 1 || head_stride == run_bytes {
                    grid.run_bytes *= heads;
                    grid.inner = once;
                    if planes == 1 || plane_stride == grid.run_bytes {
                        grid.run_bytes *= planes;
                        grid.outer = once;
                    }
                }
                grid
            }
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.outer.count * self.inner.count * self.run_bytes
    }

    /// Whether the rows of a stretch are one run together.
    pub fn is_dense(&self) -> bool {
        self.row_stride == self.run_bytes && self.outer.count * self.inner.count == 1
    }
}

impl CopyPlan {
    /// Plans the copy of the chunk tokens `skip..num_tokens`, placed as `placement` says.
    ///
    /// `placement` covers the chunk from its first token; `num_blocks` bounds it, and `layout` must be valid
    /// for that many. Rows at even distances are joined.
    pub fn build(
        layout: &PagedLayout,
        num_blocks: usize,
        num_tokens: usize,
        skip: usize,
        placement: Placement<'_>,
    ) -> Result<Self, CoreError> {
        // Offsets in the chunk are below this, offsets in the cache below what `validate` has counted.
        layout.layer_bytes(num_tokens)?;
        let mut plan = Self {
            grid: Grid::of(layout),
            stretches: Vec::new(),
        };
        match *layout {
            PagedLayout::Opaque {
                block_tokens,
                block_stride,
                ..
            } => {
                let last = whole_blocks(block_tokens, "the chunk's end", num_tokens)?;
                let first = whole_blocks(block_tokens, "the number of tokens to skip", skip)?;
                for index in first..last {
                    let block = match placement {
                        Placement::Blocks(blocks) => block_of(blocks, index, num_blocks)?,
                        Placement::Slots(slots) => {
                            let of_block =
                                slots.get(index * block_tokens..(index + 1) * block_tokens);
                            let of_block =
                                of_block.ok_or_else(|| missing(slots.len(), num_blocks))?;
                            match whole_block_of(of_block)? {
                                Some(block) => inside(block, num_blocks)?,
                                None => continue,
                            }
                        }
                    };
                    plan.push(block * block_stride, index, 1);
                }
            }
            PagedLayout::Tokens {
                block_tokens,
                block_stride,
                token_stride,
                ..
            } => {
                let mut token = skip;
                while token < num_tokens {
                    let (block, offset, rows) = match placement {
                        Placement::Blocks(blocks) => {
                            let offset = token % block_tokens;
                            let block = block_of(blocks, token / block_tokens, num_blocks)?;
                            (block, offset, block_tokens - offset)
                        }
                        Placement::Slots(slots) => {
                            let slots = slots
                                .get(token..)
                                .filter(|slots| !slots.is_empty())
                                .ok_or_else(|| missing(slots.len(), num_blocks))?;
                            let slot = slots[0];
                            if slot == -1 {
                                token += 1;
                                continue;
                            }
                            let block = inside(slot.div_euclid(block_tokens as i64), num_blocks)?;
                            let offset = slot.rem_euclid(block_tokens as i64) as usize;
                            // Slots that count on within the block need no division of their own.
                            let in_order = slots[..slots.len().min(block_tokens - offset)]
                                .iter()
                                .zip(0..)
                                .take_while(|&(&next, step)| slot.checked_add(step) == Some(next));
                            (block, offset, in_order.count())
                        }
                    };
                    let rows = rows.min(num_tokens - token);
                    plan.push(block * block_stride + offset * token_stride, token, rows);
                    token += rows;
                }
            }
        }
        Ok(plan)
    }

    /// What every row is made of.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Rows at even distances, in order of the chunk.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Bytes the plan moves in one layer.
    pub fn bytes(&self) -> usize {
        let rows: usize = self.stretches.iter().map(|stretch| stretch.rows).sum();
        rows * self.grid.row_bytes()
    }

    /// The plan as single copies, in order of the chunk.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let grid = self.grid;
        self.stretches.iter().flat_map(move |stretch| {
            let (rows, run_bytes) = if grid.is_dense() {
                (1, stretch.rows * grid.run_bytes)
            } else {
                (stretch.rows, grid.run_bytes)
            };
            let steps = (0..rows).flat_map(move |row| {
                (0..grid.outer.count).flat_map(move |outer| {
                    (0..grid.inner.count).map(move |inner| (row, outer, inner))
                })
            });
            steps.zip(0..).map(move |((row, outer, inner), at)| Run {
                paged: stretch.paged
                    + row * grid.row_stride
                    + outer * grid.outer.stride
                    + inner * grid.inner.stride,
                chunk: stretch.chunk + at * run_bytes,
                len: run_bytes,
            })
        })
    }

    /// Adds `rows` rows, of which the first is the chunk's `row`-th.
    fn push(&mut self, paged: usize, row: usize, rows: usize) {
        let chunk = row * self.grid.row_bytes();
        if let Some(last) = self.stretches.last_mut()
            && last.chunk + last.rows * self.grid.row_bytes() == chunk
            // Of a single block the stride may be any number.
            && last.rows.checked_mul(self.grid.row_stride) == paged.checked_sub(last.paged)
        {
            last.rows += rows;
            return;
        }
        self.stretches.push(Stretch { paged, chunk, rows });
    }
}

fn block_of(blocks: &[u32], index: usize, num_blocks: usize) -> Result<usize, CoreError> {
    let block = blocks.get(index);
    let block = block.ok_or_else(|| missing(blocks.len(), num_blocks))?;
    inside(i64::from(*block), num_blocks)
}

/// The block that a block's worth of slots covers in order; `None` if all of them are -1.
fn whole_block_of(slots: &[i64]) -> Result<Option<i64>, CoreError> {
    let block_tokens = slots.len();
    if slots.iter().all(|&slot| slot == -1) {
        return Ok(None);
    }
    let first = slots[0];
    let in_order = slots
        .iter()
        .zip(0..)
        .all(|(&slot, offset)| first.checked_add(offset) == Some(slot));
    if first.rem_euclid(block_tokens as i64) != 0 || !in_order {
        return Err(CoreError::PartialBlock {
            block_tokens,
            what: "the first slot of a run of slots that is no whole block",
            found: first.max(0) as usize,
        });
    }
    Ok(Some(first.div_euclid(block_tokens as i64)))
}

fn inside(block: i64, num_blocks: usize) -> Result<usize, CoreError> {
    usize::try_from(block)
        .ok()
        .filter(|&block| block < num_blocks)
        .ok_or(CoreError::BlockOutside { block, num_blocks })
}

fn missing(given: usize, num_blocks: usize) -> CoreError {
    CoreError::Layout {
        reason: format!(
            "the block table or slot mapping ends after {given} entries, before the chunk does (cache of {num_blocks} blocks)"
        ),
    }
}
