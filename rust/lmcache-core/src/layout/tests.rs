use proptest::prelude::*;

use super::*;

fn apply(plan: &CopyPlan, gather: bool, paged: &mut [u8], chunk: &mut [u8]) {
    for run in plan.runs() {
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
fn tokens_layout(order: [usize; 4], sizes: [usize; 4], run_bytes: usize) -> (PagedLayout, usize) {
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
        let runs: Vec<Run> = plan.runs().collect();
        prop_assert_eq!(plan.bytes(), runs.iter().map(|run| run.len).sum::<usize>());
        let mut scattered = vec![0xdd; len];
        apply(&plan, false, &mut scattered, &mut chunk);
        for (byte, (after, before)) in scattered.iter().zip(&paged).enumerate() {
            let touched = runs.iter().any(|run| (run.paged..run.paged + run.len).contains(&byte));
            prop_assert_eq!(*after, if touched { *before } else { 0xdd });
        }
        prop_assert!(runs.windows(2).all(|pair| pair[0].chunk + pair[0].len <= pair[1].chunk));
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
    let plan = CopyPlan::build(&layout, 9, 8, 2, Placement::Blocks(&[0, 3, 4, 8])).expect("inside");
    assert_eq!(
        plan.runs().collect::<Vec<_>>(),
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
            .map(|plan| plan.runs().count())
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
    let build = |slots: &[i64]| CopyPlan::build(&layout, 3, 1, 0, Placement::Slots(slots)).is_ok();
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
