//! Copies through a buffer on the device, over the fake driver: bounded memory, whatever the layer; nothing moved
//! that is not asked for; and threads that share the buffer.

mod common;

use std::thread;

use common::Random;
use common::engine::{BLOCKS, CHUNK, Engine, LAYERS, OPAQUE, TOKENS, at};
use common::fake::Fake;
use common::round_trip::{layer_bytes, round_trip, slots};
use lmcache_memory::object::ChunkMut;
use lmcache_transfer::cuda::driver::Driver;
use lmcache_transfer::cuda::error::CudaError;
use lmcache_transfer::cuda::executor::{CopyPath, DeviceJob, Executor};

/// Room for one chunk's layer of either layout.
const ONE_CHUNK: usize = 256;

fn begin(engine: &Engine, chunks: Vec<ChunkMut>, slots: &[i64]) -> DeviceJob<ChunkMut> {
    let parts = chunks
        .into_iter()
        .zip(slots.chunks(CHUNK).map(|span| at(span, 0)));
    let staged = |_, _| CopyPath::Staged;
    // SAFETY: the pool is locked, and the engine does nothing meanwhile.
    unsafe {
        DeviceJob::begin(
            &engine.executor,
            &engine.cache,
            common::engine::ENGINE,
            staged,
            parts,
        )
    }
    .expect("begins")
}

fn lens(slots: &[i64]) -> Vec<usize> {
    let spans = slots.chunks(CHUNK);
    spans
        .map(|span| LAYERS * layer_bytes(&TOKENS, span.len()))
        .collect()
}

#[test]
fn a_layer_larger_than_the_buffer_goes_in_groups() {
    for (bytes, layers_launched) in [(ONE_CHUNK, 3), (2 * ONE_CHUNK, 2), (1 << 20, 1)] {
        for layout in [OPAQUE, TOKENS] {
            for seed in 1..6 {
                let fake = Fake::new();
                fake.be_late(150, seed);
                let engine = Engine::staging_in(&fake, layout, bytes);
                round_trip(&engine, CopyPath::Staged, seed);
                // Three chunks, stored and loaded, of which the load may skip the first.
                let most = 2 * LAYERS as i64 * layers_launched;
                let launched = fake.calls("cuLaunchKernel");
                let expected = most - LAYERS as i64..=most;
                assert!(expected.contains(&launched), "{bytes} bytes: {launched}");
            }
        }
    }
}

#[test]
fn where_the_device_has_no_room_the_kernel_goes_alone() {
    let slots = slots(&mut Random::new(3));
    // No memory at all, asked for once; and none that holds a chunk's layer, never asked for.
    for (bytes, refused) in [(1 << 20, true), (ONE_CHUNK - 1, false), (0, false)] {
        let fake = Fake::new();
        let engine = Engine::staging_in(&fake, TOKENS, bytes);
        if refused {
            fake.fail("cuMemAlloc", 0, 2);
        }
        for _ in 0..2 {
            let chunks = engine.reserve(0, &lens(&slots));
            let mut job = begin(&engine, chunks, &slots);
            assert_eq!(job.path(), CopyPath::Kernel);
            (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
        }
        round_trip_of_what_is_left(&engine);
    }
}

fn round_trip_of_what_is_left(engine: &Engine) {
    assert_eq!(engine.store.audit().reserved_bytes, 0);
    round_trip(engine, CopyPath::Kernel, 3);
}

/// Tokens without a slot: their bytes in a chunk stay as they are in a store, and nothing is written for them by a
/// load. By every way, for a piece of the buffer that went over with the others would bring what was in it before.
#[test]
fn tokens_without_a_slot_stay_as_they_are() {
    for path in CopyPath::ALL {
        let fake = Fake::new();
        fake.be_late(100, 5);
        let engine = Engine::new(&fake, TOKENS);
        let mut placed = slots(&mut Random::new(8));
        for hole in [0, 3, 4, 9, 19] {
            placed[hole] = -1;
        }
        (0..LAYERS).for_each(|layer| engine.set_layer(layer, &vec![0xaa; BLOCKS * 128]));
        let mut chunks = engine.reserve(0, &lens(&placed));
        chunks
            .iter_mut()
            .for_each(|chunk| chunk.bytes_mut().fill(0x55));
        let spans = || placed.chunks(CHUNK).map(|span| at(span, 0));
        let mut job = engine.begin(path, chunks.into_iter().zip(spans()).collect());
        (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
        let mut chunks = job.finish().and_then(|ticket| ticket.wait()).expect("done");
        for (chunk, span) in chunks.iter_mut().zip(placed.chunks(CHUNK)) {
            for layer in chunk.bytes_mut().chunks(layer_bytes(&TOKENS, span.len())) {
                for (row, slot) in layer.chunks(32).zip(span) {
                    let wanted = if *slot < 0 { 0x55 } else { 0xaa };
                    assert!(
                        row.iter().all(|&byte| byte == wanted),
                        "{path:?} slot {slot}"
                    );
                }
            }
        }

        let objects = engine.publish(chunks);
        (0..LAYERS).for_each(|layer| engine.set_layer(layer, &vec![0x11; BLOCKS * 128]));
        let mut job = engine.begin(path, objects.into_iter().zip(spans()).collect());
        for layer in 0..LAYERS {
            job.layer(layer).expect("given");
            job.wait_for_layer(layer).expect("waits");
            let found = engine.layer(layer);
            let written = found.iter().filter(|&&byte| byte == 0xaa).count();
            let left = found.iter().filter(|&&byte| byte == 0x11).count();
            let moved = placed.iter().filter(|&&slot| slot >= 0).count() * 32;
            assert_eq!((written, left), (moved, found.len() - moved), "{path:?}");
        }
        job.finish().and_then(|ticket| ticket.wait()).expect("done");
    }
}

#[test]
fn threads_share_the_buffer_of_a_direction() {
    let slots = slots(&mut Random::new(21));
    for seed in 0..12 {
        let fake = Fake::new();
        let engine = Engine::staging_in(&fake, TOKENS, ONE_CHUNK);
        let jobs: Vec<_> = (0..3)
            .map(|at| {
                let own = &slots[at * 4..at * 4 + CHUNK];
                (engine.reserve(at, &lens(own)), own)
            })
            .collect();
        for layer in 0..LAYERS {
            let content: Vec<u8> = (0..BLOCKS * 128)
                .map(|at| (at / 16 + layer) as u8)
                .collect();
            engine.set_layer(layer, &content);
        }
        fake.be_late(20, seed);
        let engine = &engine;
        thread::scope(|scope| {
            for (chunks, own) in jobs {
                scope.spawn(move || {
                    let mut job = begin(engine, chunks, own);
                    for _ in 0..6 {
                        (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
                    }
                    let mut chunks = job.finish().and_then(|ticket| ticket.wait()).expect("done");
                    let bytes = chunks[0].bytes_mut();
                    for (layer, rows) in bytes.chunks(CHUNK * 32).enumerate() {
                        for (row, &slot) in rows.chunks(32).zip(own) {
                            let (block, token) = (slot as usize / 4, slot as usize % 4);
                            let of_plane = |plane: usize| {
                                ((block * 128 + plane * 64 + token * 16) / 16 + layer) as u8
                            };
                            let wanted: Vec<u8> = (0..32).map(|at| of_plane(at / 16)).collect();
                            assert_eq!(row, wanted, "seed {seed} layer {layer} slot {slot}");
                        }
                    }
                });
            }
        });
    }
}

/// What an old driver answers when it is to load code of a newer CUDA: at once, or where it loads lazily, when a
/// function is asked for.
#[test]
fn kernels_that_the_driver_refuses_leave_the_copy_engines_and_one_notice() {
    for call in ["cuModuleLoadData", "cuModuleGetFunction"] {
        for code in [200, 209, 218, 221, 222, 223] {
            let fake = Fake::new();
            fake.hide("cuMemcpyBatchAsync");
            fake.fail(call, 0, code);
            let driver = Driver::open_at(&fake.path).expect("opens");
            let engine = Engine::with(&driver, TOKENS, |current| {
                // SAFETY: the fake takes any image.
                Executor::loading(current, unsafe { current.kernels_of(b"fake") })
            });
            let why = engine.executor.without_kernels().expect("a notice");
            assert!(matches!(why, CudaError::KernelsRefused { .. }), "{why}");
            let told = why.to_string();
            for part in [
                "CUDA 12.4",
                "which need 13.0",
                "580 or newer",
                "copy engines",
            ] {
                assert!(told.contains(part), "{told}");
            }
            let slots = slots(&mut Random::new(2));
            let chunks = engine.reserve(0, &lens(&slots));
            assert_eq!(begin(&engine, chunks, &slots).path(), CopyPath::Engine);
            round_trip(&engine, CopyPath::Engine, 2);
            drop(engine);
            assert_eq!(fake.live(), 0, "{call} {code}");
        }
        // Of anything else that fails, nothing is made.
        let fake = Fake::new();
        fake.fail(call, 0, 2);
        let driver = Driver::open_at(&fake.path).expect("opens");
        let context = lmcache_transfer::cuda::driver::Context::primary(&driver, 0).expect("a GPU");
        let current = context.enter().expect("enters");
        // SAFETY: the fake takes any image.
        let loaded = unsafe { current.kernels_of(b"fake") };
        let fault = Executor::loading(&current, loaded).expect_err("planted");
        assert!(matches!(fault, CudaError::Call { .. }), "{fault}");
    }
}
