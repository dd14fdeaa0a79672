//! The CUDA executor over the fake driver: bytes as the host's plan moves them, chunks held until the copies are
//! done, nothing waited for in a layer.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::Random;
use common::engine::{BLOCK, BLOCKS, CHUNK, ENGINE, Engine, LAYERS, OPAQUE, TOKENS, at};
use common::fake::Fake;
use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_transfer::cuda::executor::{CopyPath, DeviceJob};

/// Counts what this thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a count beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Two full chunks and a shorter one, somewhere in the cache; whole blocks, as opaque layouts need.
fn slots(random: &mut Random) -> Vec<i64> {
    let mut blocks: Vec<i64> = (0..BLOCKS as i64).collect();
    random.shuffle(&mut blocks);
    let blocks = &blocks[..(2 * CHUNK + BLOCK) / BLOCK];
    let slot = |&block: &i64| (0..BLOCK as i64).map(move |offset| block * BLOCK as i64 + offset);
    blocks.iter().flat_map(slot).collect()
}

fn layer_bytes(layout: &PagedLayout, tokens: usize) -> usize {
    layout.layer_bytes(tokens).expect("small")
}

/// Stores the chunks, wipes the cache, loads them behind `skip` tokens, and compares both ways with the plan.
fn round_trip(fake: Fake, layout: PagedLayout, path: CopyPath, seed: u64) {
    let random = &mut Random::new(seed);
    let engine = Engine::new(fake, layout);
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
            for run in &plan.runs {
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
            for run in &plan.runs {
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

#[test]
fn what_is_stored_comes_back_and_nothing_else_is_touched() {
    for seed in 1..16 {
        for layout in [OPAQUE, TOKENS] {
            for path in [CopyPath::Engine, CopyPath::Kernel] {
                let fake = Fake::new();
                fake.be_late(150, seed);
                round_trip(fake, layout, path, seed);
            }
        }
    }
}

#[test]
fn an_older_driver_copies_run_by_run() {
    let fake = Fake::new();
    fake.hide("cuMemcpyBatchAsync");
    round_trip(fake, TOKENS, CopyPath::Engine, 3);
}

fn stores(
    engine: &Engine,
    path: CopyPath,
    slots: &[i64],
) -> DeviceJob<lmcache_memory::object::ChunkMut> {
    let spans: Vec<&[i64]> = slots.chunks(CHUNK).collect();
    let lens: Vec<usize> = spans
        .iter()
        .map(|span| LAYERS * layer_bytes(&TOKENS, span.len()))
        .collect();
    let chunks = engine.reserve(0, &lens);
    engine.begin(
        path,
        chunks
            .into_iter()
            .zip(spans.iter().map(|span| at(span, 0)))
            .collect(),
    )
}

#[test]
fn a_layer_neither_allocates_nor_waits() {
    let never = [
        "cuMemAlloc",
        "cuMemFree",
        "cuEventCreate",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemHostRegister",
        "cuModuleLoadData",
    ];
    for path in [CopyPath::Engine, CopyPath::Kernel] {
        let engine = Engine::new(Fake::new(), TOKENS);
        let slots = slots(&mut Random::new(5));
        let mut job = stores(&engine, path, &slots);
        let calls = || never.map(|call| engine.fake.calls(call));
        let before = calls();
        // The fake allocates too, in this thread: one layer shows how much, and each must be alike.
        let mut allocated = Vec::new();
        for layer in 0..LAYERS {
            let before = ALLOCATIONS.get();
            job.layer(layer).expect("given");
            allocated.push(ALLOCATIONS.get() - before);
        }
        assert_eq!(calls(), before, "{path:?}");
        assert_eq!(allocated, [0; LAYERS], "{path:?}");
        job.finish().and_then(|ticket| ticket.wait()).expect("done");
    }
}

#[test]
fn chunks_are_held_until_their_copies_are_done() {
    let engine = Engine::new(Fake::new(), TOKENS);
    let slots = slots(&mut Random::new(7));
    let mut job = stores(&engine, CopyPath::Engine, &slots);
    engine.fake.hold(ENGINE.0, true);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    let ticket = job.finish().expect("given");
    assert_eq!(ticket.is_done(), Ok(false));
    let audit = engine.store.audit();
    assert!(audit.reserved_bytes > 0, "{audit:?}");
    engine.fake.hold(ENGINE.0, false);
    let chunks = ticket.wait().expect("done");
    assert_eq!(engine.publish(chunks).len(), 3);
}

/// Dropped in the middle, or on a failure, a job waits for what is under way, and nothing of it is published.
#[test]
fn a_job_that_ends_early_waits_and_publishes_nothing() {
    let slots = slots(&mut Random::new(9));
    for failing in [
        None,
        Some("cuMemcpyBatchAsync"),
        Some("cuStreamWaitEvent"),
        Some("cuEventRecord"),
    ] {
        let engine = Engine::new(Fake::new(), TOKENS);
        engine.fake.be_late(400, 1);
        let mut job = stores(&engine, CopyPath::Engine, &slots);
        job.layer(0).expect("given");
        if let Some(call) = failing {
            engine.fake.fail(call, 0, 2);
            let fault = job.layer(1).expect_err("planted").to_string();
            assert!(fault.starts_with(call), "{fault}");
        }
        drop(job);
        let audit = engine.store.audit();
        assert_eq!(
            (audit.reserved_bytes, audit.cached_bytes),
            (0, 0),
            "{audit:?}"
        );
        assert!(engine.context.enter().is_ok());
    }
}

#[test]
fn a_device_that_breaks_gives_chunks_back_unpublished() {
    let engine = Engine::new(Fake::new(), TOKENS);
    let slots = slots(&mut Random::new(11));
    let mut job = stores(&engine, CopyPath::Kernel, &slots);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    let ticket = job.finish().expect("given");
    engine.fake.break_down(700);
    let fault = ticket.wait().expect_err("broken").to_string();
    assert!(fault.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
    engine.fake.break_down(0);
    assert_eq!(engine.store.audit().reserved_bytes, 0);
}

#[test]
fn tables_are_used_again() {
    let engine = Engine::new(Fake::new(), TOKENS);
    let slots = slots(&mut Random::new(13));
    let mut made = Vec::new();
    for _ in 0..3 {
        let mut job = stores(&engine, CopyPath::Kernel, &slots);
        job.layer(0).expect("given");
        drop(job);
        made.push(engine.fake.calls("cuMemAlloc"));
    }
    assert_eq!(made, [made[0]; 3]);
}

#[test]
fn a_chunk_of_another_size_is_refused() {
    let engine = Engine::new(Fake::new(), TOKENS);
    let slots: Vec<i64> = (0..8).collect();
    let chunks = engine.reserve(0, &[LAYERS * layer_bytes(&TOKENS, 8) - 1]);
    let parts = chunks.into_iter().map(|chunk| (chunk, at(&slots, 0)));
    // SAFETY: nothing is copied.
    let job = unsafe {
        DeviceJob::begin(
            &engine.executor,
            &engine.cache,
            ENGINE,
            CopyPath::unmeasured,
            parts,
        )
    };
    assert!(job.is_err());
}

#[test]
fn many_short_runs_go_by_the_kernel() {
    assert_eq!(CopyPath::unmeasured(4096, 4096 * 256), CopyPath::Kernel);
    assert_eq!(CopyPath::unmeasured(16, 16 * 256), CopyPath::Engine);
    assert_eq!(CopyPath::unmeasured(4096, 4096 * 65_536), CopyPath::Engine);
}
