//! The CUDA executor over the fake driver: bytes as the host's plan moves them, chunks held until the copies are
//! done, nothing waited for in a layer.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::Random;
use common::engine::{CHUNK, ENGINE, Engine, LAYERS, OPAQUE, TOKENS, at};
use common::fake::Fake;
use common::round_trip::{layer_bytes, round_trip, slots};
use lmcache_memory::object::{ChunkMut, MemoryObj};
use lmcache_transfer::cuda::executor::{ChunkMemory, CopyPath, DeviceJob};
use lmcache_transfer::cuda::kernels::Direction;

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

#[test]
fn what_is_stored_comes_back_and_nothing_else_is_touched() {
    for seed in 1..16 {
        for layout in [OPAQUE, TOKENS] {
            for path in CopyPath::ALL {
                let fake = Fake::new();
                fake.be_late(150, seed);
                round_trip(&Engine::new(&fake, layout), path, seed);
            }
        }
    }
}

#[test]
fn an_older_driver_copies_run_by_run() {
    let fake = Fake::new();
    fake.hide("cuMemcpyBatchAsync");
    round_trip(&Engine::new(&fake, TOKENS), CopyPath::Engine, 3);
}

fn stores(engine: &Engine, path: CopyPath, slots: &[i64]) -> DeviceJob<ChunkMut> {
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

/// Loads of the chunks that `slots` are stored in.
fn loads(engine: &Engine, path: CopyPath, slots: &[i64]) -> DeviceJob<MemoryObj> {
    let stored = stores(engine, CopyPath::Engine, slots);
    let chunks = stored.finish().and_then(|ticket| ticket.wait());
    let objects = engine.publish(chunks.expect("done"));
    let spans = slots.chunks(CHUNK).map(|span| at(span, 0));
    engine.begin(path, objects.into_iter().zip(spans).collect())
}

/// What a layer's calls are, counted: none of those that allocate or wait.
fn in_a_layer<C: ChunkMemory>(fake: &Fake, mut job: DeviceJob<C>, what: &str) {
    let never = [
        "cuMemAlloc",
        "cuMemFree",
        "cuEventCreate",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemHostRegister",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreateWithPriority",
    ];
    let calls = || never.map(|call| fake.calls(call));
    let before = calls();
    let mut allocated = Vec::new();
    for layer in 0..LAYERS {
        let before = ALLOCATIONS.get();
        job.layer(layer).expect("given");
        job.wait_for_layer(layer).expect("given");
        allocated.push(ALLOCATIONS.get() - before);
    }
    assert_eq!(calls(), before, "{what}");
    assert_eq!(allocated, [0; LAYERS], "{what}");
    job.finish().and_then(|ticket| ticket.wait()).expect("done");
}

#[test]
fn a_layer_neither_allocates_nor_waits() {
    for batched in [true, false] {
        for path in CopyPath::ALL {
            let fake = Fake::new();
            if !batched {
                fake.hide("cuMemcpyBatchAsync");
            }
            // So little to stage in that a layer goes in groups.
            let engine = Engine::staging_in(&fake, TOKENS, 512);
            let slots = slots(&mut Random::new(5));
            let what = format!("{path:?}, batched: {batched}");
            in_a_layer(&fake, stores(&engine, path, &slots), &what);
            in_a_layer(&fake, loads(&engine, path, &slots), &what);
            let counted = ["cuMemcpyBatchAsync", "cuLaunchKernel"].map(|call| fake.calls(call));
            let many = matches!(path, CopyPath::Engine | CopyPath::Staged);
            assert_eq!(counted[0] > 0, batched && many, "{what}");
            assert_eq!(counted[1] > 0, path.needs_kernels(), "{what}");
        }
    }
}

#[test]
fn chunks_are_held_until_their_copies_are_done() {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let slots = slots(&mut Random::new(7));
    let mut job = stores(&engine, CopyPath::Engine, &slots);
    fake.hold(ENGINE.0, true);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    let ticket = job.finish().expect("given");
    assert_eq!(ticket.is_done(), Ok(false));
    let audit = engine.store.audit();
    assert!(audit.reserved_bytes > 0, "{audit:?}");
    fake.hold(ENGINE.0, false);
    let chunks = ticket.wait().expect("done");
    assert_eq!(engine.publish(chunks).len(), 3);
}

/// Dropped in the middle, or on a failure, a job waits for what is under way, and nothing of it is published.
#[test]
fn a_job_that_ends_early_waits_and_publishes_nothing() {
    let slots = slots(&mut Random::new(9));
    let marks = ["cuStreamWaitEvent", "cuEventRecord"];
    let own = |path| match path {
        CopyPath::Engine => vec!["cuMemcpyBatchAsync"],
        CopyPath::Single => vec!["cuMemcpyAsync"],
        CopyPath::Kernel => vec!["cuLaunchKernel"],
        CopyPath::Staged => vec!["cuLaunchKernel", "cuMemcpyBatchAsync"],
    };
    for path in CopyPath::ALL {
        let failing = own(path).into_iter().chain(marks).map(Some);
        for failing in failing.chain([None]) {
            let fake = Fake::new();
            let engine = Engine::new(&fake, TOKENS);
            fake.be_late(400, 1);
            let mut job = stores(&engine, path, &slots);
            job.layer(0).expect("given");
            if let Some(call) = failing {
                fake.fail(call, 0, 2);
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
            // The same memory, given to others: a copy still under way would write into it.
            let mut others = engine.reserve(0, &[LAYERS * layer_bytes(&TOKENS, CHUNK); 3]);
            others
                .iter_mut()
                .for_each(|chunk| chunk.bytes_mut().fill(0x55));
            let stream = engine.executor.stream(Direction::Gather);
            engine.enter().drain(stream).expect("ends");
            let untouched =
                |chunk: &mut ChunkMut| chunk.bytes_mut().iter().all(|&byte| byte == 0x55);
            assert!(others.iter_mut().all(untouched), "{path:?} {failing:?}");
            assert!(engine.context.enter().is_ok());
        }
    }
}

/// A job's drop can only wait; that it could not is returned by whoever asks next, once.
#[test]
fn what_a_jobs_drop_cannot_return_the_next_call_does() {
    let slots = slots(&mut Random::new(15));
    for path in CopyPath::ALL {
        for finished in [false, true] {
            let fake = Fake::new();
            let engine = Engine::new(&fake, TOKENS);
            let (mut job, other) = (
                stores(&engine, path, &slots[..CHUNK]),
                engine.reserve(1, &[LAYERS * layer_bytes(&TOKENS, CHUNK)]),
            );
            let parts = other
                .into_iter()
                .map(|chunk| (chunk, at(&slots[..CHUNK], 0)));
            let mut other = engine.begin(path, parts.collect());
            job.layer(0).expect("given");
            let failing = if finished {
                let ticket = job.finish().expect("given");
                fake.fail("cuEventSynchronize", 0, 700);
                drop(ticket);
                "cuEventSynchronize"
            } else {
                fake.fail("cuStreamSynchronize", 0, 700);
                drop(job);
                "cuStreamSynchronize"
            };
            let told = other.layer(0).expect_err("kept").to_string();
            assert!(told.starts_with(failing), "{path:?}: {told}");
            other.layer(0).expect("told once");
        }
    }
}

#[test]
fn a_device_that_breaks_gives_chunks_back_unpublished() {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let slots = slots(&mut Random::new(11));
    let mut job = stores(&engine, CopyPath::Kernel, &slots);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    let ticket = job.finish().expect("given");
    fake.break_down(700);
    let asked = ticket.is_done();
    assert!(!matches!(asked, Ok(true)), "{asked:?}");
    let fault = ticket.wait().expect_err("broken").to_string();
    assert!(fault.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}");
    fake.break_down(0);
    assert_eq!(engine.store.audit().reserved_bytes, 0);
}

#[test]
fn tables_are_used_again() {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let slots = slots(&mut Random::new(13));
    let mut made = Vec::new();
    for _ in 0..3 {
        let mut job = stores(&engine, CopyPath::Kernel, &slots);
        job.layer(0).expect("given");
        drop(job);
        made.push(fake.calls("cuMemAlloc"));
    }
    assert_eq!(made, [made[0]; 3]);
}

#[test]
fn a_chunk_of_another_size_is_refused() {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
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
