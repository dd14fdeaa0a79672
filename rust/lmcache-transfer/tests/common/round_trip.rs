//! Chunks that are stored, wiped from the cache and loaded again, each way compared with the host's plan.

use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_transfer::cuda::executor::CopyPath;

use super::Random;
use super::engine::{BLOCK, BLOCKS, CHUNK, Engine, LAYERS, at};

/// Two full chunks and a shorter one, somewhere in the cache; whole blocks, as opaque layouts need.
pub(crate) fn slots(random: &mut Random) -> Vec<i64> {
    let mut blocks: Vec<i64> = (0..BLOCKS as i64).collect();
    random.shuffle(&mut blocks);
    let blocks = &blocks[..(2 * CHUNK + BLOCK) / BLOCK];
    let slot = |&block: &i64| (0..BLOCK as i64).map(move |offset| block * BLOCK as i64 + offset);
    blocks.iter().flat_map(slot).collect()
}

pub(crate) fn layer_bytes(layout: &PagedLayout, tokens: usize) -> usize {
    layout.layer_bytes(tokens).expect("small")
}

/// Stores the chunks, wipes the cache, loads them behind `skip` tokens, and compares both ways with the plan.
pub(crate) fn round_trip(engine: &Engine, path: CopyPath, seed: u64) {
    let layout = engine.layout;
    let random = &mut Random::new(seed);
    let slots = slots(random);
    let spans: Vec<&[i64]> = slots.chunks(CHUNK).collect();
    let contents: Vec<Vec<u8>> = (0..LAYERS)
        .map(|_| random.bytes(engine.layers[0].len()))
        .collect();
    for (layer, bytes) in contents.iter().enumerate() {
        engine.set_layer(layer, bytes);
    }
    let lens: Vec<usize> = spans
        .iter()
        .map(|span| LAYERS * layer_bytes(&layout, span.len()))
        .collect();
    let chunks = engine.reserve(0, &lens);
    let parts = chunks
        .into_iter()
        .zip(spans.iter().map(|span| at(span, 0)))
        .collect();
    let mut job = engine.begin(path, parts);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    let chunks = job.finish().and_then(|ticket| ticket.wait()).expect("done");
    let objects = engine.publish(chunks);
    for (object, span) in objects.iter().zip(&spans) {
        let plan = CopyPlan::build(&layout, BLOCKS, span.len(), 0, Placement::Slots(span))
            .expect("inside");
        for (layer, bytes) in contents.iter().enumerate() {
            for run in plan.runs() {
                let from = layer * layer_bytes(&layout, span.len()) + run.chunk;
                let stored = &object.bytes()[from..from + run.len];
                assert_eq!(
                    stored,
                    &bytes[run.paged..run.paged + run.len],
                    "{layout:?} {path:?}"
                );
            }
        }
    }

    let skip = BLOCK * random.below(3);
    let mut wanted = vec![vec![0xee; engine.layers[0].len()]; LAYERS];
    for (layer, bytes) in wanted.iter().enumerate() {
        engine.set_layer(layer, bytes);
    }
    let parts: Vec<_> = objects
        .into_iter()
        .zip(spans.iter().enumerate())
        .map(|(object, (place, span))| (object, at(span, if place == 0 { skip } else { 0 })))
        .collect();
    for (place, span) in spans.iter().enumerate() {
        let skip = if place == 0 { skip } else { 0 };
        let plan = CopyPlan::build(&layout, BLOCKS, span.len(), skip, Placement::Slots(span))
            .expect("inside");
        for (layer, bytes) in wanted.iter_mut().enumerate() {
            for run in plan.runs() {
                let range = run.paged..run.paged + run.len;
                bytes[range.clone()].copy_from_slice(&contents[layer][range]);
            }
        }
    }
    let mut job = engine.begin(path, parts);
    for layer in 0..LAYERS {
        job.layer(layer).expect("given");
        job.wait_for_layer(layer).expect("waits");
    }
    // The engine's stream waits for each layer, so what it is given next sees them.
    for (layer, bytes) in wanted.iter().enumerate() {
        assert!(
            engine.layer(layer) == *bytes,
            "{layout:?} {path:?} layer {layer}, seed {seed}"
        );
    }
    let objects = job.finish().and_then(|ticket| ticket.wait()).expect("done");
    assert_eq!(objects.len(), spans.len());
}
