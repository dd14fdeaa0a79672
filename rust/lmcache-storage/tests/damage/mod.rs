//! Damage to an object, the same in every run.
#![allow(dead_code, reason = "not every test file uses all")]

use std::collections::HashMap;

use lmcache_storage::object_form::Defect;

/// Splitmix.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// Flips bits, cuts, swaps and wipes the whole object, a hundred thousand times: each is a defect, and each of
/// these defects is told at least once.
pub(crate) fn all_is_seen<T: std::fmt::Debug>(
    whole: &[u8],
    random: &mut Random,
    read: impl Fn(&[u8]) -> Result<T, Defect>,
    told: &[Defect],
) {
    let mut seen = HashMap::new();
    for round in 0..100_000 {
        let mut bytes = whole.to_vec();
        match round % 4 {
            0 => {
                for _ in 0..1 + random.below(3) {
                    let at = random.below(bytes.len());
                    bytes[at] ^= 1 << random.below(8);
                }
            }
            1 => bytes.truncate(random.below(whole.len())),
            2 => {
                let len = 1 + random.below(512);
                let (a, b) = (
                    random.below(bytes.len() - len),
                    random.below(bytes.len() - len),
                );
                let moved = bytes[a..a + len].to_vec();
                let other = bytes[b..b + len].to_vec();
                bytes[a..a + len].copy_from_slice(&other);
                bytes[b..b + len].copy_from_slice(&moved);
            }
            _ => {
                let at = random.below(bytes.len());
                let end = bytes.len().min(at + 1 + random.below(4096));
                bytes[at..end].fill(0);
            }
        }
        if bytes == whole {
            continue;
        }
        let defect = read(&bytes).expect_err("damage passed for a whole object");
        *seen.entry(defect).or_insert(0) += 1;
    }
    for defect in told {
        assert!(
            seen.contains_key(defect),
            "{defect} was never told: {seen:?}"
        );
    }
}
