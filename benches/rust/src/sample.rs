//! Samples, their output, and numbers that repeat from run to run.

use std::fmt::Write as _;
use std::time::Instant;

/// Nanoseconds that `work` takes, and what it gives.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let began = Instant::now();
    let given = work();
    (began.elapsed().as_nanos() as u64, given)
}

/// One case: named series of samples, and facts about it.
#[derive(Default)]
pub(crate) struct Case {
    text: String,
}

impl Case {
    pub(crate) fn new(name: &str) -> Self {
        let mut case = Self::default();
        let _ = write!(case.text, "{{\"case\":\"{name}\"");
        case
    }

    pub(crate) fn samples(&mut self, name: &str, nanoseconds: &[u64]) -> &mut Self {
        let _ = write!(self.text, ",\"{name}\":{nanoseconds:?}");
        self
    }

    pub(crate) fn fact(&mut self, name: &str, value: f64) -> &mut Self {
        let _ = write!(self.text, ",\"{name}\":{value}");
        self
    }

    pub(crate) fn print(&mut self) {
        println!("{}}}", self.text);
    }
}

/// A generator of numbers (SplitMix64): small, and the same on every machine.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count as u32).collect();
        for at in (1..count).rev() {
            order.swap(at, self.below(at + 1));
        }
        order
    }
}
