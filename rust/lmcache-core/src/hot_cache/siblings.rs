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
