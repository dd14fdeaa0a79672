//! A GPU as a process has it, over the fake driver: which way its copies take, what it says at the start, and layers
//! copied by each way.

mod common;

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::engine::{BLOCKS, CHUNK, ENGINE, Engine, LAYERS, OPAQUE, TOKENS, at};
use common::fake::Fake;
use common::round_trip::{layer_bytes, slots};
use common::{Random, scratch};
use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::ChunkMut;
use lmcache_transfer::copy_job::ChunkSpan;
use lmcache_transfer::cuda::device::{Device, Reach};
use lmcache_transfer::cuda::executor::CopyPath;
use lmcache_transfer::cuda::kernels::Direction;
use lmcache_transfer::cuda::layer_copy::{DeviceLayerCopy, Piece};

fn device(engine: &Engine) -> Arc<Device> {
    Arc::new(Device::over(0, Arc::clone(&engine.executor)).expect("a GPU"))
}

#[test]
fn what_memory_it_is_decides_before_costs_do() {
    let fake = Fake::new();
    let device = device(&Engine::new(&fake, TOKENS));
    for direction in [Direction::Gather, Direction::Scatter] {
        let choose = |reach| device.choose(direction, reach, 4096, 4096 * 64);
        for forced in CopyPath::ALL.into_iter().map(Some).chain([None]) {
            device.force_path(forced);
            // A batch would wait for each run in turn, and kernels do not reach it.
            assert_eq!(choose(Reach::Pageable), CopyPath::Single);
            assert_eq!(
                choose(Reach::PageLocked),
                forced.unwrap_or(CopyPath::Kernel)
            );
            let staged = forced.is_none_or(|path| path == CopyPath::Staged);
            let within = if staged {
                CopyPath::Kernel
            } else {
                choose(Reach::PageLocked)
            };
            assert_eq!(choose(Reach::OnDevice), within);
        }
    }
}

#[test]
fn every_way_is_counted_by_its_name() {
    let fake = Fake::new();
    let counts = device(&Engine::new(&fake, TOKENS)).counts();
    let all: Vec<_> = CopyPath::ALL.map(|path| (path.name(), 0)).into();
    let mut found: Vec<_> = counts.into_iter().collect();
    found.sort_by_key(|(name, _)| all.iter().position(|(other, _)| other == name));
    assert_eq!(found, all);
}

#[test]
fn what_could_not_be_learnt_is_said_once() {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let a_file = scratch("cuda_device").join(format!("no-folder-{}", std::process::id()));
    fs::write(&a_file, "").expect("scratch space");

    let busy = device(&engine);
    busy.learn(None, Duration::ZERO);
    let notices = busy.take_notices();
    assert!(notices[0].contains("too busy for measuring"), "{notices:?}");
    assert_eq!((notices.len(), busy.take_notices().len()), (1, 0));

    fake.fail("cuMemAlloc", 0, 2);
    busy.learn(None, Duration::from_secs(60));
    let notices = busy.take_notices();
    assert!(
        notices[0].contains("cannot be measured (cuMemAlloc failed"),
        "{notices:?}"
    );

    busy.learn(Some(&a_file), Duration::from_secs(60));
    let notices = busy.take_notices();
    assert!(notices[0].contains("cannot be remembered"), "{notices:?}");
    // It is learnt all the same.
    assert!(engine.executor.costs().is_some());
    busy.learn(Some(&a_file), Duration::ZERO);
    assert_eq!(busy.take_notices(), Vec::<String>::new());
    fs::remove_file(a_file).expect("written above");
}

/// Layers of some chunks, the first with tokens that are left alone and one with a hole.
struct Copies {
    engine: Engine,
    device: Arc<Device>,
    slots: Vec<i64>,
    skip: usize,
    _fake: Fake,
}

impl Copies {
    fn new(layout: PagedLayout, path: CopyPath, seed: u64) -> Self {
        let fake = Fake::new();
        fake.be_late(60, seed);
        let engine = Engine::new(&fake, layout);
        let device = device(&engine);
        device.force_path(Some(path));
        let mut slots = slots(&mut Random::new(seed));
        let is_opaque = matches!(layout, PagedLayout::Opaque { .. });
        if !is_opaque {
            slots[CHUNK + 3] = -1;
        }
        Self {
            engine,
            device,
            slots,
            skip: 4,
            _fake: fake,
        }
    }

    fn spans(&self) -> Vec<ChunkSpan<'_>> {
        let chunks = self.slots.chunks(CHUNK).enumerate();
        chunks
            .map(|(place, span)| at(span, if place == 0 { self.skip } else { 0 }))
            .collect()
    }

    /// Places in a layer of the cache and of a chunk, and the bytes there.
    fn runs(&self, span: &ChunkSpan<'_>) -> Vec<(usize, usize, usize)> {
        let Placement::Slots(_) = span.placement else {
            unreachable!("made of slots")
        };
        let layout = &self.engine.layout;
        let plan = CopyPlan::build(layout, BLOCKS, span.num_tokens, span.skip, span.placement);
        let plan = plan.expect("inside");
        plan.runs()
            .map(|run| (run.paged, run.chunk, run.len))
            .collect()
    }

    /// Has each layer copied between the cache and its own piece of each chunk.
    fn copy(&self, direction: Direction, chunks: &[Arc<Mutex<ChunkMut>>]) {
        let (device, cache) = (&self.device, &self.engine.cache);
        let copy = DeviceLayerCopy::plan(device, cache, ENGINE, direction, self.spans());
        let copy = copy.expect("planned");
        for layer in 0..LAYERS {
            let pieces: Vec<_> = copy
                .layer_bytes()
                .zip(chunks)
                .map(|(len, chunk)| Piece {
                    address: chunk.lock().expect("whole").bytes_mut()[layer * len..].as_ptr()
                        as u64,
                    len,
                    reach: Reach::PageLocked,
                })
                .collect();
            // SAFETY: the chunks' own bytes, and they are held.
            unsafe { copy.layer(layer, &pieces, Box::new(chunks.to_vec())) }.expect("given");
        }
        copy.fence().expect("waits");
        self.device.drain(direction).expect("ends");
    }
}

#[test]
fn layers_are_copied_by_every_way_as_the_plan_says() {
    for layout in [OPAQUE, TOKENS] {
        for (seed, path) in CopyPath::ALL.into_iter().enumerate() {
            let copies = Copies::new(layout, path, seed as u64 + 1);
            let random = &mut Random::new(seed as u64 + 9);
            let pool = LocalCpu::new(1 << 16, Duration::from_secs(60)).expect("a pool");
            let reach = copies.device.reach(&pool.mapped().expect("open"));
            assert_eq!(reach, Reach::PageLocked);
            let spans = copies.spans();
            let lens: Vec<_> = spans
                .iter()
                .map(|span| LAYERS * layer_bytes(&layout, span.num_tokens))
                .collect();
            let mut wanted: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0x55; len]).collect();
            let chunks = pool.allocate(&lens).expect("room").into_iter();
            let chunks: Vec<_> = chunks.map(|chunk| Arc::new(Mutex::new(chunk))).collect();
            for chunk in &chunks {
                chunk.lock().expect("whole").bytes_mut().fill(0x55);
            }
            let layer_len = copies.engine.layers[0].len();
            let contents: Vec<_> = (0..LAYERS).map(|_| random.bytes(layer_len)).collect();
            for (layer, bytes) in contents.iter().enumerate() {
                copies.engine.set_layer(layer, bytes);
                for (span, chunk) in spans.iter().zip(&mut wanted) {
                    let begin = layer * layer_bytes(&layout, span.num_tokens);
                    for (paged, stored, len) in copies.runs(span) {
                        chunk[begin + stored..][..len].copy_from_slice(&bytes[paged..][..len]);
                    }
                }
            }
            copies.copy(Direction::Gather, &chunks);
            for (chunk, wanted) in chunks.iter().zip(&wanted) {
                let found = chunk.lock().expect("whole").bytes_mut().to_vec();
                assert!(found == *wanted, "{layout:?} {path:?}");
            }

            let mut wiped = vec![vec![0xee; layer_len]; LAYERS];
            for (layer, bytes) in wiped.iter_mut().enumerate() {
                copies.engine.set_layer(layer, bytes);
                for span in &spans {
                    for (paged, _, len) in copies.runs(span) {
                        bytes[paged..][..len].copy_from_slice(&contents[layer][paged..][..len]);
                    }
                }
            }
            copies.copy(Direction::Scatter, &chunks);
            for (layer, bytes) in wiped.iter().enumerate() {
                assert!(
                    copies.engine.layer(layer) == *bytes,
                    "{layout:?} {path:?} {layer}"
                );
            }
            copies.device.settle();
            let counts = copies.device.counts();
            assert_eq!(counts[path.name()], 2 * LAYERS as u64, "{counts:?}");
            assert_eq!(
                counts.values().sum::<u64>(),
                2 * LAYERS as u64,
                "{counts:?}"
            );
        }
    }
}
