//! Descriptors for a GPU's copy engines: what joining neighbours costs for each run of a plan.

use std::hint::black_box;

use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_transfer::cuda::descriptors::append;

use crate::sample::{Case, Numbers, timed};

const BLOCK_TOKENS: usize = 16;
const HEADS: usize = 8;
const RUN_BYTES: usize = 256;
const NUM_BLOCKS: usize = 4096;

/// A chunk of 256 tokens at 16 a block, in blocks that follow each other and in blocks that do not; samples are
/// of all runs, `runs` says how many.
pub(crate) fn run(quick: bool) {
    let repetitions = if quick { 200 } else { 2000 };
    // K and V planes of a block apart, and heads side by side or apart; the last one is whole blocks.
    let tokens = |heads: usize, head_stride, run_bytes| PagedLayout::Tokens {
        block_tokens: BLOCK_TOKENS,
        block_stride: 2 * BLOCK_TOKENS * HEADS * RUN_BYTES,
        token_stride: if heads == 1 { run_bytes } else { RUN_BYTES },
        planes: 2,
        plane_stride: BLOCK_TOKENS * HEADS * RUN_BYTES,
        heads,
        head_stride,
        run_bytes,
    };
    let layouts = [
        ("heads together", tokens(1, 0, HEADS * RUN_BYTES)),
        (
            "heads apart",
            tokens(HEADS, BLOCK_TOKENS * RUN_BYTES, RUN_BYTES),
        ),
        (
            "whole blocks",
            PagedLayout::Opaque {
                block_tokens: BLOCK_TOKENS,
                block_bytes: 2 * BLOCK_TOKENS * HEADS * RUN_BYTES,
                block_stride: 2 * BLOCK_TOKENS * HEADS * RUN_BYTES,
            },
        ),
    ];
    let blocks = 256;
    let orders: [(&str, Vec<u32>); 2] = [
        ("in order", (0..blocks).collect()),
        ("scattered", Numbers(5).shuffled(NUM_BLOCKS)),
    ];
    for (layout_name, layout) in layouts {
        for (order_name, table) in &orders {
            let num_tokens = blocks as usize * BLOCK_TOKENS;
            let placement = Placement::Blocks(&table[..blocks as usize]);
            let plan = CopyPlan::build(&layout, NUM_BLOCKS, num_tokens, 0, placement);
            let plan = plan.expect("inside");
            let runs: Vec<_> = plan.runs().collect();
            // As a naive list has them: a run for each row, where rows are one run together too.
            let row_bytes = plan.grid().run_bytes;
            let naive: Vec<_> = runs
                .iter()
                .flat_map(|run| {
                    (0..run.len / row_bytes).map(move |at| lmcache_core::layout::Run {
                        paged: run.paged + at * row_bytes,
                        chunk: run.chunk + at * row_bytes,
                        len: row_bytes,
                    })
                })
                .collect();
            let mut made = Vec::with_capacity(naive.len());
            let samples: Vec<u64> = (0..repetitions)
                .map(|_| {
                    made.clear();
                    let joined = || {
                        append(
                            &mut made,
                            1 << 30,
                            1 << 20,
                            black_box(&naive).iter().copied(),
                        )
                    };
                    timed(joined).0
                })
                .collect();
            Case::new(&format!("descriptors {layout_name}, blocks {order_name}"))
                .samples("ours", &samples)
                .fact("runs", naive.len() as f64)
                .fact("descriptors", made.len() as f64)
                .print();
        }
    }
}
