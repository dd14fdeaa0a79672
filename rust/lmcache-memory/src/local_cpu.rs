//! L1: the store in host memory.
//!
//! Index, free extents and leases lie behind one mutex, taken once per batched verb. Nothing is freed,
//! logged or called back under it: handles to drop are moved out and dropped after. The only lock taken
//! inside it is the short list of returned extents.
//!
//! A lease is a held [`MemoryObj`]. Those of a lookup wait here under the lookup's id until they are taken,
//! released or past their deadline; together they hold at most half of the pool, so that requests which
//! only wait can never starve those that store.

use std::collections::HashSet;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lmcache_core::extent::{Extent, Extents};
use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::{HotCache, IndexKey, Reservation, Reserve};
use lmcache_core::key::{NamespaceId, Namespaces};
use parking_lot::{Mutex, MutexGuard};

use crate::error::MemoryError;
use crate::lease::Leases;
use crate::object::{Bank, ChunkMut, MemoryObj};
use crate::region::{PAGE_BYTES, Region};

/// The L1 store. Clones share it.
#[derive(Debug, Clone)]
pub struct LocalCpu(Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    /// Names the bank, also once it is closed; the memory itself is held by [`State::bank`].
    bank: Weak<Bank>,
    capacity: u64,
    lease: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// There while the store is open. Taken by a close, so that the memory goes as soon as nobody reads it,
    /// however long handles of the store itself are kept.
    bank: Option<Arc<Bank>>,
    /// A panic has left the books half-done; see [`Locked`].
    broken: bool,
    extents: Extents,
    index: HotCache<MemoryObj>,
    namespaces: Namespaces,
    leases: Leases,
    pending_bytes: u64,
    evicted_chunks: u64,
}

/// Withdraws a reservation whose chunk is dropped before it is committed.
#[derive(Debug)]
pub(crate) struct Ticket {
    store: Weak<Shared>,
    pub(crate) key: IndexKey,
    reservation: Option<Reservation>,
    bytes: u64,
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
    fn lock(&self) -> Locked<'_> {
        Locked {
            state: self.state.lock(),
            in_panic: thread::panicking(),
        }
    }
}

/// The books under their lock. A panic under it closes the store for good.
///
/// What may be half-done then is the index, the free list and the counts. Nothing is read through them any
/// more: no chunk is found, no extent given out, none evicted, so every later call is a miss. Chunks already
/// handed out own their extents and their memory without the books, and stay as they are.
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    /// It was a panic elsewhere that led here, e.g. to the drop of a chunk.
    in_panic: bool,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.in_panic {
            self.state.broken = true;
        }
    }
}

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

impl LocalCpu {
    /// Maps a pool of `capacity` bytes (rounded down to pages); lookups lease for `lease`.
    pub fn new(capacity: u64, lease: Duration) -> Result<Self, MemoryError> {
        let region = Region::new(capacity)?;
        let extents = Extents::new(region.len() as u64, PAGE_BYTES as u64);
        let len = region.len() as u64;
        let bank = Arc::new(Bank::new(region));
        let state = State {
            bank: Some(Arc::clone(&bank)),
            broken: false,
            extents,
            index: HotCache::new(),
            namespaces: Namespaces::default(),
            leases: Leases::default(),
            pending_bytes: 0,
            evicted_chunks: 0,
        };
        let shared = Shared {
            capacity: len,
            bank: Arc::downgrade(&bank),
            lease,
            state: Mutex::new(state),
        };
        Ok(Self(Arc::new(shared)))
    }

    /// Bytes of the pool.
    pub fn capacity_bytes(&self) -> u64 {
        self.0.capacity
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
            let store = Arc::downgrade(&self.0);
            let ticket = Ticket {
                store,
                key,
                reservation: Some(reservation),
                bytes: extent.len,
            };
            let chunk = ChunkMut::new(Arc::clone(&bank), extent, len, Some(ticket));
            reserved.chunks.push((position, chunk));
        }
        if reserved.chunks.is_empty() {
            state.index.touch(id, hashes);
        }
        drop(state);
        drop((garbage, bank));
        reserved
    }

    /// Publishes written chunks: from here on they are found. `hashes` is the chain they belong to, whose
    /// recency is refreshed from its tail to its head.
    pub fn commit(&self, namespace: &str, hashes: &[ChunkHash], chunks: Vec<ChunkMut>) {
        let sealed: Vec<_> = chunks.into_iter().map(ChunkMut::seal_reserved).collect();
        let mut withdrawn = Vec::new();
        let mut state = self.0.lock();
        for (mut ticket, object) in sealed {
            let own = |ticket: &Ticket| std::ptr::eq(ticket.store.as_ptr(), Arc::as_ptr(&self.0));
            let own = |ticket: &&mut Ticket| own(ticket) && object.is_of(&self.0.bank);
            let publishable = ticket.as_mut().filter(own).filter(|_| state.is_open());
            match publishable.and_then(|ticket| ticket.reservation.take()) {
                Some(reservation) => {
                    state.pending_bytes -= object.extent().len;
                    state.index.publish(reservation, object);
                }
                None => withdrawn.push((ticket, object)),
            }
        }
        if let Some(id) = state.namespaces.get(namespace) {
            state.index.touch(id, hashes);
        }
        drop(state);
        drop(withdrawn);
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
        mut chunk: ChunkMut,
    ) -> Result<bool, MemoryError> {
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
        let reserved = key.map(|key| (key, state.index.reserve(key)));
        if let Some((key, Reserve::New(reservation))) = reserved {
            let object = chunk.seal(Some(key));
            state.index.publish(reservation, object);
            return Ok(true);
        }
        drop(state);
        drop(chunk);
        Ok(false)
    }

    /// Whether this pool gave the chunk.
    pub fn owns(&self, chunk: &ChunkMut) -> bool {
        chunk.is_of(&self.0.bank)
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
        state.leases.end(lookup_id, &mut garbage);
        let mut hit = Hit {
            num_chunks: 0,
            lease: Duration::ZERO,
        };
        if let Some(id) = state.namespaces.get(namespace).filter(|_| state.is_open()) {
            // No chain is longer than what is stored, unless it repeats itself.
            let longest = state.leases.room().min(state.index.num_resident());
            let hashes = &hashes[..hashes.len().min(longest)];
            let mut objects = Vec::with_capacity(hashes.len());
            let mut held = state.leases.distinct_bytes();
            let limit = self.0.capacity / 2;
            hit.num_chunks = state.index.longest_prefix(id, hashes, |object| {
                let more = Leases::added_bytes(object);
                // A pool of one chunk must still be able to answer.
                if more > 0 && held > 0 && held + more > limit {
                    return false;
                }
                held += more;
                objects.push(object.clone());
                true
            });
            if !objects.is_empty() {
                hit.lease = self.0.lease;
                state.leases.begin(lookup_id, objects, now + self.0.lease);
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
        let mut garbage = Vec::new();
        let mut taken = Vec::with_capacity(hashes.len());
        let mut state = self.0.lock();
        state.leases.end(lookup_id, &mut garbage);
        if let Some(id) = state.namespaces.get(namespace).filter(|_| state.is_open()) {
            // A lease holds a chain from its first chunk on, so positions there are those in `hashes`.
            for (position, &hash) in hashes.iter().enumerate().skip(first) {
                let key = IndexKey {
                    namespace: id,
                    hash,
                };
                let leased = garbage
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
                state.index.longest_prefix(id, &hashes[..longest], |_| true)
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
        drop(state);
        removed.is_some()
    }

    /// Removes every published chunk; leased ones live on until their last handle goes. How many there were.
    pub fn clear(&self) -> usize {
        let mut removed = Vec::new();
        let mut state = self.0.lock();
        if state.is_open() {
            state
                .index
                .retain(|_, _| false, |_, object| removed.push(object));
        }
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
        state.leases.end_all(&mut garbage);
        drop(state);
        drop((garbage, broken, bank));
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

impl State {
    fn is_open(&self) -> bool {
        self.bank.is_some() && !self.broken
    }

    fn open_bank(&self) -> Option<Arc<Bank>> {
        self.bank.clone().filter(|_| !self.broken)
    }

    /// Brings in what happened outside: extents that came back, leases whose time is up.
    fn settle(&mut self, now: Instant, garbage: &mut Vec<MemoryObj>) {
        if let Some(bank) = self.open_bank() {
            self.take_back(&bank);
            self.leases.expire(now, garbage);
        }
    }

    fn take_back(&mut self, bank: &Bank) {
        for extent in bank.take_returned() {
            self.extents.free(extent);
        }
    }

    fn intern(&mut self, namespace: &str) -> Option<NamespaceId> {
        if self.namespaces.is_crowded() && self.namespaces.get(namespace).is_none() {
            let in_use: HashSet<NamespaceId> = self.index.namespaces().collect();
            self.namespaces.forget_all_but(&in_use);
        }
        self.namespaces.intern(namespace)
    }

    /// Finds room, evicting what may go; if even that does not help, everything stays.
    fn alloc(&mut self, len: u64) -> Option<Extent> {
        let mut victims = Vec::new();
        let extent = self.make_room(len, &mut victims);
        self.settle_victims(victims, extent.is_some());
        extent
    }

    /// Finds room for all of them; if it does not suffice, everything stays.
    fn alloc_all(&mut self, lens: &[usize]) -> Option<Vec<Extent>> {
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
    fn make_room(&mut self, len: u64, victims: &mut Vec<(IndexKey, MemoryObj)>) -> Option<Extent> {
        if self.extents.rounded(len)? > self.extents.capacity() {
            return None;
        }
        loop {
            if let Some(extent) = self.extents.alloc(len) {
                return Some(extent);
            }
            let (key, object) = self.index.evict(MemoryObj::is_sole_owner)?;
            self.extents.free(object.extent());
            victims.push((key, object));
        }
    }

    /// Lets the victims go for good, or puts them back in the order in which they were.
    fn settle_victims(&mut self, victims: Vec<(IndexKey, MemoryObj)>, gone: bool) {
        if gone {
            self.evicted_chunks += victims.len() as u64;
            for (_, object) in victims {
                object.into_extent();
            }
            return;
        }
        for (key, object) in victims.into_iter().rev() {
            self.extents.claim(object.extent());
            self.index.restore(key, object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;
    const LEASE: Duration = Duration::from_secs(600);

    fn hashes(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
        ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
    }

    fn store_of(pages: u64) -> LocalCpu {
        LocalCpu::new(pages * PAGE, LEASE).expect("a few pages")
    }

    /// Stores the chain and says how many chunks are new; each chunk is one page filled with its id.
    fn store(cpu: &LocalCpu, chain: &[ChunkHash]) -> usize {
        let mut reserved = cpu.reserve("ns", chain, 0, |_| PAGE_BYTES);
        for (position, chunk) in &mut reserved.chunks {
            chunk.bytes_mut().fill(chain[*position].0[0]);
        }
        let chunks: Vec<_> = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        let stored = chunks.len();
        cpu.commit("ns", chain, chunks);
        stored
    }

    fn assert_books_balance(cpu: &LocalCpu) {
        let audit = cpu.audit();
        assert_eq!(
            audit.free_bytes + audit.cached_bytes,
            audit.capacity_bytes,
            "{audit:?}"
        );
        assert_eq!(
            (audit.leased_bytes, audit.reserved_bytes, audit.num_leases),
            (0, 0, 0)
        );
        assert_eq!(cpu.0.lock().leases.distinct_bytes(), 0);
    }

    #[test]
    fn what_was_stored_comes_back_and_twice_is_once() {
        let cpu = store_of(8);
        let chain = hashes(1..=4);
        assert_eq!(store(&cpu, &chain), 4);
        assert_eq!(store(&cpu, &chain), 0);
        assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 4);
        assert_eq!(cpu.lookup("r", "other", &chain).num_chunks, 0);
        cpu.lookup("r", "ns", &chain);
        let objects = cpu.take("r", "ns", &chain);
        assert_eq!(objects.len(), 4);
        for (object, hash) in objects.iter().zip(&chain) {
            assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
        }
        drop(objects);
        assert_books_balance(&cpu);
    }

    #[test]
    fn an_entry_is_invisible_until_it_is_committed() {
        let cpu = store_of(8);
        let chain = hashes([1, 2]);
        let reserved = cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES);
        assert_eq!(cpu.longest_prefix("ns", &chain), 0);
        assert_eq!(cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES).num_known, 2);
        assert_eq!(cpu.audit().reserved_bytes, 2 * PAGE);
        drop(reserved);
        assert_eq!(cpu.longest_prefix("ns", &chain), 0);
        assert_books_balance(&cpu);
        assert_eq!(store(&cpu, &chain), 2);
    }

    #[test]
    fn a_prompt_larger_than_the_pool_keeps_its_beginning() {
        let cpu = store_of(4);
        store(&cpu, &hashes(100..104));
        let chain = hashes(1..=9);
        let reserved = cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES);
        assert_eq!(reserved.stopped_at, Some(4));
        drop(reserved);
        assert_eq!(store(&cpu, &chain), 4);
        assert_eq!(cpu.longest_prefix("ns", &chain), 4);
        assert_eq!(
            store(&cpu, &chain),
            0,
            "asking again does not evict its own beginning"
        );
        assert_eq!(cpu.longest_prefix("ns", &chain), 4);
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_suffix_is_evicted_before_its_prefix() {
        let cpu = store_of(6);
        let chain = hashes(1..=4);
        for end in 1..=4 {
            store(&cpu, &chain[..end]);
        }
        store(&cpu, &hashes(50..54));
        assert_eq!(cpu.longest_prefix("ns", &chain), 2);
    }

    #[test]
    fn evict_skips_leased_chunks() {
        let cpu = store_of(4);
        let old = hashes([1, 2]);
        store(&cpu, &old);
        assert_eq!(cpu.lookup("r", "ns", &old).num_chunks, 2);
        assert_eq!(
            store(&cpu, &hashes(10..14)),
            2,
            "only what is not leased makes room"
        );
        assert_eq!(cpu.longest_prefix("ns", &old), 2);
        let held = cpu.take("r", "ns", &old);
        assert_eq!(store(&cpu, &hashes(20..24)), 2);
        assert!(held[0].bytes().iter().all(|&byte| byte == 1));
        drop(held);
        assert_eq!(store(&cpu, &hashes(30..34)), 4);
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_repeated_lookup_renews_and_never_stacks() {
        let cpu = store_of(8);
        let chain = hashes(1..=3);
        store(&cpu, &chain);
        for _ in 0..5 {
            assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 3);
        }
        assert_eq!(cpu.audit().num_leases, 1);
        assert!(cpu.release("r"));
        assert!(!cpu.release("r"));
        assert_books_balance(&cpu);
    }

    #[test]
    fn waiting_requests_hold_at_most_half_of_the_pool() {
        let cpu = store_of(8);
        let (a, b) = (hashes(1..=3), hashes(11..=13));
        store(&cpu, &a);
        store(&cpu, &b);
        assert_eq!(cpu.lookup("a", "ns", &a).num_chunks, 3);
        assert_eq!(
            cpu.lookup("a2", "ns", &a).num_chunks,
            3,
            "what is held already costs nothing"
        );
        assert_eq!(cpu.lookup("b", "ns", &b).num_chunks, 1);
        cpu.release("a");
        assert_eq!(
            cpu.lookup("b", "ns", &b).num_chunks,
            1,
            "a2 holds the same chunks still"
        );
        cpu.release("a2");
        assert_eq!(cpu.lookup("b", "ns", &b).num_chunks, 3);
        cpu.release("b");
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_pool_of_one_chunk_still_answers() {
        let cpu = store_of(1);
        let chain = hashes([1]);
        store(&cpu, &chain);
        assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 1);
    }

    #[test]
    fn leases_end_by_themselves() {
        let cpu = LocalCpu::new(4 * PAGE, Duration::from_millis(20)).expect("pages");
        let chain = hashes([1, 2]);
        store(&cpu, &chain);
        let hit = cpu.lookup("gone", "ns", &chain);
        assert_eq!((hit.num_chunks, hit.lease), (2, Duration::from_millis(20)));
        let deadline = Instant::now() + Duration::from_secs(10);
        while cpu.audit().num_leases > 0 {
            assert!(Instant::now() < deadline, "the lease outlives its deadline");
        }
        assert_eq!(store(&cpu, &hashes(10..14)), 4);
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_large_chunk_evicts_as_many_small_ones_as_it_needs_or_none() {
        let cpu = store_of(8);
        store(&cpu, &hashes(1..=8));
        let held = cpu.take("none", "ns", &hashes([4]));
        let large = hashes([99]);
        let reserved = cpu.reserve("ns", &large, 0, |_| 5 * PAGE_BYTES);
        assert_eq!(
            reserved.stopped_at,
            Some(0),
            "no five pages in a row without the held one"
        );
        assert_eq!(cpu.audit().num_chunks, 8, "nothing was evicted in vain");
        drop((held, reserved));
        let reserved = cpu.reserve("ns", &large, 0, |_| 5 * PAGE_BYTES);
        assert_eq!(reserved.chunks.len(), 1);
        let chunks: Vec<_> = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        cpu.commit("ns", &large, chunks);
        assert_books_balance(&cpu);
    }

    #[test]
    fn handles_outlive_a_clear_and_their_bytes_come_back() {
        let cpu = store_of(4);
        let chain = hashes([7]);
        store(&cpu, &chain);
        let held = cpu.take("none", "ns", &chain);
        assert_eq!(cpu.clear(), 1);
        assert_eq!(store(&cpu, &hashes(20..24)), 3);
        assert!(held[0].bytes().iter().all(|&byte| byte == 7));
        drop(held);
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_closed_store_takes_and_gives_nothing() {
        let cpu = store_of(4);
        let chain = hashes([1, 2]);
        store(&cpu, &chain);
        cpu.lookup("r", "ns", &chain);
        let reserved = cpu.reserve("ns", &hashes([5]), 0, |_| PAGE_BYTES);
        cpu.close();
        cpu.close();
        let chunks: Vec<_> = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        cpu.commit("ns", &hashes([5]), chunks);
        assert_eq!(store(&cpu, &chain), 0);
        assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 0);
        assert!(cpu.allocate(&[1]).is_none());
        assert_books_balance(&cpu);
    }

    #[test]
    fn allocate_is_all_or_none_and_put_of_a_known_key_keeps_the_first() {
        let cpu = store_of(4);
        assert!(cpu.allocate(&[PAGE_BYTES; 5]).is_none());
        let mut chunks = cpu.allocate(&[PAGE_BYTES; 2]).expect("room");
        let hash = hashes([9])[0];
        for (value, mut chunk) in chunks.drain(..).enumerate() {
            chunk.bytes_mut().fill(value as u8);
            let stored = cpu.put("ns", hash, chunk).expect("its own memory");
            assert_eq!(stored, value == 0);
        }
        assert!(
            cpu.take("none", "ns", &[hash])[0]
                .bytes()
                .iter()
                .all(|&byte| byte == 0)
        );
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_refused_allocation_evicts_nothing() {
        let cpu = store_of(4);
        let chain = hashes(1..=4);
        store(&cpu, &chain);
        assert!(cpu.allocate(&[PAGE_BYTES; 5]).is_none());
        assert!(cpu.allocate(&[PAGE_BYTES, usize::MAX]).is_none());
        let held = cpu.take("none", "ns", &hashes([3]));
        assert!(cpu.allocate(&[PAGE_BYTES; 4]).is_none());
        assert!(cpu.allocate(&[PAGE_BYTES, 3 * PAGE_BYTES]).is_none());
        assert_eq!(cpu.longest_prefix("ns", &chain), 4);
        assert_eq!(cpu.audit().evicted_chunks, 0);
        drop(held);
        for (object, hash) in cpu.get("ns", &chain).iter().zip(&chain) {
            assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
        }
        assert_books_balance(&cpu);
        assert_eq!(cpu.allocate(&[PAGE_BYTES; 4]).map(|all| all.len()), Some(4));
        assert_books_balance(&cpu);
    }

    #[test]
    fn chunks_that_are_not_asked_for_need_not_be_there() {
        let cpu = store_of(8);
        let chain = hashes(1..=4);
        store(&cpu, &chain);
        cpu.lookup("r", "ns", &chain);
        cpu.remove("ns", chain[3]);
        let leased = cpu.take_from(2, "r", "ns", &chain);
        let firsts: Vec<u8> = leased.iter().map(|object| object.bytes()[0]).collect();
        assert_eq!(firsts, [3, 4], "the lease holds the last one still");
        cpu.remove("ns", chain[0]);
        assert_eq!(cpu.take_from(1, "r", "ns", &chain).len(), 2);
        assert_eq!(cpu.take("r", "ns", &chain).len(), 0);
    }

    #[test]
    fn strangers_cannot_make_leases_grow_without_end() {
        let cpu = store_of(8);
        let chain = hashes([1, 2]);
        store(&cpu, &chain);
        cpu.lookup("first", "ns", &chain);
        let repeated = vec![chain[0]; 100_000];
        assert!(cpu.lookup("r", "ns", &repeated).num_chunks <= 2);
        for id in 0..20_000 {
            cpu.lookup(&id.to_string(), "ns", &chain);
        }
        assert_eq!(cpu.audit().num_leases, 16_384);
        assert_eq!(cpu.lookup("late", "ns", &chain).num_chunks, 0);
        assert_eq!(cpu.lookup("first", "ns", &chain).num_chunks, 2, "renewed");
        cpu.release("r");
        assert_eq!(cpu.lookup("late", "ns", &chain).num_chunks, 2);
        assert_eq!(cpu.longest_prefix("ns", &repeated), 2);
    }

    #[test]
    fn memory_of_another_pool_is_refused_at_every_door() {
        let (cpu, other) = (store_of(4), store_of(4));
        let chain = hashes([1]);
        let foreign = other.allocate(&[PAGE_BYTES]).expect("room").remove(0);
        let refused = cpu.put("ns", chain[0], foreign);
        assert!(matches!(refused, Err(MemoryError::ForeignMemory)));
        let reserved = other.reserve("ns", &chain, 0, |_| PAGE_BYTES);
        let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
        cpu.commit("ns", &chain, chunks.collect());
        for pool in [&cpu, &other] {
            assert_eq!(pool.longest_prefix("ns", &chain), 0);
            assert_books_balance(pool);
        }
        assert_eq!(
            store(&cpu, &hashes(1..=4)),
            4,
            "every byte of it is its own"
        );
    }

    #[test]
    fn a_reserved_chunk_may_be_put_under_a_key_of_its_own() {
        let cpu = store_of(4);
        let chain = hashes([1, 2]);
        let mut reserved = cpu.reserve("ns", &chain[..1], 0, |_| PAGE_BYTES);
        let (_, chunk) = reserved.chunks.remove(0);
        assert!(cpu.put("ns", chain[1], chunk).expect("its own memory"));
        assert_eq!(cpu.longest_prefix("ns", &chain[1..]), 1);
        assert_eq!(store(&cpu, &chain), 1);
        assert_books_balance(&cpu);
    }

    #[test]
    fn a_close_gives_the_memory_back_though_handles_of_the_store_live() {
        let cpu = store_of(4);
        let (clone, chain) = (cpu.clone(), hashes([1]));
        store(&cpu, &chain);
        let held = cpu.get("ns", &chain);
        cpu.close();
        assert!(held[0].bytes().iter().all(|&byte| byte == 1), "still read");
        assert!(cpu.0.bank.upgrade().is_some());
        drop(held);
        assert!(cpu.0.bank.upgrade().is_none());
        assert_books_balance(&clone);
    }

    #[test]
    fn a_panic_in_the_books_closes_the_store_and_harms_nobody() {
        let cpu = store_of(4);
        let chain = hashes([1, 2]);
        store(&cpu, &chain);
        cpu.lookup("r", "ns", &chain);
        let held = cpu.get("ns", &chain);
        let reserved = cpu.reserve("ns", &hashes([3]), 0, |_| PAGE_BYTES);
        let panics = || cpu.reserve("ns", &hashes([4]), 0, |_| panic!("in the books"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        drop(reserved);
        assert_eq!(cpu.longest_prefix("ns", &chain), 0);
        assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 0);
        assert!(cpu.get("ns", &chain).is_empty());
        assert!(cpu.take("r", "ns", &chain).is_empty());
        assert_eq!(store(&cpu, &chain), 0);
        assert!(cpu.allocate(&[1]).is_none());
        assert!(!cpu.remove("ns", chain[0]));
        assert_eq!(cpu.clear(), 0);
        assert!(held[1].bytes().iter().all(|&byte| byte == 2));
        cpu.audit();
        drop(held);
        cpu.close();
        assert!(cpu.0.bank.upgrade().is_none(), "the memory is given back");
    }

    #[test]
    fn many_namespaces_do_not_pile_up_and_never_mix() {
        let cpu = store_of(4);
        let chain = hashes([1]);
        store(&cpu, &chain);
        for tenant in 0..10_000 {
            let chunk = cpu.allocate(&[1]).expect("evicts");
            let name = format!("tenant{tenant}");
            let chunk = chunk.into_iter().next().expect("one");
            assert!(cpu.put(&name, chain[0], chunk).expect("its own memory"));
            assert_eq!(cpu.longest_prefix(&name, &chain), 1);
        }
        assert_eq!(cpu.longest_prefix("tenant0", &chain), 0);
        assert_books_balance(&cpu);
    }

    #[test]
    fn sixteen_threads_lose_no_byte_and_read_no_torn_one() {
        let cpu = store_of(32);
        std::thread::scope(|scope| {
            for thread in 0..16u8 {
                let cpu = cpu.clone();
                scope.spawn(move || {
                    for round in 0..400usize {
                        let first = ((usize::from(thread) * 7 + round * 5) % 60) as u8;
                        let chain = hashes(first..first + 4);
                        let id = format!("{thread}");
                        store(&cpu, &chain);
                        let found = cpu.lookup(&id, "ns", &chain).num_chunks;
                        let objects = cpu.take(&id, "ns", &chain[..found]);
                        assert_eq!(
                            objects.len(),
                            found,
                            "a positive lookup holds until it is taken"
                        );
                        for (object, hash) in objects.iter().zip(&chain) {
                            assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
                        }
                    }
                });
            }
        });
        assert_books_balance(&cpu);
    }
}
