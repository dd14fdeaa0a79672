//! What was used since the catalogue was last told: who is found after a restart knows what is worth keeping.
//!
//! A use is told as another record of the same put: to readers it is a chunk that they know, and its place in
//! the catalogue says when it was used. Nothing is written when something is used, but now and then for all
//! that was.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::records::{Event, Name, Record};

/// How often the catalogue is told, at most.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Chunks that are remembered until then, some more for a moment; the latest chains.
const MAX_CHUNKS: usize = 1 << 15;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Uses {
    /// By its last chunk: who asks again, or goes on to read what it asked for, replaces what it said.
    chains: HashMap<Name, Chain>,
    num_chunks: usize,
    next: u64,
    /// When the catalogue was told last, or is about to be.
    told: Instant,
}

#[derive(Debug)]
struct Chain {
    number: u64,
    /// Each with its place in the prompt.
    chunks: Box<[(u16, Name)]>,
}

impl Uses {
    pub(crate) fn new() -> Self {
        Self {
            chains: HashMap::new(),
            num_chunks: 0,
            next: 0,
            told: Instant::now(),
        }
    }

    /// Notes the use of the chunks of a chain, first to last. Whether the catalogue is to be told now, which is
    /// said to one only.
    pub(crate) fn note(&mut self, chunks: Box<[(u16, Name)]>) -> bool {
        let Some(&(_, tail)) = chunks.last() else {
            return false;
        };
        self.num_chunks += chunks.len();
        let number = self.next;
        self.next += 1;
        if let Some(before) = self.chains.insert(tail, Chain { number, chunks }) {
            self.num_chunks -= before.chunks.len();
        }
        if self.num_chunks > MAX_CHUNKS {
            self.forget_oldest();
        }
        let is_due = self.told.elapsed() >= TELL_EVERY;
        if is_due {
            self.told = Instant::now();
        }
        is_due
    }

    /// Half of them: the next is far off.
    fn forget_oldest(&mut self) {
        let mut numbers: Vec<(u64, usize)> = self
            .chains
            .values()
            .map(|chain| (chain.number, chain.chunks.len()))
            .collect();
        numbers.sort_unstable();
        let mut first_kept = self.next;
        let mut kept = 0;
        for (number, len) in numbers.into_iter().rev() {
            kept += len;
            // The last one stays, however long.
            if kept > MAX_CHUNKS / 2 && first_kept != self.next {
                break;
            }
            first_kept = number;
        }
        self.chains.retain(|_, chain| chain.number >= first_kept);
        self.num_chunks = self.chains.values().map(|chain| chain.chunks.len()).sum();
    }

    /// What is to be told, the latest use last, each chunk once; nothing is left. `bytes_of` a chunk's file, if it
    /// is still there.
    pub(crate) fn take(
        &mut self,
        mut new_batch: impl FnMut() -> u32,
        bytes_of: impl Fn(&Name) -> Option<u64>,
    ) -> Vec<Record> {
        self.told = Instant::now();
        self.num_chunks = 0;
        let mut chains: Vec<Chain> = std::mem::take(&mut self.chains).into_values().collect();
        chains.sort_unstable_by_key(|chain| chain.number);
        let mut seen = HashSet::new();
        let mut latest_first = Vec::new();
        for chain in chains.into_iter().rev() {
            let batch = new_batch();
            for &(position, name) in chain.chunks.iter().rev() {
                if let Some(bytes) = bytes_of(&name).filter(|_| seen.insert(name)) {
                    latest_first.push(Record {
                        event: Event::Put,
                        name,
                        bytes,
                        batch,
                        position,
                    });
                }
            }
        }
        latest_first.reverse();
        latest_first
    }
}

#[cfg(test)]
mod tests {
    use lmcache_core::hash::ChunkHash;

    use super::*;

    fn name(number: usize) -> Name {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        Name {
            hash: ChunkHash(hash),
            namespace: [7; 16],
        }
    }

    fn chain(numbers: impl IntoIterator<Item = usize>) -> Box<[(u16, Name)]> {
        let chunk = |(at, number)| (at as u16, name(number));
        numbers.into_iter().enumerate().map(chunk).collect()
    }

    fn told(uses: &mut Uses) -> Vec<(u32, u16, Name)> {
        let mut batch = 0;
        let new_batch = || {
            batch += 1;
            batch
        };
        let is_there = |of: &Name| (*of != name(99)).then_some(4096);
        let records = uses.take(new_batch, is_there);
        records
            .iter()
            .map(|record| (record.batch, record.position, record.name))
            .collect()
    }

    #[test]
    fn each_chunk_is_told_once_where_it_was_used_last() {
        let mut uses = Uses::new();
        for numbers in [&[1, 2, 3][..], &[4, 99], &[1, 2, 3], &[4, 5], &[1, 2, 6]] {
            assert!(!uses.note(chain(numbers.iter().copied())), "not due yet");
        }
        assert!(!uses.note(Box::new([])));
        let wanted = [
            (3, 2, name(3)),
            (2, 0, name(4)),
            (2, 1, name(5)),
            (1, 0, name(1)),
            (1, 1, name(2)),
            (1, 2, name(6)),
        ];
        assert_eq!(told(&mut uses), wanted);
        assert_eq!(told(&mut uses), []);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_latest_stays() {
        let mut uses = Uses::new();
        for round in 0..100 {
            uses.note(chain(round * 1000..round * 1000 + 1000));
            assert!(uses.num_chunks <= MAX_CHUNKS);
        }
        let last = told(&mut uses);
        assert!(last.len() >= MAX_CHUNKS / 2 - 1000);
        assert_eq!(last.last().map(|told| told.2), Some(name(99_999)));
        // One chain of more than that stays whole.
        uses.note(chain([1]));
        uses.note(chain(100..MAX_CHUNKS + 101));
        assert_eq!(told(&mut uses).len(), MAX_CHUNKS + 1);
    }

    #[test]
    fn one_is_asked_to_tell_once_it_is_due() {
        let mut uses = Uses::new();
        let Some(long_ago) = Instant::now().checked_sub(TELL_EVERY) else {
            return;
        };
        uses.told = long_ago;
        assert!(uses.note(chain([1])));
        assert!(!uses.note(chain([2])));
        assert_eq!(told(&mut uses).len(), 2);
    }
}
