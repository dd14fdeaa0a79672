//! Least frequently used: a list for each count of uses, within it in order of use.
//!
//! Counts are kept within 255 of the lowest there is, so that a count names one of 256 lists and nothing
//! is searched. A fresh entry starts at the lowest count there is: it is behind those that were not used
//! either, and what was popular once does not stay for ever. A chunk's count is never below that of a chunk
//! behind it in its chain.

use super::policy::{Access, Order};
use super::slab::{FIRST, Slab};

const SPAN: u32 = 256;

#[derive(Debug, Default)]
pub(super) struct Lfu {
    /// No entry in the lists has a count below this.
    base: u32,
}

impl Lfu {
    pub(super) const NUM_LISTS: u16 = SPAN as u16;

    fn clamp(&self, count: u32) -> u32 {
        count.clamp(self.base, self.base.saturating_add(SPAN - 1))
    }

    fn raise_base<V>(&mut self, slab: &Slab<V>) {
        let top = self.base.saturating_add(SPAN);
        if let Some(lowest) = (self.base..top).find(|&count| slab.len(list_of(count)) > 0) {
            self.base = lowest;
        }
    }
}

fn list_of(count: u32) -> u16 {
    FIRST + (count % SPAN) as u16
}

impl Order for Lfu {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, _: u64, _: usize) {
        self.raise_base(slab);
        slab.slots[at as usize].mark = self.base;
        slab.push_back(at, list_of(self.base));
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], access: Access) {
        let uses = u32::from(access == Access::Use);
        let mut behind = 0;
        for &at in chain.iter().rev() {
            let count = self.clamp(slab.slots[at as usize].mark) + uses;
            let count = self.clamp(count.max(behind));
            behind = count;
            slab.slots[at as usize].mark = count;
            slab.move_to_back(at, list_of(count));
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, _: usize) -> Option<u32> {
        let counts = self.base..self.base.saturating_add(SPAN);
        for list in counts.map(list_of) {
            if slab.len(list) > 0
                && let Some(at) = slab.first_untouched(list)
            {
                return Some(at);
            }
        }
        None
    }

    fn home(&self, _: u8, mark: u32) -> u16 {
        list_of(self.clamp(mark))
    }
}
