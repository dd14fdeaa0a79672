//! Leases that wait: what a lookup found, held for a request that has no blocks yet.
//!
//! A lease is nothing but held [`MemoryObj`]s under the lookup's id, with a deadline. It ends when it is
//! taken, released, replaced or past its time; the handles are handed to the caller, who drops them where
//! no lock is held. Where several processes read a pool, each takes its share of the lease, and it ends
//! with the last.

use std::collections::HashMap;
use std::time::Instant;

use crate::object::MemoryObj;

/// Lookups that may hold something at a time; further ones find nothing until others end.
const MAX_LEASES: usize = 16_384;
/// Handles that one lookup may hold. Bounds how long it keeps the store locked.
const MAX_HANDLES_PER_LEASE: usize = 16_384;
/// Handles that all lookups together may hold, 8 bytes each.
const MAX_HANDLES: usize = 4 << 20;

/// The leases of all lookups that wait.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    by_lookup: HashMap<Box<str>, Lease>,
    /// No lease ends before this; `None` if there is none.
    next_expiry: Option<Instant>,
    distinct_bytes: u64,
    num_handles: usize,
}

#[derive(Debug)]
struct Lease {
    objects: Vec<MemoryObj>,
    expires: Instant,
    /// Those that have not taken their share.
    num_takers: u32,
}

impl Leases {
    /// Lookups that hold something.
    pub(crate) fn len(&self) -> usize {
        self.by_lookup.len()
    }

    /// Objects that one more lookup may hold: ids and chains come from other processes, which must not
    /// make this one grow without end.
    pub(crate) fn room(&self) -> usize {
        if self.by_lookup.len() >= MAX_LEASES {
            return 0;
        }
        MAX_HANDLES_PER_LEASE.min(MAX_HANDLES - self.num_handles)
    }

    /// Bytes held, each object counted once however many lookups hold it.
    pub(crate) fn distinct_bytes(&self) -> u64 {
        self.distinct_bytes
    }

    /// What holding the object as well would add to [`Leases::distinct_bytes`].
    pub(crate) fn added_bytes(object: &MemoryObj) -> u64 {
        if object.is_waited_for() {
            0
        } else {
            object.extent_bytes()
        }
    }

    /// Holds `objects` for `lookup_id`, which holds nothing, until `expires` or until `num_takers` have taken
    /// their share.
    pub(crate) fn begin(
        &mut self,
        lookup_id: &str,
        mut objects: Vec<MemoryObj>,
        expires: Instant,
        num_takers: u32,
    ) {
        objects.shrink_to_fit();
        self.num_handles += objects.len();
        for object in &objects {
            if object.begin_waiting() {
                self.distinct_bytes += object.extent_bytes();
            }
        }
        self.next_expiry = Some(self.next_expiry.map_or(expires, |next| next.min(expires)));
        let lease = Lease {
            objects,
            expires,
            num_takers,
        };
        let before = self.by_lookup.insert(lookup_id.into(), lease);
        debug_assert!(
            before.is_none(),
            "a lookup's lease is ended before it is begun anew"
        );
    }

    /// Takes one share of the lease of `lookup_id`: handles go to `taken`, the lease's own with the last one.
    pub(crate) fn take(&mut self, lookup_id: &str, taken: &mut Vec<MemoryObj>) {
        match self.by_lookup.get_mut(lookup_id) {
            Some(lease) if lease.num_takers > 1 => {
                lease.num_takers -= 1;
                taken.extend(lease.objects.iter().cloned());
            }
            _ => {
                self.end(lookup_id, taken);
            }
        }
    }

    /// Ends the lease of `lookup_id`; its handles go to `ended`. Whether there was one.
    pub(crate) fn end(&mut self, lookup_id: &str, ended: &mut Vec<MemoryObj>) -> bool {
        let Some(lease) = self.by_lookup.remove(lookup_id) else {
            return false;
        };
        self.num_handles -= lease.objects.len();
        for object in &lease.objects {
            if object.end_waiting() {
                self.distinct_bytes -= object.extent_bytes();
            }
        }
        ended.extend(lease.objects);
        true
    }

    /// Ends every lease whose time is up.
    pub(crate) fn expire(&mut self, now: Instant, ended: &mut Vec<MemoryObj>) {
        if self.next_expiry.is_none_or(|next| now < next) {
            return;
        }
        self.end_where(|lease| lease.expires <= now, ended);
        self.next_expiry = self.by_lookup.values().map(|lease| lease.expires).min();
    }

    /// Ends every lease.
    pub(crate) fn end_all(&mut self, ended: &mut Vec<MemoryObj>) {
        self.end_where(|_| true, ended);
        self.next_expiry = None;
    }

    fn end_where(&mut self, ends: impl Fn(&Lease) -> bool, ended: &mut Vec<MemoryObj>) {
        let ending = self.by_lookup.iter().filter(|(_, lease)| ends(lease));
        let ending: Vec<Box<str>> = ending.map(|(id, _)| id.clone()).collect();
        for id in ending {
            self.end(&id, ended);
        }
    }
}
