//! The index of L1: key → value, and the choice of victims.
//!
//! A slab of entries joined by `u32` links, and a hash table of slab numbers: no pointers, no lock, no
//! clock. An entry is *Pending* from its reservation until it is published, and only then *Resident* and
//! visible. Every operation is O(1); what is asked of a prefix is O(its chunks).
//!
//! [`Policy`] says in which order entries leave. Whether a victim may go is the caller's answer
//! (`evictable`), given under the caller's lock. Entries that may not are set aside on a *held* list, so
//! that thousands of them at the old end are not walked again by each eviction; a few are asked again each
//! time, and a touch brings them back at once. Once let go of, a held chain leaves in order too, as far as no
//! entry of another that is held still lies between its own.

mod arc;
mod fifo;
mod ghost;
mod lfu;
mod lru;
mod mru;
mod policy;
mod s3_fifo;
mod siblings;
mod slab;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use hashbrown::HashTable;

pub use self::policy::{Access, Policy};
use self::policy::{AnyOrder, Order};
use self::siblings::Siblings;
use self::slab::{FRESH, HELD, NIL, PENDING, REMOVED, Slab, Slot};
use crate::hash::ChunkHash;
use crate::key::NamespaceId;

/// Names an entry: the namespace (everything but the tokens that decides the bytes) and the chain hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexKey {
    /// Interned namespace.
    pub namespace: NamespaceId,
    /// Chain hash of the chunk.
    pub hash: ChunkHash,
}

impl IndexKey {
    fn table_hash(&self) -> u64 {
        let head = self.hash.0.first_chunk::<8>().expect("a hash has 32 bytes");
        // The hash is uniform by itself; the namespace is spread over all bits by an odd constant.
        u64::from_le_bytes(*head) ^ u64::from(self.namespace.0).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The right, and the duty, to publish or abandon one Pending entry.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a reservation is published or abandoned"]
pub struct Reservation(u32);

/// What a key is when a place for it is asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Reserve {
    /// Published before; it is refreshed.
    Resident,
    /// Being written by somebody else.
    Pending,
    /// Now Pending on the caller's behalf.
    New(Reservation),
}

/// An entry that [`HotCache::evict`] took out.
#[derive(Debug)]
pub struct Victim<V> {
    /// Its key.
    pub key: IndexKey,
    /// Its value.
    pub value: V,
    standing: Standing,
}

/// What the policy knew of a victim.
#[derive(Debug, Clone, Copy)]
struct Standing {
    mark: u32,
    flags: u8,
    credit: u8,
}

/// The values of a chain, from its first chunk on.
#[derive(Debug)]
pub struct Values<'a, V> {
    chain: std::slice::Iter<'a, u32>,
    slots: &'a [Slot<V>],
}

impl<V> Clone for Values<'_, V> {
    fn clone(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            slots: self.slots,
        }
    }
}

impl<'a, V> Iterator for Values<'a, V> {
    type Item = &'a V;

    fn next(&mut self) -> Option<&'a V> {
        let at = *self.chain.next()?;
        self.slots[at as usize].value.as_ref()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.chain.size_hint()
    }
}

impl<V> ExactSizeIterator for Values<'_, V> {}

/// Keys that are looked for side by side.
const PROBES: usize = 64;

/// Held entries asked again by each eviction.
const HELD_PROBES: usize = 2;

/// The index. See the module documentation.
#[derive(Debug)]
pub struct HotCache<V> {
    policy: Policy,
    table: HashTable<u32>,
    slab: Slab<V>,
    siblings: Siblings,
    order: AnyOrder,
    num_resident: usize,
    /// The entries of the chain at hand; kept for its memory.
    chain: Vec<u32>,
}

impl<V> Default for HotCache<V> {
    fn default() -> Self {
        Self::new(Policy::default())
    }
}

impl<V> HotCache<V> {
    /// An empty index.
    pub fn new(policy: Policy) -> Self {
        let order = AnyOrder::new(policy);
        Self {
            policy,
            table: HashTable::new(),
            slab: Slab::new(order.num_lists()),
            siblings: Siblings::default(),
            order,
            num_resident: 0,
            chain: Vec::new(),
        }
    }

    /// The policy it was made with.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Published entries.
    pub fn num_resident(&self) -> usize {
        self.num_resident
    }

    /// Entries, Pending ones included.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is no entry at all.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Bytes of memory that the index occupies, spare room and remembered victims included; what its values
    /// point to is not.
    pub fn heap_bytes(&mut self) -> usize {
        let ghosts = self.order.ghosts().map_or(0, |ghosts| ghosts.heap_bytes());
        let entries = self.slab.heap_bytes() + self.siblings.heap_bytes();
        entries + self.table.allocation_size() + self.chain.capacity() * 4 + ghosts
    }

    /// The published entries, in no particular order.
    pub fn residents(&self) -> impl Iterator<Item = (&IndexKey, &V)> {
        let slots = self.slab.slots.iter();
        slots.filter_map(|slot| slot.value.as_ref().map(|value| (&slot.key, value)))
    }

    /// The namespaces that have entries, Pending ones included.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        self.siblings.namespaces()
    }

    /// Opens a batch: entries touched from now on are safe from [`HotCache::evict`] until the next one, so
    /// a prompt larger than the pool never evicts its own beginning.
    pub fn begin_batch(&mut self) {
        self.slab.batch = self.slab.batch.wrapping_add(1);
    }

    /// Shows `visit` the published values of the longest prefix of `hashes`, counts the access to as many of
    /// them as it answers, and returns that number.
    ///
    /// `visit` may go through them more than once: what it reads first, for all of them, comes from memory
    /// side by side.
    pub fn longest_prefix(
        &mut self,
        namespace: NamespaceId,
        hashes: &[ChunkHash],
        access: Access,
        visit: impl FnOnce(Values<'_, V>) -> usize,
    ) -> usize {
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        for hashes in hashes.chunks(PROBES) {
            if !self.probe(namespace, hashes, &mut chain) {
                break;
            }
        }
        let wanted = visit(Values {
            chain: chain.iter(),
            slots: &self.slab.slots,
        });
        chain.truncate(wanted);
        self.walk(&chain, access);
        let num_chunks = chain.len();
        self.chain = chain;
        num_chunks
    }

    /// Refreshes every published key among `hashes`, a chain or the beginning of one.
    pub fn touch(&mut self, namespace: NamespaceId, hashes: &[ChunkHash]) {
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        let found = hashes
            .iter()
            .filter_map(|&hash| self.find_resident(&IndexKey { namespace, hash }));
        chain.extend(found);
        self.walk(&chain, Access::Refresh);
        self.chain = chain;
    }

    /// The published value of a key; its recency stays as it is.
    pub fn peek(&self, key: &IndexKey) -> Option<&V> {
        self.slab.slots[self.find(key)? as usize].value.as_ref()
    }

    /// Makes a Pending entry for the key unless there is one of any kind.
    ///
    /// A known key is refreshed, unless the batch has touched it already: then it has its place.
    pub fn reserve(&mut self, key: IndexKey) -> Reserve {
        let Some(at) = self.find(&key) else {
            return Reserve::New(Reservation(self.insert(key)));
        };
        let slot = &self.slab.slots[at as usize];
        if slot.value.is_none() {
            return Reserve::Pending;
        }
        if slot.stamp != self.slab.batch {
            self.walk(&[at], Access::Refresh);
        }
        Reserve::Resident
    }

    /// Makes a Pending entry Resident, as the policy's freshest; except under MRU, it is not the next to
    /// leave while there is another that may, and that waits for nothing.
    pub fn publish(&mut self, reservation: Reservation, value: V) {
        let at = reservation.0;
        let batch = self.slab.batch;
        let slot = &mut self.slab.slots[at as usize];
        assert!(
            slot.has(PENDING),
            "corrupt index: publishing what is not Pending"
        );
        slot.value = Some(value);
        slot.flags = FRESH;
        slot.stamp = batch;
        let fingerprint = slot.key.table_hash();
        self.num_resident += 1;
        let Self { slab, order, .. } = self;
        order.enter(slab, at, fingerprint, self.num_resident);
    }

    /// Whether the entry was removed while it was Pending: what its writer read is from before that, and it is
    /// to be abandoned.
    pub fn is_removed(&self, reservation: &Reservation) -> bool {
        self.slab.slots[reservation.0 as usize].has(REMOVED)
    }

    /// Removes every Pending entry, see [`HotCache::is_removed`]. Its key is taken until its writer is done.
    pub fn remove_pending(&mut self) {
        for slot in &mut self.slab.slots {
            if slot.has(PENDING) {
                slot.flags |= REMOVED;
            }
        }
    }

    /// Removes a Pending entry.
    pub fn abandon(&mut self, reservation: Reservation) {
        let at = reservation.0;
        assert!(
            self.slab.slots[at as usize].has(PENDING),
            "corrupt index: abandoning what is not Pending"
        );
        self.vacate(at);
    }

    /// Removes the next Resident entry to leave that `evictable` lets go and that the current batch has not
    /// touched.
    pub fn evict(&mut self, mut evictable: impl FnMut(&mut V) -> bool) -> Option<Victim<V>> {
        for _ in 0..HELD_PROBES {
            let Some(mut at) = self.slab.next_held() else {
                break;
            };
            if self.may_leave(at, &mut evictable) {
                // Those before it were held still when they were asked; a lease ends for all of a chain.
                loop {
                    let before = self.slab.before(at);
                    if before == NIL || !self.may_leave(before, &mut evictable) {
                        break;
                    }
                    at = before;
                }
                self.slab.ask_next(at);
                return Some(self.take_out(at));
            }
        }
        loop {
            let Self { slab, order, .. } = self;
            let Some(at) = order.candidate(slab, self.num_resident) else {
                break;
            };
            if self.may_leave(at, &mut evictable) {
                return Some(self.take_out(at));
            }
            self.slab.move_to_back(at, HELD);
        }
        // Nothing else is left: a held entry that was let go of since is the last hope.
        let mut at = self.slab.front(HELD);
        while at != NIL {
            if self.may_leave(at, &mut evictable) {
                return Some(self.take_out(at));
            }
            at = self.slab.behind(at);
        }
        None
    }

    /// Puts back what [`HotCache::evict`] took, as the next of its list to leave. Several are put back in
    /// reverse order.
    pub fn restore(&mut self, victim: Victim<V>) {
        let Reserve::New(Reservation(at)) = self.reserve(victim.key) else {
            unreachable!("corrupt index: restoring an entry that is there")
        };
        let Standing {
            mark,
            flags,
            credit,
        } = victim.standing;
        let slot = &mut self.slab.slots[at as usize];
        slot.value = Some(victim.value);
        (slot.mark, slot.flags, slot.credit) = (mark, flags, credit);
        self.num_resident += 1;
        if let Some(ghosts) = self.order.ghosts() {
            ghosts.take(victim.key.table_hash());
        }
        self.slab.push_front(at, self.order.home(flags, mark));
    }

    /// Removes a published entry.
    pub fn remove(&mut self, key: &IndexKey) -> Option<V> {
        let at = self.find_resident(key)?;
        let value = self.remove_resident(at);
        self.trim_ghosts();
        Some(value)
    }

    /// Removes every published entry that `keep` does not keep and hands them to `removed`.
    pub fn retain(
        &mut self,
        mut keep: impl FnMut(&IndexKey, &V) -> bool,
        mut removed: impl FnMut(IndexKey, V),
    ) {
        for at in 0..self.slab.slots.len() as u32 {
            let slot = &self.slab.slots[at as usize];
            let key = slot.key;
            if slot.value.as_ref().is_some_and(|value| !keep(&key, value)) {
                removed(key, self.remove_resident(at));
            }
        }
        self.trim_ghosts();
    }

    /// Removes every entry of a namespace: hands the published ones to `removed`, and Pending ones are not to be
    /// published (see [`HotCache::is_removed`]). What other namespaces hold costs nothing.
    pub fn remove_namespace(
        &mut self,
        namespace: NamespaceId,
        mut removed: impl FnMut(IndexKey, V),
    ) {
        let mut at = self.siblings.first(namespace);
        while at != NIL {
            let behind = self.siblings.behind(at);
            let slot = &mut self.slab.slots[at as usize];
            if slot.value.is_some() {
                let key = slot.key;
                removed(key, self.remove_resident(at));
            } else {
                slot.flags |= REMOVED;
            }
            at = behind;
        }
        self.trim_ghosts();
    }

    fn find(&self, key: &IndexKey) -> Option<u32> {
        let slots = &self.slab.slots;
        let same = |&at: &u32| slots[at as usize].key == *key;
        self.table.find(key.table_hash(), same).copied()
    }

    /// Appends the published entries of the longest prefix of `hashes`; whether that is all of them.
    ///
    /// In two short loops, whose steps do not depend on each other: what a step reads comes from memory
    /// while those behind it ask for theirs.
    fn probe(&self, namespace: NamespaceId, hashes: &[ChunkHash], chain: &mut Vec<u32>) -> bool {
        let key = |hash: ChunkHash| IndexKey { namespace, hash };
        let mut guesses = [NIL; PROBES];
        for (guess, &hash) in guesses.iter_mut().zip(hashes) {
            let mut candidates = self.table.iter_hash(key(hash).table_hash());
            *guess = candidates.next().copied().unwrap_or(NIL);
        }
        for (&guess, &hash) in guesses.iter().zip(hashes) {
            let slot = self.slab.slots.get(guess as usize);
            let found = match slot.filter(|slot| slot.value.is_some() && slot.key == key(hash)) {
                Some(_) => Some(guess),
                None => self.find_resident(&key(hash)),
            };
            let Some(at) = found else { return false };
            chain.push(at);
        }
        true
    }

    fn find_resident(&self, key: &IndexKey) -> Option<u32> {
        self.find(key)
            .filter(|&at| self.slab.slots[at as usize].value.is_some())
    }

    fn insert(&mut self, key: IndexKey) -> u32 {
        let at = self.slab.take(key);
        self.siblings.enter(key.namespace, at);
        let slots = &self.slab.slots;
        self.table.insert_unique(key.table_hash(), at, |&at| {
            slots[at as usize].key.table_hash()
        });
        at
    }

    fn walk(&mut self, chain: &[u32], access: Access) {
        let Self { slab, order, .. } = self;
        for &at in chain {
            slab.slots[at as usize].stamp = slab.batch;
        }
        slab.fetch_neighbours(chain);
        order.walk(slab, chain, access);
    }

    fn may_leave(&mut self, at: u32, evictable: &mut impl FnMut(&mut V) -> bool) -> bool {
        let batch = self.slab.batch;
        let slot = &mut self.slab.slots[at as usize];
        slot.stamp != batch && slot.value.as_mut().is_some_and(evictable)
    }

    fn take_out(&mut self, at: u32) -> Victim<V> {
        let slot = &self.slab.slots[at as usize];
        let key = slot.key;
        let standing = Standing {
            mark: slot.mark,
            flags: slot.flags,
            credit: slot.credit,
        };
        let list = self.order.ghost_list(standing.flags);
        if let Some(ghosts) = self.order.ghosts() {
            ghosts.push(key.table_hash(), list);
        }
        let value = self.remove_resident(at);
        self.trim_ghosts();
        Victim {
            key,
            value,
            standing,
        }
    }

    /// Never more ghosts than entries.
    fn trim_ghosts(&mut self) {
        let most = self.num_resident;
        if let Some(ghosts) = self.order.ghosts() {
            ghosts.trim_to(most);
        }
    }

    fn remove_resident(&mut self, at: u32) -> V {
        self.slab.unlink(at);
        self.num_resident -= 1;
        self.vacate(at)
            .expect("corrupt index: a Resident entry has a value")
    }

    fn vacate(&mut self, at: u32) -> Option<V> {
        let key = self.slab.slots[at as usize].key;
        self.siblings.leave(key.namespace, at);
        let hash = key.table_hash();
        let entry = self.table.find_entry(hash, |&other| other == at);
        entry
            .expect("corrupt index: an entry is not in the table")
            .remove();
        self.slab.vacate(at)
    }
}
