//! The entries of each namespace in a list of its own, so that all of one are found without a walk over
//! those of others. Beside the slab: an entry there is one cache line and has no room left.

use hashbrown::HashTable;

use super::slab::{NIL, grow};
use crate::key::NamespaceId;

#[derive(Debug, Clone, Copy)]
struct Link {
    prev: u32,
    next: u32,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    links: Vec<Link>,
    /// The entry of each namespace that came last.
    first: HashTable<(NamespaceId, u32)>,
}

fn spread(namespace: NamespaceId) -> u64 {
    // Numbers are small and consecutive: an odd constant spreads them over all bits.
    u64::from(namespace.0).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Siblings {
    /// The entry that came last to the namespace, or `NIL`.
    pub(super) fn first(&self, namespace: NamespaceId) -> u32 {
        let found = self
            .first
            .find(spread(namespace), |(of, _)| *of == namespace);
        found.map_or(NIL, |(_, at)| *at)
    }

    /// The entry that came to the same namespace before this one, or `NIL`.
    pub(super) fn behind(&self, at: u32) -> u32 {
        self.links[at as usize].next
    }

    /// The namespaces that have entries.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        self.first.iter().map(|(namespace, _)| *namespace)
    }

    /// Puts an entry into the list of its namespace.
    pub(super) fn enter(&mut self, namespace: NamespaceId, at: u32) {
        let entry = self.first.entry(
            spread(namespace),
            |(of, _)| *of == namespace,
            |(of, _)| spread(*of),
        );
        let mut first = entry.or_insert((namespace, NIL));
        let (_, head) = first.get_mut();
        let next = std::mem::replace(head, at);
        let link = Link { prev: NIL, next };
        // The slab hands out a number that it has used before, or the next one.
        match self.links.get_mut(at as usize) {
            Some(place) => *place = link,
            None => {
                grow(&mut self.links);
                self.links.push(link);
            }
        }
        debug_assert!((at as usize) < self.links.len());
        if next != NIL {
            self.links[next as usize].prev = at;
        }
    }

    /// Takes an entry out of the list of its namespace.
    pub(super) fn leave(&mut self, namespace: NamespaceId, at: u32) {
        let Link { prev, next } = self.links[at as usize];
        if next != NIL {
            self.links[next as usize].prev = prev;
        }
        if prev != NIL {
            self.links[prev as usize].next = next;
            return;
        }
        let entry = self
            .first
            .find_entry(spread(namespace), |(of, _)| *of == namespace);
        let mut entry = entry.expect("corrupt index: a namespace with entries has none");
        if next == NIL {
            entry.remove();
        } else {
            entry.get_mut().1 = next;
        }
    }

    /// Bytes that the lists occupy, spare room included.
    pub(super) fn heap_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>() + self.first.allocation_size()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use super::super::{HotCache, IndexKey, Policy, Reserve};
    use crate::hash::ChunkHash;
    use crate::key::NamespaceId;

    fn hash(number: u16) -> ChunkHash {
        let mut bytes = [0; 32];
        bytes[..2].copy_from_slice(&number.to_le_bytes());
        ChunkHash(bytes)
    }

    fn key(namespace: u32, number: u16) -> IndexKey {
        IndexKey {
            namespace: NamespaceId(namespace),
            hash: hash(number),
        }
    }

    #[test]
    fn a_namespace_is_removed_whole_and_alone_under_every_policy() {
        for policy in Policy::ALL {
            let mut cache: HotCache<u16> = HotCache::new(policy);
            let mut model = HashSet::new();
            let mut state = 7u32;
            for step in 0..20_000u32 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let (namespace, number) = (state >> 28, (state >> 16) as u16 % 40);
                match state >> 8 & 63 {
                    0 => {
                        let mut removed = 0;
                        cache.remove_namespace(NamespaceId(namespace), |gone, _| {
                            assert!(
                                model.remove(&(gone.namespace.0, gone.hash)),
                                "{policy:?} {step}"
                            );
                            removed += 1;
                        });
                        assert!(
                            model.iter().all(|(of, _)| *of != namespace),
                            "{policy:?} {step}"
                        );
                        assert!(removed <= 40);
                    }
                    1..8 => {
                        if let Some(victim) = cache.evict(|_| true) {
                            assert!(model.remove(&(victim.key.namespace.0, victim.key.hash)));
                        }
                    }
                    8..14 => {
                        let removed = cache.remove(&key(namespace, number)).is_some();
                        assert_eq!(removed, model.remove(&(namespace, hash(number))));
                    }
                    14..18 => {
                        if let Reserve::New(reservation) = cache.reserve(key(namespace, number)) {
                            cache.abandon(reservation);
                        }
                    }
                    _ => {
                        cache.begin_batch();
                        if let Reserve::New(reservation) = cache.reserve(key(namespace, number)) {
                            cache.publish(reservation, number);
                            model.insert((namespace, hash(number)));
                        }
                    }
                }
                assert_eq!(cache.num_resident(), model.len());
            }
            let mut namespaces: Vec<u32> =
                cache.namespaces().map(|namespace| namespace.0).collect();
            namespaces.sort_unstable();
            let expected: BTreeSet<u32> = model.iter().map(|(of, _)| *of).collect();
            assert!(expected.iter().eq(&namespaces), "{policy:?}: each once");
        }
    }

    #[test]
    fn removing_a_namespace_leaves_what_is_pending_there() {
        let mut cache: HotCache<u16> = HotCache::default();
        let Reserve::New(reservation) = cache.reserve(key(0, 1)) else {
            panic!("nothing is there");
        };
        if let Reserve::New(other) = cache.reserve(key(0, 2)) {
            cache.publish(other, 2);
        }
        let mut removed = Vec::new();
        cache.remove_namespace(NamespaceId(0), |_, value| removed.push(value));
        assert_eq!(removed, [2]);
        cache.publish(reservation, 1);
        assert_eq!(cache.peek(&key(0, 1)), Some(&1));
    }
}
