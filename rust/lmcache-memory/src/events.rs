//! What L1 and the tiers below it hold, told as it changes: [`EventSink`].
//!
//! Whoever changes what is stored notes it under its own lock, takes a place in line there, and fills that
//! place after the lock is gone. So events are in the order of the changes, whatever order the threads go on in,
//! and nothing waits for whoever listens. A place not filled yet holds back what is behind it until the next
//! drain.
//!
//! The line is bounded. When more happens than it holds, what waits is dropped and the next drain tells
//! everything that is stored then, in place of what led there: a listener that starts anew with it is exact again.

use std::collections::{HashMap, VecDeque};
use std::mem;

use lmcache_core::hash::ChunkHash;

use crate::sync::{Arc, AtomicU64, Mutex, Ordering};

/// The name of L1 among the tiers.
pub const LOCAL_CPU: &str = "local_cpu";

/// Events that may wait for a listener, unless it says otherwise; about 100 bytes each.
pub const DEFAULT_CAPACITY: usize = 1 << 16;

/// A chunk that came or went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Whether the chunk is found from here on, or not any more.
    pub is_stored: bool,
    /// Where: [`LOCAL_CPU`], or the name of a tier below.
    pub tier: Text,
    /// Everything but the tokens that decides the bytes.
    pub namespace: Text,
    /// The chunk's hash.
    pub hash: ChunkHash,
    /// Bytes of the chunk.
    pub bytes: u64,
    /// Its tokens; 0 where its writer did not say.
    pub tokens: u32,
}

/// A name that many events share.
pub type Text = std::sync::Arc<str>;

/// What happened since the last drain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drained {
    /// What was told before is void: `events` has all that is stored, and nothing else.
    pub is_anew: bool,
    /// In the order in which it happened.
    pub events: Vec<Event>,
}

/// The one place where admissions and removals of all tiers are told. Clones share it.
///
/// L1 tells of itself ([`crate::local_cpu::LocalCpu::listen`]); other tiers are told of by whoever keeps them,
/// with [`EventSink::stored`] and its like, and their contents are remembered here for a listener that has to
/// start anew.
#[derive(Debug, Clone)]
pub struct EventSink(Arc<Line>);

#[derive(Debug)]
struct Line {
    capacity: usize,
    /// The next place in line; taken under the lock of what changed.
    next: AtomicU64,
    state: Mutex<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    /// The place that `places` begins with.
    first: u64,
    /// `None` is a place that was taken and is not filled yet.
    places: VecDeque<Option<Vec<Event>>>,
    num_events: usize,
    is_lost: bool,
    times_lost: u64,
    below: HashMap<Text, Chunks>,
}

/// Bytes and tokens of a tier's chunks, by namespace and hash.
type Chunks = HashMap<(Text, ChunkHash), (u64, u32)>;

/// Changes of one verb: noted under the lock of what changed, told when dropped.
#[derive(Debug)]
pub(crate) struct News {
    sink: EventSink,
    place: u64,
    changes: Option<Vec<Event>>,
}

impl Drop for News {
    fn drop(&mut self) {
        self.sink.fill(self.place, self.changes.take());
    }
}

impl EventSink {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Arc::new(Line {
            capacity,
            next: AtomicU64::new(0),
            state: Mutex::new(Waiting {
                first: 0,
                places: VecDeque::new(),
                num_events: 0,
                // What is stored already was never told.
                is_lost: true,
                times_lost: 0,
                below: HashMap::new(),
            }),
        }))
    }

    /// How often more happened than the line holds, since the start.
    pub fn times_lost(&self) -> u64 {
        self.0.state.lock().times_lost
    }

    /// A tier below L1 has a chunk from now on.
    pub fn stored(&self, tier: &str, namespace: &str, hash: ChunkHash, bytes: u64, tokens: u32) {
        let mut state = self.0.state.lock();
        let tier = state.tier(tier);
        let chunks = state.below.entry(Text::clone(&tier)).or_default();
        let key = (Text::from(namespace), hash);
        let namespace = Text::clone(&key.0);
        if chunks.insert(key, (bytes, tokens)).is_some() {
            return;
        }
        let event = Event {
            is_stored: true,
            tier,
            namespace,
            hash,
            bytes,
            tokens,
        };
        self.tell(&mut state, vec![event]);
    }

    /// A tier below L1 has a chunk no more. Nothing happens if it was never told of.
    pub fn removed(&self, tier: &str, namespace: &str, hash: ChunkHash) {
        let mut state = self.0.state.lock();
        let tier = state.tier(tier);
        let key = (Text::from(namespace), hash);
        let chunks = state.below.get_mut(&tier);
        let Some((bytes, tokens)) = chunks.and_then(|chunks| chunks.remove(&key)) else {
            return;
        };
        let event = Event {
            is_stored: false,
            tier,
            namespace: key.0,
            hash,
            bytes,
            tokens,
        };
        self.tell(&mut state, vec![event]);
    }

    /// A tier below L1 has none of its chunks any more.
    pub fn cleared(&self, tier: &str) {
        let mut state = self.0.state.lock();
        let tier = state.tier(tier);
        let chunks = state.below.remove(&tier).unwrap_or_default();
        let events = chunks
            .into_iter()
            .map(|((namespace, hash), (bytes, tokens))| Event {
                is_stored: false,
                tier: Text::clone(&tier),
                namespace,
                hash,
                bytes,
                tokens,
            });
        let events = events.collect();
        self.tell(&mut state, events);
    }

    /// Takes a place and fills it, under the line's own lock.
    fn tell(&self, state: &mut Waiting, events: Vec<Event>) {
        let place = self.0.next.fetch_add(1, Ordering::Relaxed);
        state.fill(place, Some(events), self.0.capacity);
    }

    /// A place in line for changes that were noted; `None` are more than the line holds. The caller holds the
    /// lock under which they happened, and drops this after it.
    pub(crate) fn news(&self, changes: Option<Vec<Event>>) -> News {
        News {
            sink: self.clone(),
            place: self.0.next.fetch_add(1, Ordering::Relaxed),
            changes,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity
    }

    fn fill(&self, place: u64, changes: Option<Vec<Event>>) {
        let mut state = self.0.state.lock();
        state.fill(place, changes, self.0.capacity);
    }

    /// What happened, in order, up to the first place that is not filled; `None` if some of it was dropped.
    pub(crate) fn take(&self) -> Option<Vec<Event>> {
        let mut state = self.0.state.lock();
        if state.is_lost {
            return None;
        }
        let mut events = Vec::with_capacity(state.num_events);
        while let Some(Some(_)) = state.places.front() {
            events.extend(state.places.pop_front().flatten().unwrap_or_default());
            state.first += 1;
        }
        state.num_events -= events.len();
        Some(events)
    }

    /// Begins anew with `l1`, all that L1 holds. The caller holds L1's lock: no change of it is under way.
    pub(crate) fn begin_anew(&self, mut l1: Vec<Event>) -> Vec<Event> {
        let mut state = self.0.state.lock();
        // Places taken before are void, also those that are filled later: their changes are in `l1`.
        state.first = self.0.next.load(Ordering::Relaxed);
        state.places.clear();
        state.num_events = 0;
        state.is_lost = false;
        for (tier, chunks) in &state.below {
            for ((namespace, hash), &(bytes, tokens)) in chunks {
                l1.push(Event {
                    is_stored: true,
                    tier: Text::clone(tier),
                    namespace: Text::clone(namespace),
                    hash: *hash,
                    bytes,
                    tokens,
                });
            }
        }
        l1
    }
}

impl Waiting {
    fn tier(&self, name: &str) -> Text {
        let known = self.below.get_key_value(name);
        known.map_or_else(|| Text::from(name), |(tier, _)| Text::clone(tier))
    }

    fn fill(&mut self, place: u64, changes: Option<Vec<Event>>, capacity: usize) {
        let Some(at) = place.checked_sub(self.first) else {
            return;
        };
        let at = at as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, None);
        }
        let is_whole = changes.is_some();
        let changes = changes.unwrap_or_default();
        if !is_whole || self.num_events + changes.len() > capacity {
            self.lose();
        }
        let changes = if self.is_lost { Vec::new() } else { changes };
        self.num_events += changes.len();
        self.places[at] = Some(changes);
        if self.is_lost {
            // Nobody will read them, and nobody may come for long.
            while let Some(Some(_)) = self.places.front() {
                self.places.pop_front();
                self.first += 1;
            }
        }
    }

    fn lose(&mut self) {
        self.times_lost += u64::from(!self.is_lost);
        self.is_lost = true;
        for filled in self.places.iter_mut().flatten() {
            drop(mem::take(filled));
        }
        self.num_events = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u8) -> Event {
        Event {
            is_stored: true,
            tier: LOCAL_CPU.into(),
            namespace: "ns".into(),
            hash: ChunkHash([number; 32]),
            bytes: 1,
            tokens: 1,
        }
    }

    fn listening(capacity: usize) -> EventSink {
        let sink = EventSink::new(capacity);
        assert_eq!(sink.take(), None, "what was stored before is told first");
        assert_eq!(sink.begin_anew(Vec::new()), []);
        sink
    }

    #[test]
    fn events_come_in_the_order_of_the_changes_not_of_the_telling() {
        let sink = listening(9);
        let first = sink.news(Some(vec![event(1)]));
        let second = sink.news(Some(vec![event(2)]));
        drop(second);
        assert_eq!(sink.take(), Some(vec![]), "the first is still on its way");
        drop(first);
        assert_eq!(sink.take(), Some(vec![event(1), event(2)]));
    }

    #[test]
    fn a_line_that_is_full_is_told_anew_and_late_news_of_before_are_void() {
        let sink = listening(2);
        let late = sink.news(Some(vec![event(0)]));
        for number in 1..4 {
            drop(sink.news(Some(vec![event(number)])));
        }
        assert_eq!(sink.take(), None);
        assert_eq!(sink.times_lost(), 1);
        assert_eq!(sink.begin_anew(vec![event(9)]), [event(9)]);
        drop(late);
        drop(sink.news(Some(vec![event(4)])));
        assert_eq!(sink.take(), Some(vec![event(4)]));
    }

    #[test]
    fn a_line_nobody_reads_stays_small() {
        let sink = listening(2);
        for number in 0..100 {
            drop(sink.news(Some(vec![event(number)])));
            sink.stored("disk", "ns", ChunkHash([number; 32]), 1, 1);
            sink.removed("disk", "ns", ChunkHash([number; 32]));
        }
        assert_eq!(sink.0.state.lock().places.len(), 0);
        assert_eq!(sink.times_lost(), 1);
    }

    #[test]
    fn other_tiers_are_told_of_once_each_and_anew_with_the_rest() {
        let sink = listening(3);
        let on_disk = |number| Event {
            tier: "disk".into(),
            bytes: 7,
            ..event(number)
        };
        for _ in 0..2 {
            sink.stored("disk", "ns", ChunkHash([1; 32]), 7, 1);
        }
        sink.removed("disk", "ns", ChunkHash([2; 32]));
        sink.removed("remote", "ns", ChunkHash([1; 32]));
        assert_eq!(sink.take(), Some(vec![on_disk(1)]));
        drop(sink.news(None));
        assert_eq!(sink.begin_anew(vec![event(3)]), [event(3), on_disk(1)]);
        sink.cleared("disk");
        let gone = Event {
            is_stored: false,
            ..on_disk(1)
        };
        assert_eq!(sink.take(), Some(vec![gone]));
        assert_eq!(sink.begin_anew(Vec::new()), []);
    }
}
