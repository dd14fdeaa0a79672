//! Every wait of the CUDA side is needed: left out, bytes are torn or given back too early, and a test sees it.

mod common;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::engine::{BLOCK, CHUNK, ENGINE, Engine, LAYERS, NAMESPACE, TOKENS, at, hashes};
use common::fake::Fake;
use lmcache_core::layout::Placement;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::ChunkMut;
use lmcache_transfer::cuda::device::{Device, Reach};
use lmcache_transfer::cuda::executor::CopyPath;
use lmcache_transfer::cuda::flow::{DeviceLoad, DeviceStore};
use lmcache_transfer::cuda::handles::DeviceMemory;
use lmcache_transfer::cuda::kernels::Direction;
use lmcache_transfer::cuda::layer_copy::{DeviceLayerCopy, Piece};
use lmcache_transfer::cuda::planted::{WAITS, leave_out};
use lmcache_transfer::cuda::staging::DeviceBuffer;
use lmcache_transfer::flow::Chunks;

const STEPS: usize = 4;
const POOL: u64 = 1 << 16;
/// Bytes of the blocks that `slots` names, in a layer.
const BLOCKS_OF_CHUNK: std::ops::Range<usize> = 2 * 128..4 * 128;

fn slots() -> Vec<i64> {
    (0..CHUNK as i64)
        .map(|token| token + 2 * BLOCK as i64)
        .collect()
}

fn layer_bytes() -> usize {
    TOKENS.layer_bytes(CHUNK).expect("small")
}

/// An engine, a GPU as a process has it, and a pool that this page-locks.
struct World {
    device: Arc<Device>,
    pool: LocalCpu,
    engine: Engine,
    fake: Fake,
}

impl World {
    fn new(path: CopyPath) -> Self {
        let fake = Fake::new();
        let engine = Engine::new(&fake, TOKENS);
        let device = Device::over(0, Arc::clone(&engine.executor)).expect("a GPU");
        let pool = LocalCpu::new(POOL, Duration::from_secs(60)).expect("a pool");
        assert_eq!(
            device.reach(&pool.mapped().expect("open")),
            Reach::PageLocked
        );
        device.force_path(Some(path));
        Self {
            device: Arc::new(device),
            pool,
            engine,
            fake,
        }
    }

    /// The engine's forward pass: its stream writes `value` all over each layer.
    fn forward(&self, value: u8) {
        let current = self.engine.enter();
        for layer in &self.engine.layers {
            // SAFETY: the engine's own memory; what orders it is what the tests are about.
            unsafe { current.fill(layer.address(), value, layer.len(), ENGINE) }.expect("fills");
        }
    }

    /// Memory for what the engine reads, layer by layer.
    fn copies(&self) -> Vec<DeviceMemory> {
        let current = self.engine.enter();
        let memory = |layer: &DeviceMemory| current.device_memory(layer.len()).expect("memory");
        self.engine.layers.iter().map(memory).collect()
    }

    /// The engine's stream reads a layer.
    fn read(&self, layer: usize, into: &[DeviceMemory]) {
        let (from, to) = (&self.engine.layers[layer], &into[layer]);
        // SAFETY: as in `forward`.
        unsafe {
            self.engine
                .enter()
                .copy(to.address(), from.address(), from.len(), ENGINE)
        }
        .expect("copies");
    }

    /// Late copies may still be under way where a wait was left out.
    fn drain(&self) {
        let current = self.engine.enter();
        for direction in [Direction::Gather, Direction::Scatter] {
            let stream = self.engine.executor.stream(direction);
            current.drain(stream).expect("ends");
        }
        current.drain(ENGINE).expect("ends");
    }

    fn chunk(&self) -> ChunkMut {
        let lens = [LAYERS * layer_bytes()];
        self.pool.allocate(&lens).expect("room").remove(0)
    }

    /// Whether nobody writes to the pool's memory, all of which is free now.
    fn is_quiet(&self, mut all: ChunkMut) -> bool {
        all.bytes_mut().fill(0x11);
        self.drain();
        all.bytes_mut().iter().all(|&byte| byte == 0x11)
    }

    fn all_of_pool(&self) -> Option<ChunkMut> {
        Some(self.pool.allocate(&[POOL as usize])?.remove(0))
    }

    fn layer_copy(&self, direction: Direction) -> DeviceLayerCopy {
        let slots = slots();
        let (device, cache) = (&self.device, &self.engine.cache);
        let spans = [at(&slots, 0)];
        DeviceLayerCopy::plan(device, cache, ENGINE, direction, spans).expect("planned")
    }

    /// Has all layers of a chunk copied, which is held until that is done.
    fn copy_layers(&self, copy: &DeviceLayerCopy, chunk: &Arc<Mutex<ChunkMut>>) {
        let address = chunk.lock().expect("whole").bytes_mut().as_mut_ptr() as u64;
        for layer in 0..LAYERS {
            let piece = Piece {
                address: address + (layer * layer_bytes()) as u64,
                len: layer_bytes(),
                reach: Reach::PageLocked,
            };
            // SAFETY: the chunk's own bytes, and it is held.
            unsafe { copy.layer(layer, &[piece], Box::new(Arc::clone(chunk))) }.expect("given");
        }
    }
}

fn all_are(memory: &[DeviceMemory], range: std::ops::Range<usize>, value: u8) -> bool {
    memory.iter().all(|memory| {
        // SAFETY: the fake's device memory is the host's, and nothing writes to it now.
        let bytes = unsafe {
            std::slice::from_raw_parts(memory.address() as *const u8, memory.len()).to_vec()
        };
        bytes[range.clone()].iter().all(|&byte| byte == value)
    })
}

/// Steps that write a block, store it, and give it back for the next step; true where each chunk has its own
/// step's bytes.
fn job_stores(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let slots = slots();
    let mut whole = true;
    for step in 0..STEPS {
        let value = step as u8 + 1;
        let chunk = world
            .engine
            .reserve(step, &[LAYERS * layer_bytes()])
            .remove(0);
        world.fake.be_late(200, seed + step as u64);
        world.forward(value);
        let mut job = world.engine.begin(path, vec![(chunk, at(&slots, 0))]);
        (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
        let ticket = job.finish().expect("given");
        ticket.fence(ENGINE).expect("waits");
        world.forward(0xff);
        let mut chunk = ticket.wait().expect("done").remove(0);
        // What is there when the store says it is done.
        whole &= chunk.bytes_mut().iter().all(|&byte| byte == value);
        world.drain();
    }
    whole
}

/// A step that still reads a block, a load into it, and a step that reads what was loaded; true where both read
/// what they should.
fn job_loads(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let slots = slots();
    let mut chunks = world.engine.reserve(0, &[LAYERS * layer_bytes()]);
    chunks[0].bytes_mut().fill(7);
    let objects = world.engine.publish(chunks);
    let (before, after) = (world.copies(), world.copies());
    world.fake.be_late(300, seed);
    world.forward(1);
    (0..LAYERS).for_each(|layer| world.read(layer, &before));
    let object = objects.into_iter().next().expect("stored");
    let mut job = world.engine.begin(path, vec![(object, at(&slots, 0))]);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    for layer in 0..LAYERS {
        job.wait_for_layer(layer).expect("waits");
        world.read(layer, &after);
    }
    drop(job);
    world.drain();
    all_are(&before, 0..before[0].len(), 1) && all_are(&after, BLOCKS_OF_CHUNK, 7)
}

/// A store that is given up in the middle; true where its memory is nobody's once it is free.
fn job_given_up(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let slots = slots();
    world.fake.be_late(400, seed);
    let mut job = world
        .engine
        .begin(path, vec![(world.chunk(), at(&slots, 0))]);
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    drop(job);
    let all = world.all_of_pool().expect("the job is gone");
    world.is_quiet(all)
}

/// As [`job_stores`] by whole requests, which publish what they store.
fn request_stores(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let (slots, all) = (slots(), hashes(STEPS));
    let mut whole = true;
    for (step, hash) in all.chunks(1).enumerate() {
        let value = step as u8 + 1;
        world.fake.be_late(200, seed + step as u64);
        world.forward(value);
        let chunks = of_one(hash, &slots);
        let (device, cache) = (&world.device, &world.engine.cache);
        // SAFETY: the tests order the engine by its stream, or show what happens when they do not.
        let store = unsafe { DeviceStore::begin(device, cache, &world.pool, ENGINE, &chunks, 0) };
        let mut store = store.expect("begins");
        store.all_layers().expect("given");
        let publication = store.finish().expect("given");
        world.forward(0xff);
        assert_eq!(publication.wait().expect("done").chunks, 1);
        let found = world.pool.get(NAMESPACE, hash).remove(0);
        whole &= found.bytes().to_vec().iter().all(|&byte| byte == value);
        world.drain();
    }
    whole
}

/// As [`job_loads`] by a whole request.
fn request_loads(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let (slots, hash) = (slots(), hashes(1));
    let mut reserved = world
        .pool
        .reserve(NAMESPACE, &hash, 0, |_| LAYERS * layer_bytes())
        .chunks;
    reserved[0].1.bytes_mut().fill(7);
    let chunks = reserved.into_iter().map(|(_, chunk)| chunk).collect();
    assert!(world.pool.commit(NAMESPACE, &hash, chunks));
    let (before, after) = (world.copies(), world.copies());
    world.fake.be_late(300, seed);
    world.forward(1);
    (0..LAYERS).for_each(|layer| world.read(layer, &before));
    let chunks = of_one(&hash, &slots);
    let (device, cache) = (&world.device, &world.engine.cache);
    // SAFETY: as above.
    let load = unsafe { DeviceLoad::begin(device, cache, &world.pool, ENGINE, "", &chunks, 0) };
    let mut load = load.expect("begins");
    load.all_layers().expect("given");
    assert_eq!(load.finish().expect("given").tokens, CHUNK);
    (0..LAYERS).for_each(|layer| world.read(layer, &after));
    world.drain();
    world.device.settle();
    all_are(&before, 0..before[0].len(), 1) && all_are(&after, BLOCKS_OF_CHUNK, 7)
}

fn of_one<'a>(hashes: &'a [lmcache_core::hash::ChunkHash], slots: &'a [i64]) -> Chunks<'a> {
    Chunks {
        namespace: NAMESPACE,
        hashes,
        chunk_size: CHUNK,
        num_tokens: CHUNK,
        placement: Placement::Slots(slots),
    }
}

/// As [`job_stores`] a layer at a time, into memory of the caller's.
fn layers_store(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let chunk = Arc::new(Mutex::new(world.chunk()));
    let mut whole = true;
    for step in 0..STEPS {
        let value = step as u8 + 1;
        world.fake.be_late(200, seed + step as u64);
        world.forward(value);
        let copy = world.layer_copy(Direction::Gather);
        world.copy_layers(&copy, &chunk);
        copy.fence().expect("waits");
        world.forward(0xff);
        world.device.drain(Direction::Gather).expect("waits");
        let found = chunk.lock().expect("whole").bytes_mut().to_vec();
        whole &= found.iter().all(|&byte| byte == value);
        world.drain();
    }
    world.device.settle();
    whole
}

/// As [`job_loads`] a layer at a time, out of memory of the caller's.
fn layers_load(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    let chunk = Arc::new(Mutex::new(world.chunk()));
    chunk.lock().expect("whole").bytes_mut().fill(7);
    let (before, after) = (world.copies(), world.copies());
    world.fake.be_late(300, seed);
    world.forward(1);
    (0..LAYERS).for_each(|layer| world.read(layer, &before));
    let copy = world.layer_copy(Direction::Scatter);
    world.copy_layers(&copy, &chunk);
    (0..LAYERS).for_each(|layer| world.read(layer, &after));
    world.drain();
    world.device.settle();
    all_are(&before, 0..before[0].len(), 1) && all_are(&after, BLOCKS_OF_CHUNK, 7)
}

/// Memory that a copy holds; true where nobody writes to it once it is free.
fn memory_is_released(seed: u64, path: CopyPath) -> bool {
    let world = World::new(path);
    world.fake.be_late(400, seed);
    let chunk = Arc::new(Mutex::new(world.chunk()));
    let copy = world.layer_copy(Direction::Gather);
    world.copy_layers(&copy, &chunk);
    drop(chunk);
    loop {
        if let Some(all) = world.all_of_pool() {
            return world.is_quiet(all);
        }
        thread::sleep(Duration::from_micros(50));
    }
}

/// Whether memory is back once everything under way was waited for, by `wait`.
fn is_back_behind(seed: u64, path: CopyPath, wait: impl FnOnce(&mut World)) -> bool {
    let mut world = World::new(path);
    world.fake.be_late(3000, seed);
    let chunk = Arc::new(Mutex::new(world.chunk()));
    let copy = world.layer_copy(Direction::Gather);
    world.copy_layers(&copy, &chunk);
    drop((chunk, copy));
    wait(&mut world);
    let all = world.all_of_pool();
    world.drain();
    all.is_some()
}

fn settled(seed: u64, path: CopyPath) -> bool {
    is_back_behind(seed, path, |world| world.device.settle())
}

fn closed(seed: u64, path: CopyPath) -> bool {
    is_back_behind(seed, path, |world| {
        let other = Device::over(0, Arc::clone(&world.engine.executor)).expect("a GPU");
        let device = std::mem::replace(&mut world.device, Arc::new(other));
        assert_eq!(Arc::strong_count(&device), 1);
        drop(device);
    })
}

/// A layer that is staged in a buffer with some gaps in it, few or many; true where what comes out of it is what went
/// in, but for the gaps.
fn buffer_is_staged(seed: u64, path: CopyPath) -> bool {
    const ROW: usize = 64;
    let world = World::new(path);
    world.fake.be_late(200, seed);
    let num_rows = 24;
    let chunk = || {
        let chunk = world
            .pool
            .allocate(&[num_rows * ROW])
            .expect("room")
            .remove(0);
        Arc::new(Mutex::new(chunk))
    };
    let (source, target) = (chunk(), chunk());
    source.lock().expect("whole").bytes_mut().fill(7);
    target.lock().expect("whole").bytes_mut().fill(9);
    let buffer = DeviceBuffer::new(&world.device, Direction::Scatter, num_rows * ROW);
    let buffer = buffer.expect("memory");
    let exchange = |is_load, chunk: &Arc<Mutex<ChunkMut>>| {
        let piece = Piece {
            address: chunk.lock().expect("whole").bytes_mut().as_mut_ptr() as u64,
            len: num_rows * ROW,
            reach: Reach::PageLocked,
        };
        // SAFETY: the chunk's own bytes, and it is held.
        let moved = unsafe { buffer.exchange(is_load, &[(piece, 0)], Box::new(Arc::clone(chunk))) };
        assert_eq!(moved.expect("given"), num_rows * ROW);
    };
    exchange(true, &source);
    let num_gaps = if seed.is_multiple_of(2) { 2 } else { 6 };
    let gaps: Vec<_> = (0..num_gaps)
        .map(|gap| (4 * gap * ROW, (4 * gap + 1) * ROW))
        .collect();
    buffer.zero(&gaps).expect("given");
    exchange(false, &target);
    drop(buffer);
    world.device.drain(Direction::Scatter).expect("waits");
    let found = target.lock().expect("whole").bytes_mut().to_vec();
    world.drain();
    world.device.settle();
    found.chunks(ROW).enumerate().all(|(row, bytes)| {
        let is_gap = row.is_multiple_of(4) && row / 4 < num_gaps;
        bytes.iter().all(|&byte| byte == if is_gap { 0 } else { 7 })
    })
}

/// True where all went well.
type Scenario = fn(u64, CopyPath) -> bool;

/// What shows the absence of which waits.
const SCENARIOS: [(Scenario, &[&str]); 11] = [
    (
        job_stores,
        &[
            "store after engine",
            "engine after store",
            "host after copies",
        ],
    ),
    (job_loads, &["load after engine", "engine after load"]),
    (job_given_up, &["drop after copies"]),
    (
        request_stores,
        &[
            "store after engine",
            "engine after whole store",
            "host after copies",
        ],
    ),
    (
        request_loads,
        &["load after engine", "engine after whole load"],
    ),
    (
        layers_store,
        &[
            "layer copy after engine",
            "engine after stored layers",
            "host after stream",
        ],
    ),
    (
        layers_load,
        &["layer copy after engine", "engine after loaded layer"],
    ),
    (memory_is_released, &["release after copies"]),
    (settled, &["settle after landings"]),
    (closed, &["close after landings"]),
    (buffer_is_staged, &["host after stream"]),
];

#[test]
fn all_is_whole_with_every_wait_in_place() {
    for (scenario, waits) in SCENARIOS {
        for path in CopyPath::ALL {
            for seed in 0..8 {
                assert!(
                    scenario(seed, path),
                    "{path:?}, seed {seed}: torn ({waits:?})"
                );
            }
        }
    }
}

#[test]
fn every_wait_is_needed() {
    let mut seen = Vec::new();
    for (scenario, waits) in SCENARIOS {
        for path in CopyPath::ALL {
            for wait in waits {
                leave_out(Some(wait));
                assert!(
                    (0..60).any(|seed| !scenario(seed, path)),
                    "{path:?}: nobody saw that `{wait}` was left out"
                );
                seen.push(*wait);
            }
        }
    }
    for wait in WAITS {
        assert!(seen.contains(&wait), "no scenario leaves out `{wait}`");
    }
}

/// A name stands for one place: what leaves it out leaves out one wait.
#[test]
fn every_name_is_at_one_place() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let files = fs::read_dir(folder).expect("sources");
    let all: String = files
        .map(|file| fs::read_to_string(file.expect("a file").path()).expect("text"))
        .collect();
    let used: Vec<&str> = all
        .split("left_out(\"")
        .skip(1)
        .filter_map(|rest| rest.split_once('"'))
        .map(|(name, _)| name)
        .collect();
    let (mut used, mut named) = (used, WAITS.to_vec());
    used.sort_unstable();
    named.sort_unstable();
    assert_eq!(used, named);
}
