//! Adaptive replacement (ARC): what was seen once against what was seen again, both in order of use.
//!
//! Ghosts of both lists are remembered; storing one of them again is a regret that moves the share which
//! the first list may keep, and brings the entry into the second. Stores refresh an entry within its list;
//! only lookups, and returns from the ghosts, count as seeing it again.
//!
//! One departure from the paper keeps a chunk behind those that depend on it: an entry of the second list
//! that was extended after the front of the first one was refreshed waits for that one. The capacity is
//! the number of entries there are, since the store's limit is in bytes.

use super::ghost::Ghosts;
use super::policy::{Access, Order};
use super::slab::{FIRST, FRESH, MAIN, Slab, is_at_least};

const ONCE: u16 = FIRST;
const AGAIN: u16 = FIRST + 1;

/// A mark is the time an entry of the first list was refreshed or, in the second, was last extended.
#[derive(Debug, Default)]
pub(super) struct AdaptiveReplacement {
    /// Entries that the first list may keep while the second has any.
    target: usize,
    ghosts: Ghosts,
}

impl Order for AdaptiveReplacement {
    fn enter<V>(&mut self, slab: &mut Slab<V>, at: u32, fingerprint: u64, num_resident: usize) {
        let now = slab.tick();
        let (once, again) = (self.ghosts.len(0), self.ghosts.len(1));
        let regretted = self.ghosts.take(fingerprint);
        match regretted {
            Some(0) => self.target = (self.target + (again / once).max(1)).min(num_resident),
            Some(_) => self.target = self.target.saturating_sub((once / again).max(1)),
            None => {}
        }
        let slot = &mut slab.slots[at as usize];
        slot.mark = now;
        if regretted.is_some() {
            slot.flags |= MAIN;
            slab.push_back(at, AGAIN);
        } else {
            slab.push_back(at, ONCE);
        }
    }

    fn walk<V>(&mut self, slab: &mut Slab<V>, chain: &[u32], access: Access) {
        let now = slab.tick();
        let (mut once_behind, mut again_behind) = (false, access == Access::Use);
        for &at in chain.iter().rev() {
            let slot = &mut slab.slots[at as usize];
            slot.flags &= !FRESH;
            if again_behind {
                slot.flags |= MAIN;
            }
            if slot.has(MAIN) {
                again_behind = true;
                if once_behind {
                    slot.mark = now;
                }
                slab.move_to_back(at, AGAIN);
            } else {
                once_behind = true;
                slot.mark = now;
                slab.move_to_back(at, ONCE);
            }
        }
    }

    fn candidate<V>(&mut self, slab: &mut Slab<V>, _: usize) -> Option<u32> {
        let once = slab.first_untouched(ONCE);
        let again = slab.first_untouched(AGAIN);
        let (Some(once), Some(again)) = (once, again) else {
            return once.or(again);
        };
        let [once_mark, again_mark] = [once, again].map(|at| slab.slots[at as usize].mark);
        let over = slab.len(ONCE) > self.target.max(1);
        Some(if over || is_at_least(again_mark, once_mark) {
            once
        } else {
            again
        })
    }

    fn home(&self, flags: u8, _: u32) -> u16 {
        if flags & MAIN == 0 { ONCE } else { AGAIN }
    }

    fn ghosts(&mut self) -> Option<&mut Ghosts> {
        Some(&mut self.ghosts)
    }

    fn ghost_list(&self, flags: u8) -> usize {
        usize::from(flags & MAIN != 0)
    }
}
