//! First in, first out: one list in order of entry; uses move nothing.
//!
//! A chunk enters anew, tail first, with every chunk that is stored behind it in its chain: it is worth
//! what depends on it, and would otherwise leave before that.

use super::policy::{Access, Order};
use super::slab::{FIRST, FRESH, Slab};

#[derive(Debug)]
pub(super) struct Fifo;

impl Order for Fifo {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, _: u64, _: usize) {
        slab.push_back(at, FIRST);
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], _: Access) {
        let mut extended = false;
        for &at in chain.iter().rev() {
            let slot = &mut slab.slots[at as usize];
            extended |= slot.has(FRESH);
            slot.flags &= !FRESH;
            if extended {
                slab.move_to_back(at, FIRST);
            }
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, _: usize) -> Option<u32> {
        slab.first_untouched(FIRST)
    }

    fn home(&self, _: u8, _: u32) -> u16 {
        FIRST
    }
}
