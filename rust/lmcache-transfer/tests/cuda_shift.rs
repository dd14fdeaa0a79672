//! Stored keys turned to new positions and gaps zeroed, launched through the fake driver.

mod common;

use common::fake::Fake;
use lmcache_transfer::cuda::driver::{Context, Driver};
use lmcache_transfer::cuda::handles::DeviceMemory;
use lmcache_transfer::cuda::kernels::{LaunchShape, RopeShift, ShiftKernel};

const TOKENS: usize = 300;
const HEADS: usize = 3;
/// Elements of a head, of which the first 24 are rotated.
const HEAD: usize = 40;
const ROTARY: usize = 24;

fn host<T: Copy>(memory: &DeviceMemory, values: &[T]) {
    assert!(size_of_val(values) <= memory.len());
    // SAFETY: the fake's device memory is the host's, and nothing runs yet.
    unsafe {
        std::ptr::copy_nonoverlapping(values.as_ptr(), memory.address() as *mut T, values.len())
    };
}

fn keys_of(memory: &DeviceMemory) -> Vec<f32> {
    // SAFETY: as above, after the stream was drained.
    unsafe { std::slice::from_raw_parts(memory.address() as *const f32, TOKENS * HEADS * HEAD) }
        .to_vec()
}

#[test]
fn keys_serve_their_new_positions_and_gaps_are_zero() {
    let fake = Fake::new();
    let driver = Driver::open_at(&fake.path).expect("opens");
    let context = Context::primary(&driver, 0).expect("a GPU");
    let current = context.enter().expect("enters");
    // SAFETY: the fake takes any image.
    let kernels = unsafe { current.kernels_of(b"fake") }.expect("loads");
    let stream = current.stream().expect("one");
    let memory = |len| current.device_memory(len).expect("memory");

    let frequencies: Vec<f64> = (0..ROTARY / 2)
        .map(|pair| 10_000f64.powf(-2.0 * pair as f64 / ROTARY as f64))
        .collect();
    let content = |token: usize, at: usize| ((token * 31 + at * 7) % 17) as f64 / 8.0 - 1.0;
    // A key as the model makes it for a position, NeoX pairs.
    let made_for = |position: i64, token: usize| -> Vec<f32> {
        let mut key: Vec<f64> = (0..HEADS * HEAD).map(|at| content(token, at)).collect();
        for head in key.chunks_mut(HEAD) {
            for (pair, frequency) in frequencies.iter().enumerate() {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                let (x, y) = (head[pair], head[pair + ROTARY / 2]);
                head[pair] = x * cosine - y * sine;
                head[pair + ROTARY / 2] = y * cosine + x * sine;
            }
        }
        key.into_iter().map(|value| value as f32).collect()
    };
    let is_gap = |token: usize| token % 50 == 9;
    let stored: Vec<i64> = (0..TOKENS)
        .map(|token| {
            if is_gap(token) {
                -1
            } else {
                token as i64 + 1000
            }
        })
        .collect();
    let wanted: Vec<i64> = (0..TOKENS).map(|token| token as i64 * 3 + 70).collect();
    let before: Vec<f32> = (0..TOKENS)
        .flat_map(|token| made_for(token as i64 + 1000, token))
        .collect();

    let bytes = TOKENS * HEADS * HEAD * 4;
    let (keys, from, to, table) = (
        memory(bytes),
        memory(8 * TOKENS),
        memory(8 * TOKENS),
        memory(8 * ROTARY),
    );
    host(&keys, &before);
    host(&from, &stored);
    host(&to, &wanted);
    host(&table, &RopeShift::half_turns(&frequencies));
    let shift = RopeShift {
        keys: keys.address(),
        stored: from.address(),
        wanted: to.address(),
        half_turns: table.address(),
        token_stride: (HEADS * HEAD * 4) as u64,
        head_stride: (HEAD * 4) as u64,
        rows: keys.address(),
        row_bytes: (HEADS * HEAD * 4) as u64,
        num_tokens: TOKENS as u32,
        heads: HEADS as u32,
        rotary_dim: ROTARY as u32,
        interleaved: 0,
    };
    assert_eq!(shift.vector_width(), 16);
    for kernel in [
        ShiftKernel::RotateF32,
        ShiftKernel::ZeroGaps(shift.vector_width()),
    ] {
        let shape = LaunchShape::of_shift(&shift, kernel).expect("something to do");
        // SAFETY: all of it is device memory of this test.
        unsafe { current.launch_shift(&kernels, kernel, shape, &shift, stream.id()) }
            .expect("launches");
    }
    current.drain(stream.id()).expect("ends");

    for (token, key) in keys_of(&keys).chunks(HEADS * HEAD).enumerate() {
        if is_gap(token) {
            assert!(key.iter().all(|&value| value == 0.0), "token {token}");
            continue;
        }
        for (found, expected) in key.iter().zip(made_for(wanted[token], token)) {
            assert!(
                (found - expected).abs() < 2e-6,
                "token {token}: {found} for {expected}"
            );
        }
    }
}
