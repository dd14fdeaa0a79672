use std::sync::Arc;
use std::thread;

use lmcache_core::layout::Placement;
use proptest::prelude::*;

use super::*;
use crate::copy_job::{ChunkSpan, CopyJob};

const LAYERS: usize = 3;
/// Bytes around everything that may be written.
const GUARD: usize = 192;

/// Lengths below, at and above a line, the fixed lengths, and those of unaligned streaming.
const LENGTHS: [usize; 16] = [
    1, 3, 48, 63, 64, 65, 96, 128, 192, 256, 512, 1000, 1024, 1025, 1088, 2048,
];

/// An engine's memory: layers with padding around them, at a chosen distance from a line's begin.
struct Engine {
    layers: Vec<Vec<u8>>,
    starts: Vec<usize>,
    layer_len: usize,
    layout: PagedLayout,
    num_blocks: usize,
}

impl Engine {
    fn new(layout: PagedLayout, num_blocks: usize, layer_len: usize, off: usize) -> Self {
        let filled = |layer: usize| {
            (0..layer_len + GUARD * 2).map(move |at| (at * 7 + layer * 31 + at / 251) as u8)
        };
        let layers: Vec<Vec<u8>> = (0..LAYERS).map(|layer| filled(layer).collect()).collect();
        let starts = layers.iter().map(|layer| {
            let first = layer.as_ptr().addr() + 64;
            first.next_multiple_of(64) + off - layer.as_ptr().addr()
        });
        Self {
            starts: starts.collect(),
            layers,
            layer_len,
            layout,
            num_blocks,
        }
    }

    fn register(&mut self, tuning: Tuning) -> Arc<PagedCache> {
        let table: Vec<(usize, usize)> = self
            .layers
            .iter_mut()
            .zip(&self.starts)
            .map(|(layer, start)| (layer[*start..].as_mut_ptr().addr(), self.layer_len))
            .collect();
        // SAFETY: the vectors stay where they are as long as the test runs, which alone touches them.
        let paged = unsafe { PagedCache::new(&table, self.layout, self.num_blocks, Box::new(())) };
        Arc::new(paged.expect("a valid layout").with_tuning(tuning))
    }

    /// Where the bytes of a token lie within a layer, in order of the stored form; of a block if opaque.
    fn row(&self, slot: usize) -> Vec<usize> {
        match self.layout {
            PagedLayout::Opaque {
                block_bytes,
                block_stride,
                ..
            } => (0..block_bytes)
                .map(|byte| slot * block_stride + byte)
                .collect(),
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
                let token = slot / block_tokens * block_stride + slot % block_tokens * token_stride;
                let runs = (0..planes).flat_map(|plane| (0..heads).map(move |head| (plane, head)));
                runs.flat_map(|(plane, head)| {
                    let run = token + plane * plane_stride + head * head_stride;
                    run..run + run_bytes
                })
                .collect()
            }
        }
    }
}

fn tuning(stream: bool, num_threads: usize, wide: bool) -> Tuning {
    let stream_from = if stream { 0 } else { usize::MAX };
    Tuning {
        stream_gather_from: stream_from,
        stream_scatter_from: stream_from,
        shared_from: 0,
        max_threads: num_threads,
        even_if_busy: true,
        wide,
    }
}

/// A dense or padded layout of axes (block, plane, head, token) in a random order of memory.
fn layout() -> impl Strategy<Value = (PagedLayout, usize, usize)> {
    let tokens = (
        Just([0usize, 1, 2, 3]).prop_shuffle(),
        [2usize..6, 1..3, 1..4, 1..6],
        prop::sample::select(&LENGTHS[..]),
        // Room behind the steps of each axis, more often none.
        [0usize..8, 0..8, 0..8, 0..8],
    )
        .prop_map(|(order, sizes, run_bytes, rooms)| {
            let mut strides = [0; 4];
            let mut stride = run_bytes;
            for (&axis, room) in order.iter().rev().zip(rooms) {
                strides[axis] = stride;
                stride = stride * sizes[axis] + [1, 64].get(room).unwrap_or(&0);
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
            (layout, sizes[0], stride)
        });
    let opaque = (
        2usize..6,
        1usize..6000,
        prop::sample::select(vec![0usize, 0, 1, 64]),
    )
        .prop_map(|(num_blocks, block_bytes, room)| {
            let layout = PagedLayout::Opaque {
                block_tokens: 1,
                block_bytes,
                block_stride: block_bytes + room,
            };
            (layout, num_blocks, num_blocks * (block_bytes + room))
        });
    prop_oneof![3 => tokens, 1 => opaque]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_style_writes_what_the_naive_loop_writes_and_nothing_else(
        (layout, num_blocks, layer_len) in layout(),
        paged_off in prop::sample::select(vec![0usize, 0, 1, 32]),
        chunk_off in prop::sample::select(vec![0usize, 0, 1, 32]),
        (stream, num_threads, wide) in (any::<bool>(), prop::sample::select(vec![1usize, 2, 4]), prop::bool::weighted(0.8)),
        at_once in any::<bool>(),
        sizes in prop::collection::vec((0usize..8, 0usize..3), 1..4),
        seed in any::<u64>(),
    ) {
        let mut engine = Engine::new(layout, num_blocks, layer_len, paged_off);
        let paged = engine.register(tuning(stream, num_threads, wide));
        let mut state = seed | 1;
        let mut random = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % bound
        };
        // Slots of all chunks: distinct, half of them in order, some without a place.
        let mut free: Vec<i64> = (0..(num_blocks * layout.block_tokens()) as i64).collect();
        let slots: Vec<Vec<i64>> = sizes.iter().map(|&(num_tokens, _)| {
            let mut slots = Vec::new();
            while slots.len() < num_tokens {
                let next = slots.last().and_then(|&last: &i64| free.iter().position(|&slot| slot == last + 1));
                slots.push(match next {
                    _ if free.is_empty() || random(6) == 0 => -1,
                    Some(next) if random(4) > 0 => free.remove(next),
                    _ => free.remove(random(free.len())),
                });
            }
            slots
        }).collect();
        let spans: Vec<ChunkSpan<'_>> = sizes.iter().zip(&slots).map(|(&(num_tokens, skip), slots)| ChunkSpan {
            num_tokens, skip, placement: Placement::Slots(slots),
        }).collect();
        let row_bytes = layout.layer_bytes(1).expect("a token or a block");
        let poison = |chunk: usize| move |at: usize| (at * 5 + chunk * 17 + 3) as u8;
        let mut chunks: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(chunk, &(num_tokens, _))| {
            (0..LAYERS * num_tokens * row_bytes + 2 * GUARD).map(poison(chunk)).collect()
        }).collect();
        let areas: Vec<_> = chunks.iter().zip(&sizes).map(|(chunk, &(num_tokens, _))| {
            let start = (chunk.as_ptr().addr() + 64).next_multiple_of(64) + chunk_off - chunk.as_ptr().addr();
            start..start + LAYERS * num_tokens * row_bytes
        }).collect();

        // What both sides should be: gathered chunks, and an engine into which other bytes were scattered.
        let mut expected_chunks = chunks.clone();
        let mut expected_layers = engine.layers.clone();
        for (chunk, &(num_tokens, skip)) in sizes.iter().enumerate() {
            for (layer, expected) in expected_layers.iter_mut().enumerate() { for (token, &slot) in slots[chunk].iter().enumerate().skip(skip) {
                let Ok(slot) = usize::try_from(slot) else { continue };
                let stored = areas[chunk].start + (layer * num_tokens + token) * row_bytes;
                for (byte, at) in engine.row(slot).into_iter().enumerate() {
                    let at = engine.starts[layer] + at;
                    expected[at] = !engine.layers[layer][at];
                    expected_chunks[chunk][stored + byte] = engine.layers[layer][at];
                }
            }}
        }

        let targets = chunks.iter_mut().zip(&areas).map(|(chunk, area)| &mut chunk[area.clone()]);
        let mut job = CopyJob::begin(&paged, targets.zip(spans.iter().copied())).expect("in range");
        if at_once { job.all_layers() } else { (0..LAYERS).rev().for_each(|layer| job.layer(layer)) }
        drop(job);
        prop_assert_eq!(&chunks, &expected_chunks);

        for (chunk, area) in chunks.iter_mut().zip(&areas) {
            chunk[area.clone()].iter_mut().for_each(|byte| *byte = !*byte);
        }
        let sources = chunks.iter().zip(&areas).map(|(chunk, area)| &chunk[area.clone()]);
        let job = CopyJob::begin(&paged, sources.zip(spans)).expect("in range");
        if at_once { job.all_layers() } else { (0..LAYERS).for_each(|layer| job.layer(layer)) }
        drop(job);
        prop_assert_eq!(&engine.layers, &expected_layers);
    }
}

/// 64 blocks of `block_bytes`, and a chunk that takes them all in reverse order.
fn gather_reversed(tuning: Tuning, block_bytes: usize) -> (Arc<PagedCache>, bool) {
    let layout = PagedLayout::Opaque {
        block_tokens: 1,
        block_bytes,
        block_stride: block_bytes,
    };
    let mut engine = Engine::new(layout, 64, 64 * block_bytes, 0);
    let paged = engine.register(tuning);
    let blocks: Vec<u32> = (0..64).rev().collect();
    let mut chunk = vec![0; LAYERS * 64 * block_bytes];
    let span = ChunkSpan {
        num_tokens: 64,
        skip: 0,
        placement: Placement::Blocks(&blocks),
    };
    let mut job = CopyJob::begin(&paged, [(&mut chunk[..], span)]).expect("in range");
    job.all_layers();
    drop(job);
    let is_right = (0..LAYERS).all(|layer| {
        (0..64).all(|block| {
            let at = engine.starts[layer] + (63 - block) * block_bytes;
            engine.layers[layer][at..at + block_bytes]
                == chunk[(layer * 64 + block) * block_bytes..][..block_bytes]
        })
    });
    (paged, is_right)
}

#[test]
fn threads_start_with_the_first_copy_that_is_large_enough() {
    let own = Tuning {
        shared_from: LAYERS * 64 * 4096,
        ..tuning(true, 2, true)
    };
    let (small, is_right) = gather_reversed(own, 4095);
    assert!(is_right && small.pool.get().is_none());
    let (large, is_right) = gather_reversed(own, 4096);
    let has_started = large.pool.get().is_some();
    assert!(is_right);
    assert_eq!(has_started, pool::allowed_cpus() > 1);
}

#[test]
fn a_thread_bound_to_one_processor_copies_alone() {
    let bound = thread::spawn(|| {
        // SAFETY: all-zero is a valid set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: reads this thread's set, keeps one of its processors, and binds this thread to it.
        unsafe {
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set);
            let first = (0..1024).find(|&cpu| libc::CPU_ISSET(cpu, &set));
            libc::CPU_ZERO(&mut set);
            libc::CPU_SET(first.expect("a processor"), &mut set);
            assert_eq!(
                libc::sched_setaffinity(0, size_of_val(&set), &raw const set),
                0
            );
        }
        let (paged, is_right) = gather_reversed(tuning(true, 4, true), 4096);
        assert!(is_right && paged.pool.get().is_none());
    });
    bound.join().expect("copies alone");
}

#[test]
fn a_forked_child_shares_its_own_copies() {
    let (_parents, is_right) = gather_reversed(tuning(true, 4, true), 4096);
    assert!(is_right);
    // SAFETY: the child uses nothing but what it makes, and ends without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(20) };
        let (_own, is_right) = gather_reversed(tuning(true, 4, true), 4096);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = -1;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child hangs or copies wrongly");
}
