//! Least recently used: one list in order of use.
//!
//! A chain is moved tail first, so that its head is the last of it to leave.

use super::policy::{Access, Order};
use super::slab::{FIRST, Slab};

#[derive(Debug)]
pub(super) struct Lru;

impl Order for Lru {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, _: u64, _: usize) {
        slab.push_back(at, FIRST);
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], _: Access) {
        for &at in chain.iter().rev() {
            slab.move_to_back(at, FIRST);
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, _: usize) -> Option<u32> {
        slab.first_untouched(FIRST)
    }

    fn home(&self, _: u8, _: u32) -> u16 {
        FIRST
    }
}
