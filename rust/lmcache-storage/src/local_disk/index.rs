//! What one process knows of a folder: the catalogue so far, as an index that says who leaves next.

use std::collections::{HashMap, HashSet};

use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::{Access, HotCache, IndexKey, Policy, Reserve, Values};
use lmcache_core::key::NamespaceId;

use super::records::{Event, Name, Record};

/// A chunk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) bytes: u64,
    /// Which put of many it came with.
    batch: u32,
    /// It could be neither read nor removed: it is not to be found, and still takes its room.
    pub(crate) bad: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Index {
    cache: HotCache<Entry>,
    ids: HashMap<[u8; 16], NamespaceId>,
    digests: Vec<[u8; 16]>,
    /// Which catalogue it follows, and how many of its records are in here.
    pub(crate) generation: u64,
    pub(crate) num_records: u64,
}

impl Entry {
    fn of(record: &Record) -> Self {
        Self {
            bytes: record.bytes,
            batch: record.batch,
            bad: false,
        }
    }
}

impl Index {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            cache: HotCache::new(policy),
            ids: HashMap::new(),
            digests: Vec::new(),
            generation: 0,
            num_records: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.cache.num_resident()
    }

    fn name(&self, key: &IndexKey) -> Name {
        let namespace = self.digests[key.namespace.0 as usize];
        Name {
            hash: key.hash,
            namespace,
        }
    }

    fn key(&mut self, name: Name) -> IndexKey {
        let next = NamespaceId(self.digests.len() as u32);
        let id = *self.ids.entry(name.namespace).or_insert(next);
        if id == next {
            self.digests.push(name.namespace);
        }
        IndexKey {
            namespace: id,
            hash: name.hash,
        }
    }

    fn known(&self, name: &Name) -> Option<IndexKey> {
        Some(IndexKey {
            namespace: *self.ids.get(&name.namespace)?,
            hash: name.hash,
        })
    }

    /// The chunk's file, if the catalogue has it.
    pub(crate) fn entry(&self, name: &Name) -> Option<Entry> {
        self.cache.peek(&self.known(name)?).copied()
    }

    /// Whether the chunk is stored.
    pub(crate) fn contains(&self, name: &Name) -> bool {
        self.entry(name).is_some_and(|entry| !entry.bad)
    }

    fn publish(&mut self, key: IndexKey, entry: Entry) {
        if let Reserve::New(reservation) = self.cache.reserve(key) {
            self.cache.publish(reservation, entry);
        }
    }

    /// Takes a chunk in; the record of one that is known says that it was used.
    fn put_or_touch(&mut self, key: IndexKey, entry: Entry) {
        if self.cache.peek(&key).is_some() {
            self.cache.touch(key.namespace, &[key.hash]);
        } else {
            self.publish(key, entry);
        }
    }

    /// Follows one step of the catalogue.
    pub(crate) fn apply(&mut self, record: &Record) {
        let key = self.key(record.name);
        match record.event {
            Event::Removed => {
                self.cache.remove(&key);
            }
            Event::Put => self.put_or_touch(key, Entry::of(record)),
        }
        self.num_records += 1;
    }

    /// Follows a whole catalogue from its beginning. What was put together is used together, its head last:
    /// a chain leaves from its tail on.
    pub(crate) fn reload(&mut self, policy: Policy, generation: u64, records: &[Record]) {
        *self = Self::new(policy);
        self.generation = generation;
        self.num_records = records.len() as u64;
        // The last word on each chunk, in the order in which its batch ended.
        let mut order: Vec<usize> = (0..records.len()).collect();
        let mut last: HashMap<u32, usize> = HashMap::new();
        for (at, record) in records.iter().enumerate() {
            last.insert(record.batch, at);
        }
        order.sort_by_cached_key(|&at| {
            let record = &records[at];
            (last[&record.batch], std::cmp::Reverse(record.position), at)
        });
        let has_removals = records.iter().any(|record| record.event == Event::Removed);
        let mut gone = HashSet::new();
        if has_removals {
            let mut seen = HashSet::new();
            for (at, record) in records.iter().enumerate().rev() {
                if !seen.insert(record.name) || record.event == Event::Removed {
                    gone.insert(at);
                }
            }
        }
        for at in order {
            if !gone.contains(&at) {
                let record = &records[at];
                let key = self.key(record.name);
                self.put_or_touch(key, Entry::of(record));
            }
        }
    }

    /// The chunk that is to leave next, to make room for one of `batch`: never one that came with it, or a
    /// prompt larger than the disk would evict its own beginning. It is to be removed, or marked as bad.
    pub(crate) fn victim(&mut self, batch: u32) -> Option<(Name, u64)> {
        // Nothing is safe for having been used just now.
        self.cache.begin_batch();
        let victim = self.cache.evict(|entry| entry.batch != batch)?;
        let (key, entry) = (victim.key, victim.value);
        self.cache.restore(victim);
        Some((self.name(&key), entry.bytes))
    }

    /// Notes that a chunk's file can be neither read nor removed. It is the last to be tried again.
    pub(crate) fn mark_bad(&mut self, name: &Name) {
        if let Some(key) = self.known(name)
            && let Some(entry) = self.cache.remove(&key)
        {
            self.publish(key, Entry { bad: true, ..entry });
        }
    }

    /// Refreshes the stored chunks of a chain.
    pub(crate) fn touch(&mut self, namespace: [u8; 16], hashes: &[ChunkHash]) {
        if let Some(&id) = self.ids.get(&namespace) {
            self.cache.touch(id, hashes);
        }
    }

    /// How many chunks of the chain are stored up to the first gap; they count as used.
    pub(crate) fn longest_prefix(&mut self, namespace: [u8; 16], hashes: &[ChunkHash]) -> usize {
        let Some(&id) = self.ids.get(&namespace) else {
            return 0;
        };
        let visit = |found: Values<'_, Entry>| found.take_while(|entry| !entry.bad).count();
        self.cache.longest_prefix(id, hashes, Access::Use, visit)
    }
}
