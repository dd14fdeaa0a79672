//! Every wait of the executor is needed: left out, bytes are torn, and the test sees it.

mod common;

use common::engine::{BLOCK, CHUNK, ENGINE, Engine, LAYERS, TOKENS, at};
use common::fake::Fake;
use lmcache_transfer::cuda::current::Current;
use lmcache_transfer::cuda::executor::CopyPath;
use lmcache_transfer::cuda::handles::DeviceMemory;
use lmcache_transfer::cuda::planted::{WAITS, leave_out};

const STEPS: usize = 4;

fn slots() -> Vec<i64> {
    (0..CHUNK as i64)
        .map(|token| token + 2 * BLOCK as i64)
        .collect()
}

/// The engine's forward pass: its stream writes `value` all over each layer.
fn forward(current: &Current, layers: &[DeviceMemory], value: u8) {
    for layer in layers {
        // SAFETY: the engine's own memory; what orders it is what the tests are about.
        unsafe { current.fill(layer.address(), value, layer.len(), ENGINE) }.expect("fills");
    }
}

/// Steps that write a block, store it, and give it back for the next step; true where each chunk has its own
/// step's bytes.
fn stores_are_whole(seed: u64, path: CopyPath) -> bool {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let slots = slots();
    let len = LAYERS * TOKENS.layer_bytes(CHUNK).expect("small");
    let mut whole = true;
    for step in 0..STEPS {
        let (value, chunk) = (step as u8 + 1, engine.reserve(step, &[len]).remove(0));
        fake.be_late(200, seed + step as u64);
        let current = engine.enter();
        forward(&current, &engine.layers, value);
        let mut job = engine.begin(path, vec![(chunk, at(&slots, 0))]);
        (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
        let ticket = job.finish().expect("given");
        ticket.fence(ENGINE).expect("waits");
        forward(&current, &engine.layers, 0xff);
        let chunk = ticket.wait().expect("done").remove(0);
        // What is there when the store says it is done.
        let mut chunk = chunk;
        whole &= chunk.bytes_mut().iter().all(|&byte| byte == value);
        // Late copies may still write to it where a wait was left out.
        current
            .drain(
                engine
                    .executor
                    .stream(lmcache_transfer::cuda::kernels::Direction::Gather),
            )
            .expect("ends");
        current.drain(ENGINE).expect("ends");
    }
    whole
}

/// A step that still reads a block, a load into it, and a step that reads what was loaded; true where both read
/// what they should.
fn loads_are_whole(seed: u64, path: CopyPath) -> bool {
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let slots = slots();
    let len = LAYERS * TOKENS.layer_bytes(CHUNK).expect("small");
    let mut chunks = engine.reserve(0, &[len]);
    chunks[0].bytes_mut().fill(7);
    let objects = engine.publish(chunks);
    fake.be_late(300, seed);
    let current = engine.enter();
    let of_layer = || {
        current
            .device_memory(engine.layers[0].len())
            .expect("memory")
    };
    let (before, after): (Vec<_>, Vec<_>) = (0..LAYERS).map(|_| (of_layer(), of_layer())).unzip();
    let read = |layer: usize, into: &DeviceMemory| {
        let from = &engine.layers[layer];
        // SAFETY: as in `forward`.
        unsafe { current.copy(into.address(), from.address(), from.len(), ENGINE) }
            .expect("copies");
    };
    forward(&current, &engine.layers, 1);
    before
        .iter()
        .enumerate()
        .for_each(|(layer, into)| read(layer, into));
    let mut job = engine.begin(
        path,
        vec![(objects.into_iter().next().expect("stored"), at(&slots, 0))],
    );
    (0..LAYERS).for_each(|layer| job.layer(layer).expect("given"));
    for (layer, into) in after.iter().enumerate() {
        job.wait_for_layer(layer).expect("waits");
        read(layer, into);
    }
    drop(job);
    current.drain(ENGINE).expect("ends");
    let bytes_of = |memory: &DeviceMemory| {
        // SAFETY: the fake's device memory is the host's, and nothing writes to it now.
        unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.len()) }.to_vec()
    };
    let blocks = 2 * 128..4 * 128;
    before
        .iter()
        .all(|layer| bytes_of(layer).iter().all(|&byte| byte == 1))
        && after.iter().all(|layer| {
            bytes_of(layer)[blocks.clone()]
                .iter()
                .all(|&byte| byte == 7)
        })
}

#[test]
fn every_wait_is_needed() {
    for path in CopyPath::ALL {
        let run = |seed| stores_are_whole(seed, path) && loads_are_whole(seed, path);
        leave_out(None);
        for seed in 0..10 {
            assert!(
                run(seed),
                "{path:?}: torn with every wait in place, seed {seed}"
            );
        }
        for wait in WAITS {
            leave_out(Some(wait));
            assert!(
                (0..60).any(|seed| !run(seed)),
                "{path:?}: nobody saw that `{wait}` was left out"
            );
        }
    }
}
