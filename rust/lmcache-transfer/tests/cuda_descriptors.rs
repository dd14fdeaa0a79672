//! Descriptors for the copy engines: the very bytes that the naive list moves, and no fewer can do it.

mod common;

use lmcache_core::layout::{CopyPlan, PagedLayout, Placement, Run};
use lmcache_transfer::cuda::descriptors::{Descriptor, append};
use proptest::prelude::*;

/// Byte by byte: from where in the layer to where in the chunk.
fn bytes_of(runs: impl Iterator<Item = (u64, u64, usize)>) -> Vec<(u64, u64)> {
    runs.flat_map(|(paged, stored, len)| (0..len as u64).map(move |at| (paged + at, stored + at)))
        .collect()
}

/// Stretches in which each byte is the next one's neighbour on both sides: as few copies as there can be.
fn fewest(bytes: &[(u64, u64)]) -> usize {
    let breaks = bytes
        .windows(2)
        .filter(|pair| (pair[0].0 + 1, pair[0].1 + 1) != pair[1]);
    breaks.count() + usize::from(!bytes.is_empty())
}

fn check(address: u64, runs: &[Run]) -> Result<(), TestCaseError> {
    let mut made = Vec::new();
    append(&mut made, address, 4096, runs.iter().copied());
    let naive = runs
        .iter()
        .map(|run| (run.paged as u64, address + run.chunk as u64, run.len));
    let wanted = bytes_of(naive);
    let found = bytes_of(
        made.iter()
            .map(|one: &Descriptor| (one.paged, one.stored, one.len)),
    );
    prop_assert_eq!(&found, &wanted);
    prop_assert_eq!(made.len(), fewest(&wanted));
    prop_assert!(
        made.iter()
            .all(|one| one.layer_bytes == 4096 && one.len > 0)
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Any runs at all, many of them neighbours on one side or both.
    #[test]
    fn any_list_is_moved_whole_by_the_fewest_copies(
        address in 1u64..1 << 40,
        steps in prop::collection::vec((1usize..9, 0usize..3, 0usize..3), 0..60),
    ) {
        let (mut paged, mut chunk, mut runs) = (0, 0, Vec::new());
        for (len, paged_gap, chunk_gap) in steps {
            (paged, chunk) = (paged + paged_gap / 2, chunk + chunk_gap / 2);
            runs.push(Run { paged, chunk, len });
            (paged, chunk) = (paged + len, chunk + len);
        }
        check(address, &runs)?;
    }

    /// The plans of caches: neighbouring blocks, and planes and heads that lie side by side or apart.
    #[test]
    fn plans_are_moved_whole_by_the_fewest_copies(
        blocks in prop::collection::vec(0u32..12, 1..8),
        (block_tokens, planes, heads) in (1usize..5, 1usize..3, 1usize..4),
        (unit, gap, order) in (1usize..5, 0usize..2, 0usize..3),
        skip in 0usize..6,
    ) {
        let inner = heads * unit;
        let (token_stride, plane_stride, head_stride) = match order {
            // [planes, tokens, heads], [tokens, planes, heads] and [heads, planes, tokens] in a block.
            0 => (inner, block_tokens * inner, unit),
            1 => (planes * inner, inner, unit),
            _ => (unit, block_tokens * unit, planes * block_tokens * unit),
        };
        let layout = PagedLayout::Tokens {
            block_tokens,
            block_stride: planes * block_tokens * inner + gap,
            token_stride,
            planes,
            plane_stride,
            heads,
            head_stride,
            run_bytes: unit,
        };
        let mut once = blocks;
        let mut seen = [false; 12];
        once.retain(|&block| !std::mem::replace(&mut seen[block as usize], true));
        let num_tokens = once.len() * block_tokens;
        let plan = CopyPlan::build(&layout, 12, num_tokens, skip.min(num_tokens), Placement::Blocks(&once))
            .expect("inside");
        check(1 << 20, &plan.runs().collect::<Vec<_>>())?;
    }
}
