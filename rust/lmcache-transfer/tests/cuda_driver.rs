//! The driver layer over a fake driver: what is missing, what fails, and what is ordered by what.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::thread;

use common::fake::{Fake, build};
use lmcache_transfer::cuda::current::Current;
use lmcache_transfer::cuda::driver::{Context, Driver, LIBRARY_SWITCH};
use lmcache_transfer::cuda::error::CudaError;
use lmcache_transfer::cuda::handles::{DeviceMemory, StreamId};
use lmcache_transfer::cuda::kernels::{
    CopyKernel, Direction, KERNEL_BUILD, LaunchShape, Layers, PagedCopy,
};

const OUT_OF_MEMORY: i32 = 2;
/// The engine's stream; an application that made none uses the legacy default one.
const ENGINE: StreamId = StreamId(0);

fn context(fake: &Fake) -> Arc<Context> {
    let driver = Driver::open_at(&fake.path).expect("the fake opens");
    Context::primary(&driver, 0).expect("it has a GPU")
}

fn bytes_of(memory: &DeviceMemory) -> Vec<u8> {
    // SAFETY: the fake's device memory is the host's; the caller has waited for what writes it.
    unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.len()) }.to_vec()
}

#[test]
fn without_a_driver_the_error_says_so() {
    let missing = Path::new("/nowhere/libcuda.so.1");
    let fault = Driver::open_at(missing).expect_err("there is none");
    assert!(matches!(&fault, CudaError::NoDriver { path, .. } if path == "/nowhere/libcuda.so.1"));
    assert!(
        fault.to_string().contains("copies stay on the CPU"),
        "{fault}"
    );
}

#[test]
fn the_switch_names_the_library() {
    #[expect(
        clippy::disallowed_methods,
        reason = "this test is about the environment"
    )]
    let switched = std::env::var_os(LIBRARY_SWITCH).is_some();
    if switched {
        let driver = Driver::open().expect("the library that the switch names");
        assert_eq!(driver.device_count(), Ok(1));
        return;
    }
    let fake = Fake::new();
    let again = std::env::current_exe().expect("this test");
    let status = Command::new(again)
        .args(["--exact", "the_switch_names_the_library"])
        .env(LIBRARY_SWITCH, &fake.path)
        .status();
    assert!(status.expect("it starts").success());
}

#[test]
fn a_driver_older_than_cuda_12_is_refused() {
    let path: PathBuf = build("old.so", &["-DFAKE_CUDA_WITHOUT_GET_PROC_ADDRESS"]);
    let fault = Driver::open_at(&path).expect_err("too old");
    assert!(matches!(fault, CudaError::DriverTooOld { .. }), "{fault}");
}

#[test]
fn a_driver_before_12_8_serves_without_batched_copies() {
    let fake = Fake::new();
    fake.hide("cuMemcpyBatchAsync");
    let context = context(&fake);
    assert!(!context.driver().has_batched_copies());
    assert_eq!(context.driver().version(), Ok(12_040));
    let current = context.enter().expect("enters");
    let stream = current.stream().expect("makes one");
    // SAFETY: nothing is copied.
    let fault = unsafe { current.copy_batch(&[0], &[0], &[1], stream.id()) };
    assert!(
        matches!(fault, Err(CudaError::Unsupported { .. })),
        "{fault:?}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let fake = Fake::new();
    let driver = Driver::open_at(&fake.path).expect("opens");
    for asked in [-1, 1] {
        let fault = Context::primary(&driver, asked).expect_err("one GPU only");
        assert_eq!(fault, CudaError::NoDevice { asked, found: 1 });
    }
    let facts = Context::primary(&driver, 0).and_then(|context| context.device_facts());
    let facts = facts.expect("the fake knows itself");
    assert_eq!((facts.name.as_str(), facts.capability), ("Fake GPU", 90));
    assert_eq!(facts.uuid[15], 15);
}

#[test]
fn only_timed_events_tell_the_time() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let (timed, other) = (
        current.timed_event().expect("one"),
        current.event().expect("one"),
    );
    current.record(&timed, ENGINE).expect("marks");
    current.record(&other, ENGINE).expect("marks");
    current.drain(ENGINE).expect("ends");
    assert_eq!(current.milliseconds(&timed, &timed), Ok(0.0));
    assert!(current.milliseconds(&timed, &other).is_err());
}

#[test]
fn host_memory_at_another_address_is_refused() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let memory = Arc::new(vec![0u8; 64]);
    fake.map_elsewhere(4096);
    let before = fake.live();
    let base = memory.as_ptr().cast_mut();
    // SAFETY: the vector is kept alive by the lock, and nobody writes to it.
    let fault = unsafe { current.page_lock(base, 64, 64, memory.clone()) }.expect_err("elsewhere");
    let host = base as u64;
    let device = host + 4096;
    assert_eq!(fault, CudaError::HostAddress { host, device });
    assert_eq!(fake.live(), before);
}

#[test]
fn the_threads_own_context_is_put_back() {
    let fake = Fake::new();
    let context = context(&fake);
    let outer = context.enter().expect("enters");
    {
        let _inner = context.enter().expect("enters twice");
        assert_eq!(fake.depth(), 2);
    }
    assert_eq!(fake.depth(), 1);
    thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            let before = fake.depth();
            let current = context.enter().expect("enters");
            let made = current.event().is_ok();
            drop(current);
            (before, made, fake.depth())
        });
        assert_eq!(elsewhere.join().expect("no panic"), (0, true, 0));
    });
    drop(outer);
    assert_eq!(fake.depth(), 0);
}

#[test]
fn page_locking_is_whole_or_not_at_all() {
    let fake = Fake::new();
    let context = context(&fake);
    let before = fake.live();
    let memory = Arc::new(vec![0u8; 100]);
    let current = context.enter().expect("enters");
    let lock = |slice| {
        let base = memory.as_ptr().cast_mut();
        // SAFETY: the vector is kept alive by the lock, and nobody writes to it.
        unsafe { current.page_lock(base, 100, slice, memory.clone()) }
    };
    fake.limit_registration(40);
    assert!(lock(64).is_err());
    assert_eq!(fake.live(), before);
    let held = lock(40).expect("three slices");
    assert_eq!((held.num_slices(), fake.live()), (3, before + 3));
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(held);
    assert_eq!((fake.live(), Arc::strong_count(&memory)), (before, 1));
    fake.fail("cuMemHostRegister", 2, OUT_OF_MEMORY);
    assert!(lock(40).is_err());
    assert_eq!(fake.live(), before);
}

#[test]
fn a_forked_child_neither_uses_nor_gives_back() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let event = current.event().expect("one");
    drop(current);
    let (live, calls) = (fake.live(), fake.calls("cuEventDestroy"));
    // SAFETY: the child runs this test's own code only, allocates little, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(context.enter(), Err(CudaError::Forked { .. }));
        drop(event);
        drop(context);
        // The fake's lock is free: nobody else uses this one.
        let untouched = fake.live() == live && fake.calls("cuEventDestroy") == calls;
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!(refused && untouched))) };
    }
    let mut status = 0;
    // SAFETY: our own child; the answer goes to a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "status {status}"
    );
}

#[test]
fn kernels_are_there_or_the_error_says_why() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    match current.kernels() {
        Ok(_) => assert!(!KERNEL_BUILD.nvcc.is_empty()),
        Err(fault) => {
            assert!(KERNEL_BUILD.nvcc.is_empty(), "{fault}");
            assert!(
                fault.to_string().contains(KERNEL_BUILD.absent_because),
                "{fault}"
            );
        }
    }
}

#[test]
fn a_broken_device_is_told_to_whoever_waits() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let (stream, event) = (
        current.stream().expect("one"),
        current.event().expect("one"),
    );
    fake.break_down(700);
    current.record(&event, stream.id()).expect("only marks");
    for outcome in [current.synchronize(&event), current.drain(stream.id())] {
        let told = outcome.expect_err("broken").to_string();
        assert!(told.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{told}");
    }
    fake.break_down(0);
    assert!(current.drain(stream.id()).is_ok());
}

const STEPS: usize = 8;
const LEN: usize = 64;

/// An engine that writes one block over and over, or reads it, and our stream that stores it, or loads it, at
/// each step. Each waits for the other by an event; `omit` names a wait that is left out. Answers a byte of what
/// arrived at each step.
fn steps(fake: &Fake, direction: Direction, omit: Option<&str>) -> Vec<u8> {
    let context = context(fake);
    let current: Current = context.enter().expect("enters");
    let memory = |len| current.device_memory(len).expect("memory");
    let (block, seen) = (memory(LEN), memory(LEN * STEPS));
    let numbered: Vec<u8> = (0..LEN * STEPS).map(|at| (at / LEN) as u8 + 1).collect();
    let chunks = Arc::new(match direction {
        Direction::Gather => vec![0; LEN * STEPS],
        Direction::Scatter => numbered,
    });
    let base = chunks.as_ptr() as u64;
    // SAFETY: the vector lives as long as the lock; only the copies below write to it.
    let _lock = unsafe { current.page_lock(base as *mut u8, LEN * STEPS, 1 << 20, chunks.clone()) }
        .expect("locks");
    let ours = current.stream().expect("one");
    let (engine_done, ours_done) = (current.event().expect("one"), current.event().expect("one"));
    let wait = |name: &str, stream, event| {
        if omit != Some(name) {
            current.wait(stream, event).expect("waits");
        }
    };
    for step in 0..STEPS {
        let at = (LEN * step) as u64;
        // SAFETY: all inside; what is not ordered by events here is what the test is about.
        let give =
            |to, from, stream| unsafe { current.copy(to, from, LEN, stream) }.expect("copies");
        match direction {
            Direction::Gather => {
                // The block is reused only once it has been stored.
                wait("engine after ours", ENGINE, &ours_done);
                // SAFETY: as above.
                unsafe { current.fill(block.address(), step as u8 + 1, LEN, ENGINE) }
                    .expect("fills");
                current.record(&engine_done, ENGINE).expect("marks");
                wait("ours after engine", ours.id(), &engine_done);
                give(base + at, block.address(), ours.id());
                current.record(&ours_done, ours.id()).expect("marks");
            }
            Direction::Scatter => {
                // The block is loaded only once nobody reads it any more.
                wait("ours after engine", ours.id(), &engine_done);
                give(block.address(), base + at, ours.id());
                current.record(&ours_done, ours.id()).expect("marks");
                wait("engine after ours", ENGINE, &ours_done);
                give(seen.address() + at, block.address(), ENGINE);
                current.record(&engine_done, ENGINE).expect("marks");
            }
        }
    }
    current.drain(ours.id()).expect("ends");
    current.drain(ENGINE).expect("ends");
    let arrived = match direction {
        Direction::Gather => chunks.to_vec(),
        Direction::Scatter => bytes_of(&seen),
    };
    arrived.into_iter().step_by(LEN).collect()
}

#[test]
fn events_keep_late_streams_in_order_and_each_wait_is_needed() {
    let right: Vec<u8> = (1..=STEPS as u8).collect();
    for direction in [Direction::Gather, Direction::Scatter] {
        let run = |seed, omit| {
            let fake = Fake::new();
            fake.be_late(300, seed);
            steps(&fake, direction, omit)
        };
        for seed in 0..20 {
            assert_eq!(run(seed, None), right, "{direction:?}, seed {seed}");
        }
        for omitted in ["ours after engine", "engine after ours"] {
            let torn = (0..200).any(|seed| run(seed, Some(omitted)) != right);
            assert!(
                torn,
                "{direction:?}: nobody saw that `{omitted}` was left out"
            );
        }
    }
}

#[test]
fn a_held_engine_holds_the_store_back() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let memory = |len| current.device_memory(len).expect("memory");
    // One block of one token of one 16-byte run.
    let (cache, chunk, tables) = (memory(16), memory(16), memory(24));
    let words = [cache.address(), chunk.address(), 0];
    // SAFETY: the fake's device memory is the host's, and nothing runs yet.
    unsafe { ptr::copy_nonoverlapping(words.as_ptr(), tables.address() as *mut u64, 3) };
    let copy = PagedCopy {
        layers: tables.address(),
        chunks: tables.address() + 8,
        slots: tables.address() + 16,
        block_stride: 16,
        run_bytes: 16,
        num_tokens: 1,
        chunk_tokens: 1,
        block_tokens: 1,
        planes: 1,
        heads: 1,
        num_layers: 1,
        ..PagedCopy::default()
    };
    let kernel = CopyKernel {
        layers: Layers::Many,
        direction: Direction::Gather,
        width: copy.vector_width([cache.address(), chunk.address()]),
    };
    let shape = LaunchShape::of(&copy, kernel.width).expect("something to move");
    // SAFETY: the fake takes any image.
    let kernels = unsafe { current.kernels_of(b"fake") }.expect("loads");
    let store = current.stream().expect("one");
    let (written, done) = (current.event().expect("one"), current.event().expect("one"));
    fake.hold(ENGINE.0, true);
    // SAFETY: all inside, and alive until `done`.
    unsafe {
        current
            .fill(chunk.address(), 1, 16, store.id())
            .expect("fills");
        current.fill(cache.address(), 9, 16, ENGINE).expect("fills");
        current.record(&written, ENGINE).expect("marks");
        current.wait(store.id(), &written).expect("waits");
        current
            .launch(&kernels, kernel, shape, &copy, store.id())
            .expect("launches");
    }
    current.record(&done, store.id()).expect("marks");
    assert_eq!(current.is_done(&done), Ok(false));
    fake.hold(ENGINE.0, false);
    current.synchronize(&done).expect("ends");
    assert_eq!(bytes_of(&chunk), [9; 16]);
}
