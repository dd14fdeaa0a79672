//! The index of L1: key → value, recency, and the choice of victims.
//!
//! A slab of entries joined by `u32` links, and a hash table of slab numbers: no pointers, no lock, no
//! clock. An entry is *Pending* from its reservation until it is published, and only then *Resident* and
//! visible. Every operation is O(1); what is asked of a prefix is O(its chunks).
//!
//! Whether a victim may go is the caller's answer (`evictable`), given under the caller's lock. Entries
//! that may not are set aside on a *held* list, so that thousands of them at the old end are not walked
//! again by each eviction; a few are asked again each time, and a touch brings them back at once.

use hashbrown::HashTable;

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
    /// Published before; its recency is refreshed.
    Resident,
    /// Being written by somebody else.
    Pending,
    /// Now Pending on the caller's behalf.
    New(Reservation),
}

const NIL: u32 = u32::MAX;
/// Held entries asked again by each eviction.
const HELD_PROBES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    None,
    Recent,
    Held,
}

#[derive(Debug)]
enum State<V> {
    Vacant,
    Pending,
    Resident(V),
}

#[derive(Debug)]
struct Slot<V> {
    key: IndexKey,
    prev: u32,
    next: u32,
    stamp: u32,
    list: List,
    state: State<V>,
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    newest: u32,
    oldest: u32,
}

const EMPTY: Ends = Ends {
    newest: NIL,
    oldest: NIL,
};

/// The index. See the module documentation.
#[derive(Debug)]
pub struct HotCache<V> {
    table: HashTable<u32>,
    slots: Vec<Slot<V>>,
    vacant: Vec<u32>,
    recent: Ends,
    held: Ends,
    batch: u32,
    num_resident: usize,
}

impl<V> Default for HotCache<V> {
    fn default() -> Self {
        Self {
            table: HashTable::new(),
            slots: Vec::new(),
            vacant: Vec::new(),
            recent: EMPTY,
            held: EMPTY,
            batch: 0,
            num_resident: 0,
        }
    }
}

impl<V> HotCache<V> {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
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

    /// The published entries, in no particular order.
    pub fn residents(&self) -> impl Iterator<Item = (&IndexKey, &V)> {
        self.slots.iter().filter_map(|slot| match &slot.state {
            State::Resident(value) => Some((&slot.key, value)),
            State::Vacant | State::Pending => None,
        })
    }

    /// The namespaces that have entries, Pending ones included; repeated once an entry.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        let taken = self
            .slots
            .iter()
            .filter(|slot| !matches!(slot.state, State::Vacant));
        taken.map(|slot| slot.key.namespace)
    }

    /// Opens a batch: entries touched from now on are safe from [`HotCache::evict`] until the next one, so
    /// a prompt larger than the pool never evicts its own beginning.
    pub fn begin_batch(&mut self) {
        self.batch = self.batch.wrapping_add(1);
    }

    /// Shows `visit` the published values of the longest prefix of `hashes`, refreshes the recency of all
    /// of it, and returns its length. The walk ends where `visit` returns false (that one not counted).
    ///
    /// Recency is refreshed from the tail to the head, so that a prefix outlives what depends on it.
    pub fn longest_prefix(
        &mut self,
        namespace: NamespaceId,
        hashes: &[ChunkHash],
        mut visit: impl FnMut(&V) -> bool,
    ) -> usize {
        let mut found = Vec::with_capacity(hashes.len());
        for &hash in hashes {
            let Some(at) = self.find(&IndexKey { namespace, hash }) else {
                break;
            };
            match &self.slots[at as usize].state {
                State::Resident(value) if visit(value) => found.push(at),
                _ => break,
            }
        }
        for &at in found.iter().rev() {
            self.touch_at(at);
        }
        found.len()
    }

    /// Refreshes the recency of every published key among `hashes`, tail first.
    pub fn touch(&mut self, namespace: NamespaceId, hashes: &[ChunkHash]) {
        for &hash in hashes.iter().rev() {
            if let Some(at) = self.find(&IndexKey { namespace, hash })
                && matches!(self.slots[at as usize].state, State::Resident(_))
            {
                self.touch_at(at);
            }
        }
    }

    /// The published value of a key; its recency stays as it is.
    pub fn peek(&self, key: &IndexKey) -> Option<&V> {
        match &self.slots[self.find(key)? as usize].state {
            State::Resident(value) => Some(value),
            State::Vacant | State::Pending => None,
        }
    }

    /// Makes a Pending entry for the key unless there is one of any kind.
    pub fn reserve(&mut self, key: IndexKey) -> Reserve {
        if let Some(at) = self.find(&key) {
            return match self.slots[at as usize].state {
                State::Resident(_) => {
                    self.touch_at(at);
                    Reserve::Resident
                }
                State::Vacant | State::Pending => Reserve::Pending,
            };
        }
        let slot = Slot {
            key,
            prev: NIL,
            next: NIL,
            stamp: 0,
            list: List::None,
            state: State::Pending,
        };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                let at = u32::try_from(self.slots.len()).ok().filter(|&at| at != NIL);
                let at = at.expect("fewer than 2^32 entries fit the memory they describe");
                self.slots.push(slot);
                at
            }
        };
        let Self { table, slots, .. } = self;
        table.insert_unique(key.table_hash(), at, |&at| {
            slots[at as usize].key.table_hash()
        });
        Reserve::New(Reservation(at))
    }

    /// Makes a Pending entry Resident, the most recent of all.
    pub fn publish(&mut self, reservation: Reservation, value: V) {
        let at = reservation.0;
        let slot = &mut self.slots[at as usize];
        assert!(
            matches!(slot.state, State::Pending),
            "corrupt index: publishing what is not Pending"
        );
        slot.state = State::Resident(value);
        self.num_resident += 1;
        self.push_newest(at, List::Recent);
    }

    /// Removes a Pending entry.
    pub fn abandon(&mut self, reservation: Reservation) {
        let at = reservation.0;
        let pending = matches!(self.slots[at as usize].state, State::Pending);
        assert!(pending, "corrupt index: abandoning what is not Pending");
        self.vacate(at);
    }

    /// Removes the oldest Resident entry that `evictable` lets go and that the current batch has not touched.
    pub fn evict(&mut self, mut evictable: impl FnMut(&mut V) -> bool) -> Option<(IndexKey, V)> {
        for _ in 0..HELD_PROBES {
            let at = self.held.oldest;
            if at == NIL {
                break;
            }
            if let Some(victim) = self.try_evict(at, &mut evictable) {
                return Some(victim);
            }
            self.unlink(at);
            self.push_newest_untouched(at, List::Held);
        }
        loop {
            let at = self.recent.oldest;
            if at == NIL || self.slots[at as usize].stamp == self.batch {
                break;
            }
            if let Some(victim) = self.try_evict(at, &mut evictable) {
                return Some(victim);
            }
            self.unlink(at);
            self.push_newest_untouched(at, List::Held);
        }
        // Nothing else is left: a held entry that was let go of since is the last hope.
        let mut at = self.held.oldest;
        while at != NIL {
            let newer = self.slots[at as usize].prev;
            if let Some(victim) = self.try_evict(at, &mut evictable) {
                return Some(victim);
            }
            at = newer;
        }
        None
    }

    /// Puts back what [`HotCache::evict`] took, as the oldest entry.
    pub fn restore(&mut self, key: IndexKey, value: V) {
        let Reserve::New(reservation) = self.reserve(key) else {
            unreachable!("corrupt index: restoring an entry that is there")
        };
        let at = reservation.0;
        self.slots[at as usize].state = State::Resident(value);
        self.num_resident += 1;
        self.push_oldest(at);
    }

    /// Removes a published entry.
    pub fn remove(&mut self, key: &IndexKey) -> Option<V> {
        let at = self.find(key)?;
        matches!(self.slots[at as usize].state, State::Resident(_))
            .then(|| self.remove_resident(at).1)
    }

    /// Removes every published entry that `keep` does not keep and hands them to `removed`.
    pub fn retain(
        &mut self,
        mut keep: impl FnMut(&IndexKey, &V) -> bool,
        mut removed: impl FnMut(IndexKey, V),
    ) {
        for at in 0..self.slots.len() as u32 {
            let slot = &self.slots[at as usize];
            if let State::Resident(value) = &slot.state
                && !keep(&slot.key, value)
            {
                let (key, value) = self.remove_resident(at);
                removed(key, value);
            }
        }
    }

    fn find(&self, key: &IndexKey) -> Option<u32> {
        self.table
            .find(key.table_hash(), |&at| self.slots[at as usize].key == *key)
            .copied()
    }

    fn try_evict(
        &mut self,
        at: u32,
        evictable: &mut impl FnMut(&mut V) -> bool,
    ) -> Option<(IndexKey, V)> {
        let slot = &mut self.slots[at as usize];
        if slot.stamp == self.batch {
            return None;
        }
        let State::Resident(value) = &mut slot.state else {
            return None;
        };
        evictable(value).then(|| self.remove_resident(at))
    }

    fn remove_resident(&mut self, at: u32) -> (IndexKey, V) {
        self.unlink(at);
        self.num_resident -= 1;
        let key = self.slots[at as usize].key;
        match self.vacate(at) {
            State::Resident(value) => (key, value),
            State::Vacant | State::Pending => unreachable!("corrupt index: entry was Resident"),
        }
    }

    fn vacate(&mut self, at: u32) -> State<V> {
        let key = self.slots[at as usize].key;
        match self
            .table
            .find_entry(key.table_hash(), |&other| other == at)
        {
            Ok(entry) => entry.remove(),
            Err(_) => unreachable!("corrupt index: entry is not in the table"),
        };
        self.vacant.push(at);
        std::mem::replace(&mut self.slots[at as usize].state, State::Vacant)
    }

    fn touch_at(&mut self, at: u32) {
        self.unlink(at);
        self.push_newest(at, List::Recent);
    }

    fn push_newest(&mut self, at: u32, list: List) {
        self.slots[at as usize].stamp = self.batch;
        self.push_newest_untouched(at, list);
    }

    fn push_newest_untouched(&mut self, at: u32, list: List) {
        let ends = *self.ends(list);
        let slot = &mut self.slots[at as usize];
        (slot.list, slot.prev, slot.next) = (list, NIL, ends.newest);
        match ends.newest {
            NIL => self.ends(list).oldest = at,
            newest => self.slots[newest as usize].prev = at,
        }
        self.ends(list).newest = at;
    }

    fn push_oldest(&mut self, at: u32) {
        let oldest = self.recent.oldest;
        let slot = &mut self.slots[at as usize];
        slot.stamp = self.batch.wrapping_sub(1);
        (slot.list, slot.prev, slot.next) = (List::Recent, oldest, NIL);
        match oldest {
            NIL => self.recent.newest = at,
            oldest => self.slots[oldest as usize].next = at,
        }
        self.recent.oldest = at;
    }

    fn unlink(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        let (list, prev, next) = (slot.list, slot.prev, slot.next);
        assert_ne!(
            list,
            List::None,
            "corrupt recency list: unlinking what is in none"
        );
        slot.list = List::None;
        match prev {
            NIL => self.ends(list).newest = next,
            prev => self.slots[prev as usize].next = next,
        }
        match next {
            NIL => self.ends(list).oldest = prev,
            next => self.slots[next as usize].prev = prev,
        }
    }

    fn ends(&mut self, list: List) -> &mut Ends {
        match list {
            List::Recent => &mut self.recent,
            List::Held => &mut self.held,
            List::None => unreachable!("corrupt recency list: entry is in none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const NS: NamespaceId = NamespaceId(0);

    fn hash(number: u8) -> ChunkHash {
        let mut bytes = [0; 32];
        bytes[0] = number;
        ChunkHash(bytes)
    }

    fn key(number: u8) -> IndexKey {
        IndexKey {
            namespace: NS,
            hash: hash(number),
        }
    }

    /// A value that counts as leased while `leased` is set.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Entry {
        id: u8,
        leased: bool,
    }

    fn put(cache: &mut HotCache<Entry>, id: u8, leased: bool) {
        if let Reserve::New(reservation) = cache.reserve(key(id)) {
            cache.publish(reservation, Entry { id, leased });
        }
    }

    fn evict(cache: &mut HotCache<Entry>) -> Option<u8> {
        cache
            .evict(|entry| !entry.leased)
            .map(|(_, entry)| entry.id)
    }

    fn cache_of(ids: impl IntoIterator<Item = u8>) -> HotCache<Entry> {
        let mut cache = HotCache::new();
        for id in ids {
            put(&mut cache, id, false);
        }
        cache.begin_batch();
        cache
    }

    #[test]
    fn oldest_goes_first_and_a_put_of_a_known_key_refreshes() {
        let mut cache = cache_of([1, 2, 3]);
        assert_eq!(cache.reserve(key(1)), Reserve::Resident);
        cache.begin_batch();
        assert_eq!(
            [
                evict(&mut cache),
                evict(&mut cache),
                evict(&mut cache),
                evict(&mut cache)
            ],
            [Some(2), Some(3), Some(1), None]
        );
    }

    #[test]
    fn pending_entries_are_neither_hits_nor_victims() {
        let mut cache = cache_of([]);
        let Reserve::New(reservation) = cache.reserve(key(1)) else {
            panic!("new")
        };
        assert_eq!(cache.reserve(key(1)), Reserve::Pending);
        assert_eq!(cache.longest_prefix(NS, &[hash(1)], |_| true), 0);
        assert_eq!(cache.peek(&key(1)), None);
        assert_eq!(evict(&mut cache), None);
        cache.publish(
            reservation,
            Entry {
                id: 1,
                leased: false,
            },
        );
        assert_eq!(cache.longest_prefix(NS, &[hash(1)], |_| true), 1);
    }

    #[test]
    fn an_abandoned_entry_was_never_there() {
        let mut cache = cache_of([]);
        let Reserve::New(reservation) = cache.reserve(key(1)) else {
            panic!("new")
        };
        cache.abandon(reservation);
        assert!(cache.is_empty());
        assert!(matches!(cache.reserve(key(1)), Reserve::New(_)));
    }

    #[test]
    fn a_prefix_outlives_its_suffix() {
        let mut cache = cache_of([1, 2, 3, 4]);
        assert_eq!(
            cache.longest_prefix(NS, &[hash(1), hash(2), hash(3), hash(9)], |_| true),
            3
        );
        cache.begin_batch();
        assert_eq!(
            [
                evict(&mut cache),
                evict(&mut cache),
                evict(&mut cache),
                evict(&mut cache)
            ],
            [Some(4), Some(3), Some(2), Some(1)]
        );
    }

    #[test]
    fn a_batch_never_evicts_what_it_touched() {
        let mut cache = cache_of([1, 2, 3]);
        cache.touch(NS, &[hash(2), hash(3)]);
        assert_eq!(evict(&mut cache), Some(1));
        assert_eq!(evict(&mut cache), None);
        cache.begin_batch();
        assert_eq!(evict(&mut cache), Some(3));
    }

    #[test]
    fn namespaces_are_apart() {
        let mut cache = cache_of([1]);
        assert_eq!(
            cache.longest_prefix(NamespaceId(1), &[hash(1)], |_| true),
            0
        );
    }

    #[test]
    fn leased_entries_at_the_old_end_are_set_aside_and_come_back() {
        let mut cache: HotCache<Entry> = HotCache::new();
        for id in 0..100 {
            put(&mut cache, id, true);
        }
        for id in 100..200 {
            put(&mut cache, id, false);
        }
        cache.begin_batch();
        let mut asked = 0;
        let mut evict_counting = |cache: &mut HotCache<Entry>| {
            cache
                .evict(|entry| {
                    asked += 1;
                    !entry.leased
                })
                .map(|(_, entry)| entry.id)
        };
        assert_eq!(evict_counting(&mut cache), Some(100));
        for id in 101..200 {
            assert_eq!(evict_counting(&mut cache), Some(id));
        }
        assert!(
            asked <= 100 + 100 * (1 + HELD_PROBES),
            "{asked} questions for 100 victims"
        );
        assert_eq!(
            cache
                .evict(|entry| entry.id == 57)
                .map(|(_, entry)| entry.id),
            Some(57)
        );
    }

    #[test]
    fn a_restored_victim_is_the_oldest_again() {
        let mut cache = cache_of([1, 2]);
        let (key, value) = cache.evict(|_| true).expect("one to evict");
        cache.restore(key, value);
        assert_eq!(evict(&mut cache), Some(1));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Put(u8, bool),
        Prefix(Vec<u8>),
        Evict,
        Remove(u8),
        Retain(u8),
        Batch,
    }

    fn step() -> impl Strategy<Value = Step> {
        let id = 0u8..24;
        prop_oneof![
            4 => (id.clone(), any::<bool>()).prop_map(|(id, leased)| Step::Put(id, leased)),
            2 => proptest::collection::vec(id.clone(), 0..5).prop_map(Step::Prefix),
            3 => Just(Step::Evict),
            1 => id.clone().prop_map(Step::Remove),
            1 => id.prop_map(Step::Retain),
            2 => Just(Step::Batch),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        /// The model: a vector ordered from old to new. Leased entries never change, so which of the
        /// others is oldest is exact; only they are compared.
        #[test]
        fn equals_the_naive_model(steps in proptest::collection::vec(step(), 0..200)) {
            let mut cache: HotCache<Entry> = HotCache::new();
            let mut order: Vec<u8> = Vec::new();
            let mut leased: HashMap<u8, bool> = HashMap::new();
            let mut touched: Vec<u8> = Vec::new();
            cache.begin_batch();
            for step in steps {
                let refresh = |order: &mut Vec<u8>, touched: &mut Vec<u8>, id: u8| {
                    order.retain(|other| *other != id);
                    order.push(id);
                    touched.push(id);
                };
                match step {
                    Step::Put(id, lease) => {
                        put(&mut cache, id, lease);
                        leased.entry(id).or_insert(lease);
                        refresh(&mut order, &mut touched, id);
                    }
                    Step::Prefix(ids) => {
                        let hashes: Vec<_> = ids.iter().map(|id| hash(*id)).collect();
                        let expected = ids.iter().take_while(|id| leased.contains_key(id)).count();
                        prop_assert_eq!(cache.longest_prefix(NS, &hashes, |_| true), expected);
                        for &id in ids[..expected].iter().rev() {
                            refresh(&mut order, &mut touched, id);
                        }
                    }
                    Step::Evict => {
                        let victim = order.iter().copied().find(|id| !leased[id] && !touched.contains(id));
                        prop_assert_eq!(evict(&mut cache), victim);
                        if let Some(id) = victim {
                            order.retain(|other| *other != id);
                            leased.remove(&id);
                        }
                    }
                    Step::Remove(id) => {
                        prop_assert_eq!(cache.remove(&key(id)).is_some(), leased.remove(&id).is_some());
                        order.retain(|other| *other != id);
                        touched.retain(|other| *other != id);
                    }
                    Step::Retain(below) => {
                        cache.retain(|key, _| key.hash.0[0] >= below, |_, _| ());
                        leased.retain(|id, _| *id >= below);
                        order.retain(|id| *id >= below);
                        touched.retain(|id| *id >= below);
                    }
                    Step::Batch => {
                        cache.begin_batch();
                        touched.clear();
                    }
                }
                prop_assert_eq!(cache.num_resident(), order.len());
            }
        }
    }
}
