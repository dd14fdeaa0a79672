//! S3-FIFO: a small queue for what was never looked up, a main queue for the rest, and ghosts.
//!
//! An entry starts in the small queue, a tenth of all, and leaves from its front to the ghosts. A lookup
//! moves it to the main queue; so does storing it again while its ghost is remembered. In the main queue
//! a use earns a credit, up to three, and each credit pays for one more passage.
//!
//! Two departures from the paper keep a chunk behind those that depend on it. A lookup moves an entry to
//! the main queue at once, not when it comes to the front of the small one; and it moves the chunks it
//! passed on its way, tail first, to the back of the main queue. And an entry of the main queue that was
//! extended after the front of the small queue entered waits for that one.

use super::ghost::Ghosts;
use super::policy::{Access, Order};
use super::slab::{FIRST, FRESH, HELD, MAIN, Slab, is_at_least};

const SMALL_QUEUE: u16 = FIRST;
const MAIN_QUEUE: u16 = FIRST + 1;
const MAX_CREDIT: u8 = 3;
/// The small queue's share is one in this many entries.
const SMALL_SHARE: usize = 10;

/// A mark is the time an entry entered the small queue or, in the main one, was last extended.
#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    ghosts: Ghosts,
}

impl S3Fifo {
    fn use_chain<V>(slab: &mut Slab<V>, chain: &[u32]) {
        let mut behind = 0;
        for (position, &at) in chain.iter().enumerate().rev() {
            let slot = &mut slab.slots[at as usize];
            let passed = position + 1 < chain.len();
            let stays = slot.has(MAIN) && slot.list != HELD && !slot.has(FRESH) && !passed;
            let earned = u8::from(slot.has(MAIN));
            slot.credit = (slot.credit + earned).min(MAX_CREDIT).max(behind);
            slot.flags = slot.flags & !FRESH | MAIN;
            behind = slot.credit;
            if !stays {
                slab.move_to_back(at, MAIN_QUEUE);
            }
        }
    }

    fn refresh_chain<V>(slab: &mut Slab<V>, chain: &[u32]) {
        let now = slab.tick();
        let (mut extended, mut behind) = (false, None);
        let mut small_behind = false;
        for &at in chain.iter().rev() {
            let slot = &mut slab.slots[at as usize];
            let mut moves = slot.list == HELD;
            if let Some(credit) = behind {
                moves |= !slot.has(MAIN);
                slot.flags |= MAIN;
                slot.credit = slot.credit.max(credit);
            }
            extended |= slot.has(FRESH);
            slot.flags &= !FRESH;
            moves |= extended;
            let queue = if slot.has(MAIN) {
                behind = Some(slot.credit);
                if small_behind {
                    slot.mark = now;
                }
                MAIN_QUEUE
            } else {
                small_behind = true;
                if moves {
                    slot.mark = now;
                }
                SMALL_QUEUE
            };
            if moves {
                slab.move_to_back(at, queue);
            }
        }
    }

    /// The entry of the main queue that leaves next; those before it pay with a credit.
    fn main_candidate<V>(slab: &mut Slab<V>) -> Option<u32> {
        loop {
            let at = slab.first_untouched(MAIN_QUEUE)?;
            let slot = &mut slab.slots[at as usize];
            if slot.credit == 0 {
                return Some(at);
            }
            slot.credit -= 1;
            slab.move_to_back(at, MAIN_QUEUE);
        }
    }
}

impl Order for S3Fifo {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, fingerprint: u64, _: usize) {
        let returns = self.ghosts.take(fingerprint).is_some();
        let now = slab.tick();
        let slot = &mut slab.slots[at as usize];
        slot.mark = now;
        if returns {
            slot.flags |= MAIN;
            slab.push_back(at, MAIN_QUEUE);
        } else {
            slab.push_back(at, SMALL_QUEUE);
        }
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], access: Access) {
        match access {
            Access::Use => Self::use_chain(slab, chain),
            Access::Refresh => Self::refresh_chain(slab, chain),
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, num_resident: usize) -> Option<u32> {
        let small = slab.first_untouched(SMALL_QUEUE);
        if small.is_some() && slab.len(SMALL_QUEUE) > (num_resident / SMALL_SHARE).max(1) {
            return small;
        }
        let main = Self::main_candidate(slab);
        let (Some(small), Some(main)) = (small, main) else {
            return main.or(small);
        };
        let [small_mark, main_mark] = [small, main].map(|at| slab.slots[at as usize].mark);
        Some(if is_at_least(main_mark, small_mark) {
            small
        } else {
            main
        })
    }

    fn home(&self, flags: u8, _: u32) -> u16 {
        if flags & MAIN == 0 {
            SMALL_QUEUE
        } else {
            MAIN_QUEUE
        }
    }

    fn ghosts(&mut self) -> Option<&mut Ghosts> {
        Some(&mut self.ghosts)
    }
}
