//! L1: the store in host memory.
//!
//! Index, free extents and leases lie behind one mutex, taken once per batched verb. Nothing is freed,
//! logged or called back under it: handles to drop are moved out and dropped after. The only lock taken
//! inside it is the short list of returned extents.
//!
//! A lease is a held [`MemoryObj`]. Those of a lookup wait here under the lookup's id until they are taken,
//! released or past their deadline; together they hold at most half of the pool, so that requests which
//! only wait can never starve those that store.

use std::mem;
#[cfg(not(lmcache_loom))]
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use lmcache_core::extent::Extents;
use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::{Access, HotCache, IndexKey, Policy, Reserve};
use lmcache_core::key::{Namespaces, begins_with};

use crate::error::MemoryError;
use crate::events::{Drained, EventSink, Text};
use crate::lease::Leases;
use crate::object::{Bank, ChunkMut, MemoryObj};
use crate::region::{PAGE_BYTES, Region};
use crate::sync::{self, Arc, Mutex};

mod books;
#[cfg(test)]
mod tests;

pub(crate) use books::Ticket;
use books::{Books, Shared, Told};

/// The L1 store. Clones share it.
#[derive(Debug, Clone)]
pub struct LocalCpu(Arc<Shared>);

/// What [`LocalCpu::reserve`] gave.
#[derive(Debug, Default)]
pub struct Reserved {
    /// The chunks to write, each with its position among the hashes asked for.
    pub chunks: Vec<(usize, ChunkMut)>,
    /// Chunks that were there already, or are being written by somebody else.
    pub num_known: usize,
    /// Where memory ended: this chunk and all after it got no place.
    pub stopped_at: Option<usize>,
}

/// What [`LocalCpu::lookup`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// Chunks of the longest prefix that is stored, and leased from now on.
    pub num_chunks: usize,
    /// How long the lease holds from now; zero when nothing is leased.
    pub lease: Duration,
}

/// The books, walked entry by entry; see [`LocalCpu::audit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Audit {
    /// Bytes of the pool.
    pub capacity_bytes: u64,
    /// Sum over the free extents.
    pub free_bytes: u64,
    /// Sum over the published entries.
    pub cached_bytes: u64,
    /// Sum over the entries being written.
    pub reserved_bytes: u64,
    /// Sum over the published entries that somebody besides the index holds.
    pub leased_bytes: u64,
    /// Lookups whose leases wait here.
    pub num_leases: usize,
    /// Published entries.
    pub num_chunks: usize,
    /// Entries evicted since the start.
    pub evicted_chunks: u64,
}

/// What [`LocalCpu::usage`] knows at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the pool.
    pub capacity_bytes: u64,
    /// Bytes of it that are not free: stored, being written, or read by somebody still.
    pub held_bytes: u64,
    /// Bytes that lookups lease, each once.
    pub leased_bytes: u64,
    /// Published entries.
    pub num_chunks: usize,
    /// Entries evicted since the start.
    pub evicted_chunks: u64,
}

impl LocalCpu {
    /// Maps a pool of `capacity` bytes (rounded down to pages) that evicts by LRU; lookups lease for `lease`.
    pub fn new(capacity: u64, lease: Duration) -> Result<Self, MemoryError> {
        Self::with_policy(capacity, lease, Policy::default())
    }

    /// As [`LocalCpu::new`], evicting by `policy`.
    pub fn with_policy(
        capacity: u64,
        lease: Duration,
        policy: Policy,
    ) -> Result<Self, MemoryError> {
        Ok(Self::over(Region::new(capacity)?, lease, policy, 1))
    }

    /// As [`LocalCpu::with_policy`], for `num_readers` other processes to read as well: each takes its share
    /// of what a lookup leases, which is held until all have.
    #[cfg(not(lmcache_loom))]
    pub fn shared(
        capacity: u64,
        lease: Duration,
        policy: Policy,
        num_readers: u32,
    ) -> Result<Self, MemoryError> {
        let region = match num_readers {
            0 => Region::new(capacity)?,
            _ => Region::new_shared(capacity)?,
        };
        Ok(Self::over(
            region,
            lease,
            policy,
            num_readers.saturating_add(1),
        ))
    }

    fn over(region: Region, lease: Duration, policy: Policy, num_takers: u32) -> Self {
        let extents = Extents::new(region.len() as u64, PAGE_BYTES as u64);
        let len = region.len() as u64;
        let bank = Arc::new(Bank::new(region));
        let state = Books {
            bank: Some(Arc::clone(&bank)),
            broken: false,
            extents,
            index: HotCache::new(policy),
            namespaces: Namespaces::default(),
            leases: Leases::default(),
            pending_bytes: 0,
            evicted_chunks: 0,
            told: None,
        };
        let shared = Shared {
            capacity: len,
            bank: sync::downgrade(&bank),
            lease,
            num_takers,
            state: Mutex::new(state),
        };
        Self(Arc::new(shared))
    }

    /// Bytes of the pool.
    pub fn capacity_bytes(&self) -> u64 {
        self.0.capacity
    }

    /// The pool's memory as a whole; `None` once the store is closed.
    #[cfg(not(lmcache_loom))]
    pub fn mapped(&self) -> Option<crate::mapped::Mapped> {
        let bank = self.0.lock().bank.clone();
        bank.map(|bank| crate::mapped::Mapped::new(&bank))
    }

    /// What a process that reads the pool maps; `None` unless it was made for that, and once it is closed.
    #[cfg(not(lmcache_loom))]
    pub fn descriptor(&self) -> Option<OwnedFd> {
        let bank = self.0.lock().bank.clone()?;
        bank.region.descriptor()?.try_clone_to_owned().ok()
    }

    /// Makes room for those of the chunks that are neither stored nor being written.
    ///
    /// `hashes` is the prompt's chain from its first chunk on: all of it counts as used, and none of it is
    /// evicted to make room for the rest. Room is made for the chunks from `first` on; chunk `i` needs
    /// `len_of(i)` bytes. Chunks are served in order up to where memory ends, which is a success.
    pub fn reserve(
        &self,
        namespace: &str,
        hashes: &[ChunkHash],
        first: usize,
        len_of: impl Fn(usize) -> usize,
    ) -> Reserved {
        let mut garbage = Vec::new();
        let mut reserved = Reserved::default();
        let mut state = self.0.lock();
        state.settle(Instant::now(), &mut garbage);
        let bank = state.open_bank();
        let id = bank.as_ref().and_then(|_| state.intern(namespace));
        let (Some(bank), Some(id)) = (bank, id) else {
            drop(state);
            reserved.stopped_at = Some(0);
            return reserved;
        };
        state.index.begin_batch();
        state.index.touch(id, hashes);
        for (position, &hash) in hashes.iter().enumerate().skip(first) {
            let key = IndexKey {
                namespace: id,
                hash,
            };
            let Reserve::New(reservation) = state.index.reserve(key) else {
                reserved.num_known += 1;
                continue;
            };
            let len = len_of(position);
            let Some(extent) = state.alloc(len as u64) else {
                state.index.abandon(reservation);
                reserved.stopped_at = Some(position);
                break;
            };
            state.pending_bytes += extent.len;
            let store = sync::downgrade(&self.0);
            let ticket = Ticket {
                store,
                key,
                reservation: Some(reservation),
                bytes: extent.len,
            };
            let chunk = ChunkMut::new(Arc::clone(&bank), extent, len, Some(ticket));
            reserved.chunks.push((position, chunk));
        }
        drop(state);
        drop((garbage, bank));
        reserved
    }

    /// Publishes written chunks: from here on they are found. `hashes` is the chain they belong to, whose
    /// recency is refreshed from its tail to its head.
    ///
    /// False if some were not published: the store was closed, or the chunks were cleared while they were
    /// written. A clear is to be the end of all that was read before it.
    pub fn commit(&self, namespace: &str, hashes: &[ChunkHash], chunks: Vec<ChunkMut>) -> bool {
        let sealed: Vec<_> = chunks.into_iter().map(ChunkMut::seal_reserved).collect();
        let mut withdrawn = Vec::new();
        let mut state = self.0.lock();
        for (mut ticket, object) in sealed {
            let own = |ticket: &Ticket| std::ptr::eq(ticket.store.as_ptr(), Arc::as_ptr(&self.0));
            let own = |ticket: &&mut Ticket| own(ticket) && object.is_of(&self.0.bank);
            let is_wanted = |ticket: &&mut Ticket| {
                let reservation = ticket.reservation.as_ref();
                state.is_open()
                    && !reservation.is_some_and(|reservation| state.index.is_removed(reservation))
            };
            let publishable = ticket.as_mut().filter(own).filter(is_wanted);
            let publishable =
                publishable.and_then(|ticket| Some((ticket.key, ticket.reservation.take()?)));
            match publishable {
                Some((key, reservation)) => {
                    state.pending_bytes -= object.extent().len;
                    state.publish(&key, reservation, object);
                }
                None => withdrawn.push((ticket, object)),
            }
        }
        if let Some(id) = state.namespaces.get(namespace) {
            state.index.touch(id, hashes);
        }
        drop(state);
        withdrawn.is_empty()
    }

    /// Memory for chunks that have no key yet: `lens` bytes each, all of them or none.
    pub fn allocate(&self, lens: &[usize]) -> Option<Vec<ChunkMut>> {
        let mut garbage = Vec::new();
        let mut chunks = Vec::with_capacity(lens.len());
        let mut state = self.0.lock();
        state.settle(Instant::now(), &mut garbage);
        let bank = state.open_bank();
        state.index.begin_batch();
        let extents = bank.as_ref().and_then(|_| state.alloc_all(lens));
        if let Some((bank, extents)) = bank.as_ref().zip(extents) {
            let chunk = |(extent, &len)| ChunkMut::new(Arc::clone(bank), extent, len, None);
            chunks.extend(extents.into_iter().zip(lens).map(chunk));
        }
        drop(state);
        drop((garbage, bank));
        (chunks.len() == lens.len()).then_some(chunks)
    }

    /// Publishes a chunk that [`LocalCpu::allocate`] gave. A key that is known already keeps its bytes and
    /// only counts as used. Whether the chunk went in.
    ///
    /// Memory of another pool is [`MemoryError::ForeignMemory`] and goes back there: its extent names other
    /// bytes here.
    pub fn put(
        &self,
        namespace: &str,
        hash: ChunkHash,
        chunk: ChunkMut,
    ) -> Result<bool, MemoryError> {
        self.put_and_hold(namespace, hash, chunk)
            .map(|(stored, _)| stored)
    }

    /// As [`LocalCpu::put`], with what the key holds from now on, which a later verb might no longer find.
    /// Where another writer has the key and is not done, that is the chunk itself, unpublished; once the
    /// store is closed it is nothing.
    pub fn put_and_hold(
        &self,
        namespace: &str,
        hash: ChunkHash,
        mut chunk: ChunkMut,
    ) -> Result<(bool, Option<MemoryObj>), MemoryError> {
        if !self.owns(&chunk) {
            return Err(MemoryError::ForeignMemory);
        }
        chunk.withdraw();
        let mut state = self.0.lock();
        let open = state.is_open();
        let id = open.then(|| state.intern(namespace)).flatten();
        let key = id.map(|id| IndexKey {
            namespace: id,
            hash,
        });
        let Some(key) = key else {
            drop(state);
            drop(chunk);
            return Ok((false, None));
        };
        if let Reserve::New(reservation) = state.index.reserve(key) {
            let object = chunk.seal(Some(key));
            state.publish(&key, reservation, object.clone());
            return Ok((true, Some(object)));
        }
        let known = state.index.peek(&key).cloned();
        drop(state);
        Ok((
            false,
            Some(known.unwrap_or_else(|| chunk.seal_unpublished())),
        ))
    }

    /// Whether this pool gave the chunk.
    pub fn owns(&self, chunk: &ChunkMut) -> bool {
        chunk.is_of(&self.0.bank)
    }

    /// As [`LocalCpu::owns`], of sealed memory.
    pub fn owns_sealed(&self, object: &MemoryObj) -> bool {
        object.is_of(&self.0.bank)
    }

    /// Finds the longest stored prefix and leases it under `lookup_id`, in place of what that id held before.
    ///
    /// The answer is shorter than what is stored where a longer one would let waiting requests hold more
    /// than half of the pool.
    pub fn lookup(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Hit {
        let now = Instant::now();
        let mut garbage = Vec::new();
        let mut state = self.0.lock();
        state.settle(now, &mut garbage);
        // Who asks again while it waits uses nothing anew.
        let access = match state.leases.end(lookup_id, &mut garbage) {
            true => Access::Refresh,
            false => Access::Use,
        };
        let mut hit = Hit {
            num_chunks: 0,
            lease: Duration::ZERO,
        };
        if let Some(id) = state.namespaces.get(namespace).filter(|_| state.is_open()) {
            // No chain is longer than what is stored, unless it repeats itself.
            let longest = state.leases.room().min(state.index.num_resident());
            let hashes = &hashes[..hashes.len().min(longest)];
            let held = state.leases.distinct_bytes();
            let limit = self.0.capacity / 2;
            let mut objects = Vec::new();
            hit.num_chunks = state.index.longest_prefix(id, hashes, access, |values| {
                let added: Vec<u64> = values.clone().map(Leases::added_bytes).collect();
                let num_chunks = prefix_within(limit, held, &added);
                objects.extend(values.take(num_chunks).cloned());
                num_chunks
            });
            if !objects.is_empty() {
                hit.lease = self.0.lease;
                let expires = now + self.0.lease;
                state
                    .leases
                    .begin(lookup_id, objects, expires, self.0.num_takers);
            }
        }
        drop(state);
        drop(garbage);
        hit
    }

    /// Takes what `lookup_id` leases, as far as it is the chain `hashes`; what the lease does not cover is
    /// taken from the index. Ends at the first chunk that is in neither.
    pub fn take(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        self.take_from(0, lookup_id, namespace, hashes)
    }

    /// As [`LocalCpu::take`], but from the chunk at `first` on: those before it need not be there.
    pub fn take_from(
        &self,
        first: usize,
        lookup_id: &str,
        namespace: &str,
        hashes: &[ChunkHash],
    ) -> Vec<MemoryObj> {
        self.take_part(hashes.get(first..).unwrap_or(&[]), lookup_id, namespace)
    }

    /// As [`LocalCpu::take`], of a part of the chain: `hashes` may begin anywhere in it.
    pub fn take_part(
        &self,
        hashes: &[ChunkHash],
        lookup_id: &str,
        namespace: &str,
    ) -> Vec<MemoryObj> {
        let mut garbage = Vec::new();
        let mut taken = Vec::with_capacity(hashes.len());
        let mut state = self.0.lock();
        state.leases.take(lookup_id, &mut garbage);
        if let Some(id) = state.namespaces.get(namespace).filter(|_| state.is_open()) {
            let key_of = |hash| IndexKey {
                namespace: id,
                hash,
            };
            // A lease holds a chain from its first chunk on.
            let begins = hashes.first().map(|&hash| key_of(hash));
            let leased = garbage
                .iter()
                .position(|object| object.key() == begins.as_ref());
            let leased = &garbage[leased.unwrap_or(garbage.len())..];
            for (position, &hash) in hashes.iter().enumerate() {
                let key = key_of(hash);
                let leased = leased
                    .get(position)
                    .filter(|object| object.key() == Some(&key));
                match leased.or_else(|| state.index.peek(&key)) {
                    Some(object) => taken.push(object.clone()),
                    None => break,
                }
            }
        }
        drop(state);
        drop(garbage);
        taken
    }

    /// The objects of the longest stored prefix; its recency stays as it is.
    pub fn get(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        let state = self.0.lock();
        let id = state.namespaces.get(namespace);
        let Some(id) = id.filter(|_| state.is_open()) else {
            return Vec::new();
        };
        let object = |&hash| {
            state
                .index
                .peek(&IndexKey {
                    namespace: id,
                    hash,
                })
                .cloned()
        };
        hashes.iter().map_while(object).collect()
    }

    /// Gives back what `lookup_id` leases. Whether it leased anything.
    pub fn release(&self, lookup_id: &str) -> bool {
        let mut garbage = Vec::new();
        self.0.lock().leases.end(lookup_id, &mut garbage)
    }

    /// Length of the longest stored prefix; nothing is leased, but it counts as used.
    pub fn longest_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        let mut state = self.0.lock();
        match state.namespaces.get(namespace) {
            Some(id) if state.is_open() => {
                let longest = hashes.len().min(state.index.num_resident());
                state
                    .index
                    .longest_prefix(id, &hashes[..longest], Access::Use, |values| values.len())
            }
            _ => 0,
        }
    }

    /// Removes one chunk from the index, e.g. because it could not be loaded. Whether it was there.
    pub fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        let mut state = self.0.lock();
        let id = state.namespaces.get(namespace);
        let id = id.filter(|_| state.is_open());
        let removed = id.and_then(|id| {
            state.index.remove(&IndexKey {
                namespace: id,
                hash,
            })
        });
        state.note_removed(&removed);
        drop(state);
        removed.is_some()
    }

    /// Removes every published chunk; leased ones live on until their last handle goes. How many there were.
    /// What is being written is not published any more.
    pub fn clear(&self) -> usize {
        let mut removed = Vec::new();
        let mut state = self.0.lock();
        if state.is_open() {
            state
                .index
                .retain(|_, _| false, |_, object| removed.push(object));
            state.index.remove_pending();
        }
        state.note_removed(&removed);
        drop(state);
        removed.len()
    }

    /// Removes every published chunk whose namespace begins with `prefix` (see [`begins_with`]). Leased ones
    /// live on until their last handle goes, but are found no more; what is being written is not published any
    /// more. How many there were.
    ///
    /// Takes as long as there are namespaces and chunks to remove, whatever else is stored.
    pub fn clear_prefix(&self, prefix: &str) -> usize {
        self.remove_namespaces(|namespace| begins_with(namespace, prefix))
    }

    /// Removes every published chunk that [`LocalCpu::clear_prefix`] would leave. How many there were.
    pub fn retain_prefix(&self, prefix: &str) -> usize {
        self.remove_namespaces(|namespace| !begins_with(namespace, prefix))
    }

    fn remove_namespaces(&self, goes: impl Fn(&str) -> bool) -> usize {
        let mut removed = Vec::new();
        let mut state = self.0.lock();
        if state.is_open() {
            let Books {
                namespaces, index, ..
            } = &mut *state;
            for id in namespaces.choose(goes) {
                index.remove_namespace(id, |_, object| removed.push(object));
            }
        }
        state.note_removed(&removed);
        drop(state);
        removed.len()
    }

    /// Empties the store for good: later calls store nothing and find nothing. Idempotent.
    ///
    /// The memory is given back to the system here, unless a chunk is still read or written: then with it.
    pub fn close(&self) {
        let mut garbage = Vec::new();
        let mut state = self.0.lock();
        let bank = state.bank.take();
        let broken = state.broken.then(|| {
            // Not walked: its links may lead anywhere.
            let index = mem::take(&mut state.index);
            (index, mem::take(&mut state.leases))
        });
        state
            .index
            .retain(|_, _| false, |_, object| garbage.push(object));
        state.note_removed(&garbage);
        state.leases.end_all(&mut garbage);
        drop(state);
        drop((garbage, broken, bank));
    }

    /// From here on what comes and goes is told, to at most one listener at a time: up to `capacity` changes
    /// wait for [`LocalCpu::drain_events`]. Other tiers are told of through the sink. A second call gives the
    /// same sink.
    pub fn listen(&self, capacity: usize) -> EventSink {
        let mut state = self.0.lock();
        let told = state
            .told
            .get_or_insert_with(|| Told::new(EventSink::new(capacity)));
        told.sink.clone()
    }

    /// What came and went since the last call, in all tiers; nothing unless somebody listens.
    ///
    /// The first call, and one after more than the sink holds, tells all that is stored instead: O(entries),
    /// under the lock.
    pub fn drain_events(&self) -> Drained {
        let sink = self.0.lock().told.as_ref().map(|told| told.sink.clone());
        let Some(sink) = sink else {
            return Drained::default();
        };
        if let Some(events) = sink.take() {
            return Drained {
                is_anew: false,
                events,
            };
        }
        let mut l1 = Vec::new();
        let state = self.0.lock();
        if let Some(told) = state.told.as_ref().filter(|_| state.is_open()) {
            let event =
                |(key, object): (_, &MemoryObj)| told.event(true, key, object, &state.namespaces);
            l1.extend(state.index.residents().map(event));
        }
        let events = sink.begin_anew(l1);
        drop(state);
        Drained {
            is_anew: true,
            events,
        }
    }

    /// The books' sums as they stand, at a cost that does not grow with what is stored.
    pub fn usage(&self) -> Usage {
        let mut garbage = Vec::new();
        let mut state = self.0.lock();
        state.settle(Instant::now(), &mut garbage);
        let usage = Usage {
            capacity_bytes: self.0.capacity,
            held_bytes: if state.is_open() {
                self.0.capacity - state.extents.free_bytes()
            } else {
                0
            },
            leased_bytes: state.leases.distinct_bytes(),
            num_chunks: state.index.num_resident(),
            evicted_chunks: state.evicted_chunks,
        };
        drop(state);
        drop(garbage);
        usage
    }

    /// Every published chunk: namespace and hash. O(entries), as [`LocalCpu::audit`].
    pub fn chunks(&self) -> Vec<(Text, ChunkHash)> {
        let state = self.0.lock();
        let residents = state.index.residents().filter(|_| state.is_open());
        let name = |(key, _): (&IndexKey, _)| {
            let namespace = state.namespaces.text(key.namespace)?;
            Some((Text::clone(namespace), key.hash))
        };
        residents.filter_map(name).collect()
    }

    /// Walks the books. O(entries): for tests and operators, not for a hot path.
    pub fn audit(&self) -> Audit {
        let mut garbage = Vec::new();
        let mut state = self.0.lock();
        state.settle(Instant::now(), &mut garbage);
        drop(state);
        drop(garbage);
        let bank = self.0.bank.upgrade();
        let mut state = self.0.lock();
        if !state.broken {
            match &bank {
                Some(bank) => state.take_back(bank),
                // Closed, and the last chunk is gone: all that was out has come back, and left with the rest.
                None => state.extents = Extents::new(self.0.capacity, PAGE_BYTES as u64),
            }
        }
        let mut audit = Audit {
            capacity_bytes: self.0.capacity,
            free_bytes: state.extents.free_bytes(),
            cached_bytes: 0,
            reserved_bytes: state.pending_bytes,
            leased_bytes: 0,
            num_leases: state.leases.len(),
            num_chunks: state.index.num_resident(),
            evicted_chunks: state.evicted_chunks,
        };
        for (_, object) in state.index.residents() {
            audit.cached_bytes += object.extent_bytes();
            if object.ref_count() > 1 {
                audit.leased_bytes += object.extent_bytes();
            }
        }
        drop(state);
        drop(bank);
        audit
    }
}

/// How many chunks a lookup may lease where leases hold `held` bytes, of `limit`, and each adds its own.
fn prefix_within(limit: u64, mut held: u64, added: &[u64]) -> usize {
    let fits = |&more: &u64| {
        // A pool of one chunk must still be able to answer.
        let fits = more == 0 || held == 0 || held + more <= limit;
        held += more;
        fits
    };
    added.iter().copied().take_while(fits).count()
}
