//! Most recently used: one list whose front is what was used or stored last.
//!
//! A chunk that others depend on keeps the place it had when the first of them came, so that all of them
//! are nearer to the front than it is. Hence a use moves only the chunk it ends at, and only if nothing
//! was ever stored behind that one. A fresh entry is the next to leave once its batch is over.

use super::policy::{Access, Order};
use super::slab::{FIRST, FRESH, INNER, Slab};

#[derive(Debug)]
pub(super) struct Mru;

impl Order for Mru {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, _: u64, _: usize) {
        slab.push_front(at, FIRST);
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], _: Access) {
        let Some((&last, before)) = chain.split_last() else {
            return;
        };
        let mut fresh = false;
        for &at in before {
            let slot = &mut slab.slots[at as usize];
            fresh |= slot.has(FRESH);
            slot.flags = slot.flags & !FRESH | INNER;
            // Not in their order yet, whichever was published first.
            if fresh {
                slab.move_to_front(at, FIRST);
            }
        }
        let slot = &mut slab.slots[last as usize];
        slot.flags &= !FRESH;
        if fresh || !slot.has(INNER) {
            slab.move_to_front(last, FIRST);
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, _: usize) -> Option<u32> {
        slab.first_untouched(FIRST)
    }

    fn home(&self, _: u8, _: u32) -> u16 {
        FIRST
    }
}
