//! The books of L1 and their lock: what is free, what is stored, who waits.

use std::collections::HashSet;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::thread;
use std::time::{Duration, Instant};

use lmcache_core::extent::{Extent, Extents};
use lmcache_core::hot_cache::{HotCache, IndexKey, Reservation, Victim};
use lmcache_core::key::{NamespaceId, Namespaces};

use crate::events::{Event, EventSink, LOCAL_CPU, News, Text};
use crate::lease::Leases;
use crate::object::{Bank, MemoryObj};
use crate::sync::{Arc, Mutex, MutexGuard, Weak};

#[derive(Debug)]
pub(crate) struct Shared {
    /// Names the bank, also once it is closed; the memory itself is held by [`Books::bank`].
    pub(super) bank: Weak<Bank>,
    pub(super) capacity: u64,
    pub(super) lease: Duration,
    /// Processes that take what one lookup leases, this one included.
    pub(super) num_takers: u32,
    pub(super) state: Mutex<Books>,
}

#[derive(Debug)]
pub(super) struct Books {
    /// There while the store is open. Taken by a close, so that the memory goes as soon as nobody reads it,
    /// however long handles of the store itself are kept.
    pub(super) bank: Option<Arc<Bank>>,
    /// A panic has left the books half-done; see [`Locked`].
    pub(super) broken: bool,
    pub(super) extents: Extents,
    pub(super) index: HotCache<MemoryObj>,
    pub(super) namespaces: Namespaces,
    pub(super) leases: Leases,
    pub(super) pending_bytes: u64,
    pub(super) evicted_chunks: u64,
    pub(super) told: Option<Told>,
}

/// What a listener will be told of, once the lock is gone.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) sink: EventSink,
    tier: Text,
    changes: Vec<Event>,
    /// More changes than the sink holds, which need not be told one by one.
    is_too_much: bool,
}

impl Told {
    pub(super) fn new(sink: EventSink) -> Self {
        Self {
            sink,
            tier: LOCAL_CPU.into(),
            changes: Vec::new(),
            is_too_much: false,
        }
    }

    pub(super) fn event(
        &self,
        is_stored: bool,
        key: &IndexKey,
        object: &MemoryObj,
        namespaces: &Namespaces,
    ) -> Event {
        let namespace = namespaces.text(key.namespace);
        Event {
            is_stored,
            tier: Text::clone(&self.tier),
            namespace: namespace.map_or_else(|| Text::from(""), Text::clone),
            hash: key.hash,
            bytes: object.len() as u64,
            tokens: object.num_tokens(),
        }
    }

    pub(super) fn note(
        &mut self,
        is_stored: bool,
        key: &IndexKey,
        object: &MemoryObj,
        namespaces: &Namespaces,
    ) {
        if self.is_too_much {
            return;
        }
        if self.changes.len() >= self.sink.capacity() {
            self.lose();
            return;
        }
        let event = self.event(is_stored, key, object, namespaces);
        self.changes.push(event);
    }

    /// The listener has to start anew.
    pub(super) fn lose(&mut self) {
        self.is_too_much = true;
        self.changes = Vec::new();
    }

    /// A place in line for what was noted.
    fn news(&mut self) -> Option<News> {
        if self.changes.is_empty() && !self.is_too_much {
            return None;
        }
        let changes = mem::take(&mut self.changes);
        let is_whole = !mem::take(&mut self.is_too_much);
        Some(self.sink.news(is_whole.then_some(changes)))
    }
}

/// Withdraws a reservation whose chunk is dropped before it is committed.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(super) store: Weak<Shared>,
    pub(crate) key: IndexKey,
    pub(super) reservation: Option<Reservation>,
    pub(super) bytes: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take()
            && let Some(store) = self.store.upgrade()
        {
            let mut state = store.lock();
            if !state.broken {
                state.pending_bytes -= self.bytes;
                state.index.abandon(reservation);
            }
        }
    }
}

impl Shared {
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked {
            state: self.state.lock(),
            news: None,
            in_panic: thread::panicking(),
        }
    }
}

/// The books under their lock. A panic under it closes the store for good.
///
/// What may be half-done then is the index, the free list and the counts. Nothing is read through them any
/// more: no chunk is found, no extent given out, none evicted, so every later call is a miss. Chunks already
/// handed out own their extents and their memory without the books, and stay as they are.
pub(super) struct Locked<'a> {
    state: MutexGuard<'a, Books>,
    /// Dropped, and so told, after the lock.
    news: Option<News>,
    /// It was a panic elsewhere that led here, e.g. to the drop of a chunk.
    in_panic: bool,
}

impl Deref for Locked<'_> {
    type Target = Books;

    fn deref(&self) -> &Books {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Books {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.in_panic {
            self.state.broken = true;
            // Nothing is found from here on.
            if let Some(told) = &mut self.state.told {
                told.lose();
            }
        }
        self.news = self.state.told.as_mut().and_then(Told::news);
    }
}

impl Books {
    pub(super) fn is_open(&self) -> bool {
        self.bank.is_some() && !self.broken
    }

    pub(super) fn open_bank(&self) -> Option<Arc<Bank>> {
        self.bank.clone().filter(|_| !self.broken)
    }

    /// Brings in what happened outside: extents that came back, leases whose time is up.
    pub(super) fn settle(&mut self, now: Instant, garbage: &mut Vec<MemoryObj>) {
        if let Some(bank) = self.open_bank() {
            self.take_back(&bank);
            self.leases.expire(now, garbage);
        }
    }

    pub(super) fn take_back(&mut self, bank: &Bank) {
        for extent in bank.take_returned() {
            self.extents.free(extent);
        }
    }

    /// Publishes a chunk: from here on it is found.
    pub(super) fn publish(&mut self, key: &IndexKey, reservation: Reservation, object: MemoryObj) {
        if let Some(told) = &mut self.told {
            told.note(true, key, &object, &self.namespaces);
        }
        self.index.publish(reservation, object);
    }

    /// Notes that chunks are found no more.
    pub(super) fn note_removed<'a>(&mut self, removed: impl IntoIterator<Item = &'a MemoryObj>) {
        let Some(told) = &mut self.told else { return };
        for object in removed {
            if let Some(key) = object.key() {
                told.note(false, key, object, &self.namespaces);
            }
        }
    }

    pub(super) fn intern(&mut self, namespace: &str) -> Option<NamespaceId> {
        if self.namespaces.is_crowded() && self.namespaces.get(namespace).is_none() {
            let in_use: HashSet<NamespaceId> = self.index.namespaces().collect();
            self.namespaces.forget_all_but(&in_use);
        }
        self.namespaces.intern(namespace)
    }

    /// Finds room, evicting what may go; if even that does not help, everything stays.
    pub(super) fn alloc(&mut self, len: u64) -> Option<Extent> {
        let mut victims = Vec::new();
        let extent = self.make_room(len, &mut victims);
        self.settle_victims(victims, extent.is_some());
        extent
    }

    /// Finds room for all of them; if it does not suffice, everything stays.
    pub(super) fn alloc_all(&mut self, lens: &[usize]) -> Option<Vec<Extent>> {
        let mut asked = 0u64;
        for &len in lens {
            asked = asked.checked_add(self.extents.rounded(len as u64)?)?;
        }
        if asked > self.extents.capacity() {
            return None;
        }
        let mut victims = Vec::new();
        let mut extents = Vec::with_capacity(lens.len());
        for &len in lens {
            match self.make_room(len as u64, &mut victims) {
                Some(extent) => extents.push(extent),
                None => break,
            }
        }
        let complete = extents.len() == lens.len();
        if !complete {
            for extent in extents.drain(..) {
                self.extents.free(extent);
            }
        }
        self.settle_victims(victims, complete);
        complete.then_some(extents)
    }

    /// Takes an extent, moving what has to go for it to `victims`.
    fn make_room(&mut self, len: u64, victims: &mut Vec<Victim<MemoryObj>>) -> Option<Extent> {
        if self.extents.rounded(len)? > self.extents.capacity() {
            return None;
        }
        loop {
            if let Some(extent) = self.extents.alloc(len) {
                return Some(extent);
            }
            let victim = self.index.evict(MemoryObj::is_sole_owner)?;
            self.extents.free(victim.value.extent());
            victims.push(victim);
        }
    }

    /// Lets the victims go for good, or puts them back in the order in which they were.
    fn settle_victims(&mut self, victims: Vec<Victim<MemoryObj>>, gone: bool) {
        if gone {
            self.evicted_chunks += victims.len() as u64;
            for victim in victims {
                if let Some(told) = &mut self.told {
                    told.note(false, &victim.key, &victim.value, &self.namespaces);
                }
                victim.value.into_extent();
            }
            return;
        }
        for victim in victims.into_iter().rev() {
            self.extents.claim(victim.value.extent());
            self.index.restore(victim);
        }
    }
}
