//! Entries in one vector, joined into lists by `u32` links.
//!
//! ```text
//! front (leaves next) ⇄ … ⇄ cursor ⇄ … ⇄ back (leaves last)
//! ```

use super::IndexKey;

pub(super) const NIL: u32 = u32::MAX;

/// No list at all.
pub(super) const NOWHERE: u16 = 0;
/// Entries that somebody held when it was their turn to leave.
pub(super) const HELD: u16 = 1;
/// The first list of the policy's own.
pub(super) const FIRST: u16 = 2;

/// Reserved and not published.
pub(super) const PENDING: u8 = 1;
/// Published, and not walked since.
pub(super) const FRESH: u8 = 2;
/// Walked past: other entries depend, or depended, on this one.
pub(super) const INNER: u8 = 4;
/// At home in the policy's second list.
pub(super) const MAIN: u8 = 8;
/// Pending, and removed: it is not to be published.
pub(super) const REMOVED: u8 = 16;

/// One entry: with a value of one word, exactly one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Slot<V> {
    pub(super) value: Option<V>,
    pub(super) key: IndexKey,
    prev: u32,
    next: u32,
    /// The batch that touched it last.
    pub(super) stamp: u32,
    /// The policy's own: a time or a count.
    pub(super) mark: u32,
    pub(super) list: u16,
    pub(super) flags: u8,
    /// The policy's own.
    pub(super) credit: u8,
}

const _: () = assert!(size_of::<Slot<std::sync::Arc<()>>>() == 64);

impl<V> Slot<V> {
    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    front: u32,
    back: u32,
    len: u32,
    /// The first entry that the batch `cursor_batch` has not touched, as far as that is known; of the held
    /// list, the entry to ask next.
    cursor: u32,
    cursor_batch: u32,
}

const EMPTY: Ends = Ends {
    front: NIL,
    back: NIL,
    len: 0,
    cursor: NIL,
    cursor_batch: 0,
};

/// The entries and their lists.
#[derive(Debug)]
pub(super) struct Slab<V> {
    pub(super) slots: Vec<Slot<V>>,
    vacant: u32,
    lists: Vec<Ends>,
    /// Number of the current batch.
    pub(super) batch: u32,
    now: u32,
}

impl<V> Slab<V> {
    pub(super) fn new(num_lists: u16) -> Self {
        Self {
            slots: Vec::new(),
            vacant: NIL,
            lists: vec![EMPTY; usize::from(num_lists)],
            batch: 1,
            now: 0,
        }
    }

    /// A Pending entry in no list.
    pub(super) fn take(&mut self, key: IndexKey) -> u32 {
        let slot = Slot {
            value: None,
            key,
            prev: NIL,
            next: NIL,
            stamp: self.batch.wrapping_sub(1),
            mark: 0,
            list: NOWHERE,
            flags: PENDING,
            credit: 0,
        };
        if self.vacant != NIL {
            let at = self.vacant;
            self.vacant = self.slots[at as usize].next;
            self.slots[at as usize] = slot;
            return at;
        }
        let at = u32::try_from(self.slots.len()).ok().filter(|&at| at != NIL);
        let at = at.expect("fewer than 2^32 entries fit the memory they describe");
        grow(&mut self.slots);
        self.slots.push(slot);
        at
    }

    /// Makes an entry that is in no list vacant, and hands out its value.
    pub(super) fn vacate(&mut self, at: u32) -> Option<V> {
        let slot = &mut self.slots[at as usize];
        debug_assert_eq!(slot.list, NOWHERE);
        slot.flags = 0;
        slot.next = self.vacant;
        self.vacant = at;
        slot.value.take()
    }

    pub(super) fn len(&self, list: u16) -> usize {
        self.lists[usize::from(list)].len as usize
    }

    pub(super) fn front(&self, list: u16) -> u32 {
        self.lists[usize::from(list)].front
    }

    /// The entry behind this one in its list.
    pub(super) fn behind(&self, at: u32) -> u32 {
        self.slots[at as usize].next
    }

    /// A time later than all before; wraps, so compare with [`is_at_least`].
    pub(super) fn tick(&mut self) -> u32 {
        self.now = self.now.wrapping_add(1);
        self.now
    }

    pub(super) fn push_back(&mut self, at: u32, list: u16) {
        let ends = &mut self.lists[usize::from(list)];
        let last = std::mem::replace(&mut ends.back, at);
        ends.len += 1;
        if last == NIL {
            ends.front = at;
        }
        if ends.cursor == NIL && list != HELD {
            ends.cursor = at;
        }
        if last != NIL {
            self.slots[last as usize].next = at;
        }
        let slot = &mut self.slots[at as usize];
        (slot.list, slot.prev, slot.next) = (list, last, NIL);
    }

    pub(super) fn push_front(&mut self, at: u32, list: u16) {
        let batch = self.batch;
        let ends = &mut self.lists[usize::from(list)];
        let first = std::mem::replace(&mut ends.front, at);
        ends.len += 1;
        if first == NIL {
            ends.back = at;
        } else {
            self.slots[first as usize].prev = at;
        }
        let slot = &mut self.slots[at as usize];
        (slot.list, slot.prev, slot.next) = (list, NIL, first);
        // A touched entry before the cursor would only be passed over again.
        if slot.stamp != batch {
            ends.cursor = at;
        }
    }

    pub(super) fn unlink(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        let (list, prev, next) = (slot.list, slot.prev, slot.next);
        assert_ne!(
            list, NOWHERE,
            "corrupt list: taking out what is in none of them"
        );
        slot.list = NOWHERE;
        let ends = &mut self.lists[usize::from(list)];
        ends.len -= 1;
        if ends.cursor == at {
            ends.cursor = next;
        }
        if prev == NIL {
            ends.front = next;
        }
        if next == NIL {
            ends.back = prev;
        }
        if prev != NIL {
            self.slots[prev as usize].next = next;
        }
        if next != NIL {
            self.slots[next as usize].prev = prev;
        }
    }

    /// Reads the neighbours of entries that are about to be moved, so that they come from memory side by
    /// side: the moves themselves wait for each other.
    pub(super) fn fetch_neighbours(&self, chain: &[u32]) {
        let stamp = |at: u32| self.slots.get(at as usize).map_or(0, |slot| slot.stamp);
        let all = chain.iter().fold(0, |all, &at| {
            let slot = &self.slots[at as usize];
            all ^ stamp(slot.prev) ^ stamp(slot.next)
        });
        std::hint::black_box(all);
    }

    pub(super) fn move_to_back(&mut self, at: u32, list: u16) {
        self.unlink(at);
        self.push_back(at, list);
    }

    pub(super) fn move_to_front(&mut self, at: u32, list: u16) {
        self.unlink(at);
        self.push_front(at, list);
    }

    /// The held entry to ask next: each in turn, from the front to the back and over again.
    pub(super) fn next_held(&mut self) -> Option<u32> {
        let ends = &mut self.lists[usize::from(HELD)];
        let at = if ends.cursor == NIL {
            ends.front
        } else {
            ends.cursor
        };
        ends.cursor = *self.slots.get(at as usize).map(|slot| &slot.next)?;
        Some(at)
    }

    /// Makes a held entry the next to ask.
    pub(super) fn ask_next(&mut self, at: u32) {
        self.lists[usize::from(HELD)].cursor = at;
    }

    /// The entry before this one in its list.
    pub(super) fn before(&self, at: u32) -> u32 {
        self.slots[at as usize].prev
    }

    /// The first entry of a list that the current batch has not touched. What a batch touched is passed
    /// over once a batch, not once an eviction.
    pub(super) fn first_untouched(&mut self, list: u16) -> Option<u32> {
        let Self {
            slots,
            lists,
            batch,
            ..
        } = self;
        let ends = &mut lists[usize::from(list)];
        if ends.cursor_batch != *batch {
            (ends.cursor, ends.cursor_batch) = (ends.front, *batch);
        }
        while ends.cursor != NIL && slots[ends.cursor as usize].stamp == *batch {
            ends.cursor = slots[ends.cursor as usize].next;
        }
        (ends.cursor != NIL).then_some(ends.cursor)
    }

    /// Bytes that the entries and lists occupy, spare room included.
    pub(super) fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<V>>() + self.lists.capacity() * size_of::<Ends>()
    }
}

/// Whether time `a` is at or after `b`; right while they are less than 2^31 ticks apart.
pub(super) fn is_at_least(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) < 1 << 31
}

/// Makes room for one more by a quarter: half of a vector that doubles would lie idle.
pub(super) fn grow<T>(items: &mut Vec<T>) {
    if items.len() == items.capacity() {
        items.reserve_exact((items.len() / 4).max(16));
    }
}
