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

/// Where the tokens of a chunk lie in the paged cache.
#[derive(Debug, Clone, Copy)]
pub enum Placement<'a> {
    /// The blocks that hold the chunk, in order.
    Blocks(&'a [u32]),
    /// One slot a token, block × tokens per block + offset; -1 is skipped.
    Slots(&'a [i64]),
}

/// The copies that move a chunk's tokens for one layer; the same for all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    /// Coalesced runs, in order of the chunk.
    pub runs: Vec<Run>,
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

impl CopyPlan {
    /// Plans the copy of the chunk tokens `skip..num_tokens`, placed as `placement` says.
    ///
    /// `placement` covers the chunk from its first token; `num_blocks` bounds it. Neighbouring runs are joined.
    pub fn build(
        layout: &PagedLayout,
        num_blocks: usize,
        num_tokens: usize,
        skip: usize,
        placement: Placement<'_>,
    ) -> Result<Self, CoreError> {
        let mut plan = Self { runs: Vec::new() };
        // Offsets in the chunk are below this, offsets in the cache below what `validate` has counted.
        layout.layer_bytes(num_tokens)?;
        match *layout {
            PagedLayout::Opaque {
                block_tokens,
                block_bytes,
                block_stride,
            } => {
                let last = whole_blocks(block_tokens, "the chunk's end", num_tokens)?;
                let first = whole_blocks(block_tokens, "the number of tokens to skip", skip)?;
                for index in first..last {
                    let block = match placement {
                        Placement::Blocks(blocks) => i64::from(
                            *blocks
                                .get(index)
                                .ok_or_else(|| missing(blocks.len(), num_blocks))?,
                        ),
                        Placement::Slots(slots) => {
                            let of_block =
                                slots.get(index * block_tokens..(index + 1) * block_tokens);
                            let of_block =
                                of_block.ok_or_else(|| missing(slots.len(), num_blocks))?;
                            match whole_block_of(of_block)? {
                                Some(block) => block,
                                None => continue,
                            }
                        }
                    };
                    let block = inside(block, num_blocks)?;
                    plan.push(Run {
                        paged: block * block_stride,
                        chunk: index * block_bytes,
                        len: block_bytes,
                    });
                }
            }
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
                for token in skip..num_tokens {
                    let (block, offset) = match placement {
                        Placement::Blocks(blocks) => {
                            let block = blocks.get(token / block_tokens);
                            let block = block.ok_or_else(|| missing(blocks.len(), num_blocks))?;
                            (i64::from(*block), token % block_tokens)
                        }
                        Placement::Slots(slots) => {
                            let slot = *slots
                                .get(token)
                                .ok_or_else(|| missing(slots.len(), num_blocks))?;
                            if slot == -1 {
                                continue;
                            }
                            (
                                slot.div_euclid(block_tokens as i64),
                                slot.rem_euclid(block_tokens as i64) as usize,
                            )
                        }
                    };
                    let token_base =
                        inside(block, num_blocks)? * block_stride + offset * token_stride;
                    for plane in 0..planes {
                        for head in 0..heads {
                            plan.push(Run {
                                paged: token_base + plane * plane_stride + head * head_stride,
                                chunk: ((token * planes + plane) * heads + head) * run_bytes,
                                len: run_bytes,
                            });
                        }
                    }
                }
            }
        }
        Ok(plan)
    }

    /// Bytes the plan moves in one layer.
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    fn push(&mut self, run: Run) {
        if let Some(last) = self.runs.last_mut()
            && last.paged + last.len == run.paged
            && last.chunk + last.len == run.chunk
        {
            last.len += run.len;
            return;
        }
        self.runs.push(run);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn apply(plan: &CopyPlan, gather: bool, paged: &mut [u8], chunk: &mut [u8]) {
        for run in &plan.runs {
            let (p, c) = (
                run.paged..run.paged + run.len,
                run.chunk..run.chunk + run.len,
            );
            if gather {
                chunk[c].copy_from_slice(&paged[p]);
            } else {
                paged[p].copy_from_slice(&chunk[c]);
            }
        }
    }

    /// Strides of the four axes for a random memory order of (block, plane, head, token).
    fn tokens_layout(
        order: [usize; 4],
        sizes: [usize; 4],
        run_bytes: usize,
    ) -> (PagedLayout, usize) {
        let mut strides = [0; 4];
        let mut stride = run_bytes;
        for &axis in order.iter().rev() {
            strides[axis] = stride;
            stride *= sizes[axis];
        }
        let layout = PagedLayout::Tokens {
            block_tokens: sizes[3],
            block_stride: strides[0],
            token_stride: strides[3],
            planes: sizes[1],
            plane_stride: strides[1],
            heads: sizes[2],
            head_stride: strides[2],
            run_bytes,
        };
        (layout, stride)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]
        #[test]
        fn tokens_plan_equals_the_naive_loop(
            order in Just([0usize, 1, 2, 3]).prop_shuffle(),
            blocks in 2usize..5, planes in 1usize..3, heads in 1usize..4, block_tokens in 1usize..5,
            run_bytes in 1usize..5, num_tokens in 1usize..12, skip in 0usize..12, seed in any::<u64>(),
        ) {
            let sizes = [blocks, planes, heads, block_tokens];
            let (layout, len) = tokens_layout(order, sizes, run_bytes);
            layout.validate(blocks, len).expect("a dense layout is valid");
            let slots_in_cache = (blocks * block_tokens) as i64;
            let mut state = seed | 1;
            let mut random = |bound: i64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 33) as i64) % bound
            };
            // Distinct slots, some of them skipped.
            let mut free: Vec<i64> = (0..slots_in_cache).collect();
            let slots: Vec<i64> = (0..num_tokens).map(|_| {
                if free.is_empty() || random(5) == 0 { -1 } else { free.swap_remove(random(free.len() as i64) as usize) }
            }).collect();
            let plan = CopyPlan::build(&layout, blocks, num_tokens, skip, Placement::Slots(&slots)).expect("inside");
            let paged: Vec<u8> = (0..len).map(|byte| byte as u8).collect();
            let layer_bytes = layout.layer_bytes(num_tokens).expect("any size");
            let mut chunk = vec![0xee; layer_bytes];
            apply(&plan, true, &mut paged.clone(), &mut chunk);
            let PagedLayout::Tokens { block_stride, token_stride, plane_stride, head_stride, .. } = layout
                else { unreachable!() };
            let mut expected = vec![0xee; layer_bytes];
            for token in skip..num_tokens {
                if slots[token] < 0 { continue; }
                let (block, offset) = (slots[token] as usize / block_tokens, slots[token] as usize % block_tokens);
                for plane in 0..planes { for head in 0..heads { for byte in 0..run_bytes {
                    let from = block * block_stride + offset * token_stride + plane * plane_stride
                        + head * head_stride + byte;
                    expected[((token * planes + plane) * heads + head) * run_bytes + byte] = paged[from];
                }}}
            }
            prop_assert_eq!(&chunk, &expected);
            let mut scattered = vec![0xdd; len];
            apply(&plan, false, &mut scattered, &mut chunk);
            for (byte, (after, before)) in scattered.iter().zip(&paged).enumerate() {
                let touched = plan.runs.iter().any(|run| (run.paged..run.paged + run.len).contains(&byte));
                prop_assert_eq!(*after, if touched { *before } else { 0xdd });
            }
            prop_assert!(plan.runs.windows(2).all(|pair| pair[0].chunk + pair[0].len <= pair[1].chunk));
        }

        #[test]
        fn blocks_and_slots_give_one_plan(
            table in Just((0u32..6).collect::<Vec<_>>()).prop_shuffle(),
            block_tokens in 1usize..5, skip_blocks in 0usize..4, opaque in any::<bool>(),
        ) {
            let layout = if opaque {
                PagedLayout::Opaque { block_tokens, block_bytes: 7, block_stride: 9 }
            } else {
                tokens_layout([1, 0, 3, 2], [6, 2, 2, block_tokens], 3).0
            };
            let num_tokens = 4 * block_tokens;
            let slots: Vec<i64> = (0..num_tokens)
                .map(|token| i64::from(table[token / block_tokens]) * block_tokens as i64 + (token % block_tokens) as i64)
                .collect();
            let skip = skip_blocks * block_tokens;
            let by_blocks = CopyPlan::build(&layout, 6, num_tokens, skip, Placement::Blocks(&table));
            let by_slots = CopyPlan::build(&layout, 6, num_tokens, skip, Placement::Slots(&slots));
            prop_assert_eq!(by_blocks, by_slots);
        }
    }

    #[test]
    fn neighbouring_blocks_are_one_run() {
        let layout = PagedLayout::Opaque {
            block_tokens: 2,
            block_bytes: 10,
            block_stride: 10,
        };
        let plan =
            CopyPlan::build(&layout, 9, 8, 2, Placement::Blocks(&[0, 3, 4, 8])).expect("inside");
        assert_eq!(
            plan.runs,
            [
                Run {
                    paged: 30,
                    chunk: 10,
                    len: 20
                },
                Run {
                    paged: 80,
                    chunk: 30,
                    len: 10
                }
            ]
        );
    }

    #[test]
    fn part_of_an_opaque_block_is_refused() {
        let layout = PagedLayout::Opaque {
            block_tokens: 4,
            block_bytes: 10,
            block_stride: 10,
        };
        let build = |tokens, skip, slots: &[i64]| {
            CopyPlan::build(&layout, 9, tokens, skip, Placement::Slots(slots))
                .map(|plan| plan.runs.len())
        };
        assert_eq!(build(4, 0, &[4, 5, 6, 7]), Ok(1));
        assert!(build(3, 0, &[4, 5, 6]).is_err());
        assert!(build(4, 1, &[4, 5, 6, 7]).is_err());
        assert!(build(4, 0, &[4, 5, 7, 6]).is_err());
        assert!(build(4, 0, &[5, 6, 7, 8]).is_err());
        assert_eq!(build(4, 0, &[-1; 4]), Ok(0));
    }

    #[test]
    fn blocks_outside_the_cache_are_refused() {
        let layout = PagedLayout::Opaque {
            block_tokens: 1,
            block_bytes: 1,
            block_stride: 1,
        };
        let build =
            |slots: &[i64]| CopyPlan::build(&layout, 3, 1, 0, Placement::Slots(slots)).is_ok();
        assert_eq!(
            [build(&[2]), build(&[3]), build(&[-2])],
            [true, false, false]
        );
        assert!(CopyPlan::build(&layout, 3, 2, 0, Placement::Blocks(&[1])).is_err());
    }

    #[test]
    fn sizes_and_slots_beyond_all_memory_are_refused() {
        let opaque = |block_bytes| PagedLayout::Opaque {
            block_tokens: 1,
            block_bytes,
            block_stride: 1 << 62,
        };
        assert!(opaque(8).validate(1 << 62, usize::MAX).is_err());
        assert!(opaque(1 << 62).layer_bytes(8).is_err());
        let (dense, _) = tokens_layout([0, 1, 2, 3], [2, 2, 3, 4], 5);
        assert!(dense.layer_bytes(usize::MAX).is_err());
        let huge = tokens_layout([0, 1, 2, 3], [2, 1, 1, 1], 1 << 62).0;
        assert!(huge.validate(8, usize::MAX).is_err());
        let blocks = PagedLayout::Opaque {
            block_tokens: 4,
            block_bytes: 8,
            block_stride: 8,
        };
        let at_the_end: Vec<i64> = (i64::MAX - 3..=i64::MAX).collect();
        for slots in [&at_the_end[..], &[i64::MAX; 4], &[i64::MIN; 4]] {
            assert!(CopyPlan::build(&blocks, 9, 4, 0, Placement::Slots(slots)).is_err());
            assert!(CopyPlan::build(&dense, 2, 4, 0, Placement::Slots(slots)).is_err());
        }
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let opaque = |block_bytes, block_stride| PagedLayout::Opaque {
            block_tokens: 4,
            block_bytes,
            block_stride,
        };
        assert!(opaque(10, 10).validate(3, 30).is_ok());
        assert!(opaque(10, 10).validate(3, 29).is_err());
        assert!(opaque(11, 10).validate(3, 300).is_err());
        assert!(opaque(10, 10).validate(0, 300).is_err());
        let (dense, len) = tokens_layout([0, 1, 2, 3], [2, 2, 3, 4], 5);
        assert!(dense.validate(2, len).is_ok());
        let PagedLayout::Tokens {
            block_tokens,
            block_stride,
            token_stride,
            planes,
            heads,
            head_stride,
            run_bytes,
            ..
        } = dense
        else {
            unreachable!()
        };
        let overlapping = PagedLayout::Tokens {
            block_tokens,
            block_stride,
            token_stride,
            planes,
            plane_stride: 3,
            heads,
            head_stride,
            run_bytes,
        };
        assert!(overlapping.validate(2, len).is_err());
    }
}
