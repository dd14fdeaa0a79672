//! Keys of entries that were evicted: 64 bits of each, in two lists from old to new.

use hashbrown::HashTable;

use super::slab::{NIL, grow};

#[derive(Debug, Clone, Copy)]
struct Ghost {
    /// The key's fingerprint; its lowest bit is the list's number instead.
    mark: u64,
    prev: u32,
    next: u32,
}

impl Ghost {
    fn list(self) -> usize {
        (self.mark & 1) as usize
    }
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: usize,
}

/// What was evicted lately.
#[derive(Debug)]
pub(super) struct Ghosts {
    table: HashTable<u32>,
    ghosts: Vec<Ghost>,
    vacant: u32,
    lists: [Ends; 2],
}

impl Default for Ghosts {
    fn default() -> Self {
        let empty = Ends {
            oldest: NIL,
            newest: NIL,
            len: 0,
        };
        Self {
            table: HashTable::new(),
            ghosts: Vec::new(),
            vacant: NIL,
            lists: [empty; 2],
        }
    }
}

impl Ghosts {
    pub(super) fn len(&self, list: usize) -> usize {
        self.lists[list].len
    }

    /// Remembers a key as the newest of a list; it is in neither.
    pub(super) fn push(&mut self, fingerprint: u64, list: usize) {
        self.take(fingerprint);
        let newest = self.lists[list].newest;
        let ghost = Ghost {
            mark: fingerprint & !1 | list as u64,
            prev: newest,
            next: NIL,
        };
        let at = if self.vacant == NIL {
            grow(&mut self.ghosts);
            self.ghosts.push(ghost);
            (self.ghosts.len() - 1) as u32
        } else {
            let at = self.vacant;
            self.vacant = self.ghosts[at as usize].next;
            self.ghosts[at as usize] = ghost;
            at
        };
        match newest {
            NIL => self.lists[list].oldest = at,
            newest => self.ghosts[newest as usize].next = at,
        }
        self.lists[list].newest = at;
        self.lists[list].len += 1;
        let Self { table, ghosts, .. } = self;
        table.insert_unique(fingerprint & !1, at, |&at| ghosts[at as usize].mark & !1);
    }

    /// Forgets a key; the list it was in.
    pub(super) fn take(&mut self, fingerprint: u64) -> Option<usize> {
        let fingerprint = fingerprint & !1;
        let Self { table, ghosts, .. } = self;
        let same = |&at: &u32| ghosts[at as usize].mark & !1 == fingerprint;
        let at = table.find_entry(fingerprint, same).ok()?.remove().0;
        Some(self.unlink(at))
    }

    /// Forgets old keys until no more than `most` are left, of the longer list first.
    pub(super) fn trim_to(&mut self, most: usize) {
        while self.table.len() > most {
            let longer = usize::from(self.lists[1].len > self.lists[0].len);
            let at = self.lists[longer].oldest;
            let fingerprint = self.ghosts[at as usize].mark & !1;
            let entry = self.table.find_entry(fingerprint, |&other| other == at);
            entry
                .expect("corrupt ghost list: a ghost is not in the table")
                .remove();
            self.unlink(at);
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.ghosts.capacity() * size_of::<Ghost>() + self.table.allocation_size()
    }

    fn unlink(&mut self, at: u32) -> usize {
        let ghost = self.ghosts[at as usize];
        let ends = &mut self.lists[ghost.list()];
        ends.len -= 1;
        match ghost.prev {
            NIL => ends.oldest = ghost.next,
            prev => self.ghosts[prev as usize].next = ghost.next,
        }
        match ghost.next {
            NIL => self.lists[ghost.list()].newest = ghost.prev,
            next => self.ghosts[next as usize].prev = ghost.prev,
        }
        self.ghosts[at as usize].next = self.vacant;
        self.vacant = at;
        ghost.list()
    }
}
