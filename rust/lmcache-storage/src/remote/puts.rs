//! Puts in hand: what waits is bounded in bytes, because it is host memory, and nobody waits for it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_memory::object::MemoryObj;
use parking_lot::{Condvar, Mutex};

use super::client::Refusal;
use super::{Shared, add, value};
use crate::backend::{Chunk, described};
use crate::object_form::Defect;

/// What is known of the puts that are not done.
#[derive(Debug)]
pub(super) struct Line {
    state: Mutex<State>,
    changed: Condvar,
    max_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<String, Pending>,
    unfinished: BTreeSet<u64>,
    bytes: u64,
    next: u64,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    namespace: Arc<str>,
    is_running: bool,
    is_withdrawn: bool,
}

/// Whether a put may join the line.
pub(super) enum Entry {
    /// It has, under this number.
    In(u64),
    /// A put of that name is there already.
    Known,
    /// There is no room.
    NoRoom,
}

impl Line {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            max_bytes,
        }
    }

    pub(super) fn enter(&self, name: &str, namespace: &Arc<str>, bytes: u64) -> Entry {
        let mut state = self.state.lock();
        // One that was withdrawn before it began makes room: it will find that its place is taken.
        let known = state.pending.get(name);
        if known.is_some_and(|put| put.is_running || !put.is_withdrawn) {
            return Entry::Known;
        }
        // One is always let in, however big.
        if state.bytes > 0 && state.bytes + bytes > self.max_bytes {
            return Entry::NoRoom;
        }
        let number = state.next;
        state.next += 1;
        state.bytes += bytes;
        state.unfinished.insert(number);
        let put = Pending {
            number,
            namespace: Arc::clone(namespace),
            is_running: false,
            is_withdrawn: false,
        };
        state.pending.insert(name.to_owned(), put);
        Entry::In(number)
    }

    /// Begins a put; false if it was withdrawn.
    fn begin(&self, put: &Put) -> bool {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&put.name) else {
            return false;
        };
        let goes_on = pending.number == put.number && !pending.is_withdrawn;
        pending.is_running |= goes_on;
        goes_on
    }

    fn is_withdrawn(&self, put: &Put) -> bool {
        let state = self.state.lock();
        let pending = state.pending.get(&put.name);
        pending.is_none_or(|pending| pending.number != put.number || pending.is_withdrawn)
    }

    fn end(&self, put: &Put) {
        let mut state = self.state.lock();
        let pending = state.pending.get(&put.name);
        if pending.is_some_and(|pending| pending.number == put.number) {
            state.pending.remove(&put.name);
        }
        state.unfinished.remove(&put.number);
        state.bytes -= put.bytes;
        drop(state);
        self.changed.notify_all();
    }

    /// Withdraws puts, by name and namespace, and waits for those that have begun; how many there were.
    pub(super) fn withdraw(&self, within: Duration, goes: impl Fn(&str, &str) -> bool) -> usize {
        let due = Instant::now() + within;
        let mut state = self.state.lock();
        let mut count = 0;
        let mut running = Vec::new();
        for (name, put) in &mut state.pending {
            if !goes(name, &put.namespace) || put.is_withdrawn {
                continue;
            }
            put.is_withdrawn = true;
            count += 1;
            if put.is_running {
                running.push(put.number);
            }
        }
        while running
            .iter()
            .any(|number| state.unfinished.contains(number))
        {
            if self.changed.wait_until(&mut state, due).timed_out() {
                break;
            }
        }
        count
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    pub(super) fn flush(&self, within: Duration) -> bool {
        let due = Instant::now().checked_add(within);
        let mut state = self.state.lock();
        let last = state.next;
        let is_done = |state: &State| {
            state
                .unfinished
                .first()
                .is_none_or(|number| *number >= last)
        };
        while !is_done(&state) {
            match due {
                Some(due) => {
                    if self.changed.wait_until(&mut state, due).timed_out() {
                        return is_done(&state);
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
        true
    }

    /// Puts that are not done, and their bytes.
    pub(super) fn queued(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.unfinished.len() as u64, state.bytes)
    }
}

/// A put in hand. Dropping it, done or not, ends it.
pub(super) struct Put {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
    pub(super) namespace: Arc<str>,
    pub(super) hash: ChunkHash,
    pub(super) chunk: Chunk,
    pub(super) number: u64,
    pub(super) bytes: u64,
}

impl Drop for Put {
    fn drop(&mut self) {
        self.shared.line.end(self);
    }
}

/// Puts that came together: those that the server has at their beginning are left out, the others go as they get
/// a place.
pub(super) async fn run(shared: Arc<Shared>, puts: Vec<Put>) {
    let names: Vec<String> = puts.iter().map(|put| put.name.clone()).collect();
    let asked = shared.call("put", shared.client.prefix(&names)).await;
    let Some(num_known) = asked else {
        return add(&shared.counts.dropped_chunks, puts.len() as u64);
    };
    for (at, put) in puts.into_iter().enumerate() {
        if at < num_known {
            add(&shared.counts.refreshed_chunks, 1);
            continue;
        }
        let Ok(permit) = Arc::clone(&shared.put_permits).acquire_owned().await else {
            return;
        };
        tokio::spawn(async move {
            put.store().await;
            drop(permit);
        });
    }
}

impl Put {
    async fn store(self) {
        let shared = Arc::clone(&self.shared);
        if !shared.line.begin(&self) {
            return;
        }
        if !shared.takes_puts() {
            return add(&shared.counts.dropped_chunks, 1);
        }
        // Packed it may be smaller, and is not read all the same.
        if self.bytes > shared.options.max_value_bytes {
            return self.is_too_large(self.bytes);
        }
        let Some(pieces) = self.value() else {
            let found = "its description is larger than a header may be";
            shared.faults.note("put", Defect::Malformed.name(), found);
            return add(&shared.counts.dropped_chunks, 1);
        };
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if bytes > shared.options.max_value_bytes {
            return self.is_too_large(bytes);
        }
        let ttl = shared.options.ttl;
        let outcome = shared.ask(shared.client.put(&self.name, pieces, ttl)).await;
        shared.learn("put", &outcome);
        match outcome {
            Ok(()) => {
                shared.hold.note_taken();
                add(&shared.counts.put_chunks, 1);
                add(&shared.counts.put_bytes, self.bytes);
                add(&shared.counts.sent_bytes, bytes);
            }
            Err(_) => add(&shared.counts.dropped_chunks, 1),
        }
        if shared.line.is_withdrawn(&self) {
            let name = [self.name.clone()];
            let removed = shared.ask(shared.client.remove(&name)).await;
            shared.learn("remove", &removed);
        }
    }

    fn is_too_large(&self, bytes: u64) {
        let shared = &self.shared;
        let most = shared.options.max_value_bytes;
        let found =
            format!("a value of {bytes} bytes where {most} is the most; make chunks smaller");
        shared.faults.note("put", Refusal::TooLarge.name(), &found);
        add(&shared.counts.dropped_chunks, 1);
    }

    fn value(&self) -> Option<Vec<bytes::Bytes>> {
        let object: &MemoryObj = &self.chunk.object;
        let (form, num_tokens) = (self.chunk.form.as_ref(), self.chunk.num_tokens);
        let description = described(&self.namespace, self.hash, object, form, num_tokens);
        value::seal(&description, object.clone(), self.shared.options.serde)
    }
}

impl Shared {
    /// Takes chunks in, first to last, as far as there is room; how many.
    pub(super) fn put(
        self: &Arc<Self>,
        namespace: &str,
        hashes: &[ChunkHash],
        chunks: Vec<Chunk>,
    ) -> usize {
        let num_chunks = hashes.len().min(chunks.len());
        if num_chunks == 0 {
            return 0;
        }
        if !self.takes_puts() {
            add(&self.counts.dropped_chunks, num_chunks as u64);
            return 0;
        }
        let namespace = self.know(namespace);
        let names = self.names.of_each(&namespace, &hashes[..num_chunks]);
        let mut puts = Vec::with_capacity(num_chunks);
        let each = names.into_iter().zip(hashes).zip(chunks);
        for (at, ((name, &hash), chunk)) in each.enumerate() {
            let bytes = chunk.object.len() as u64;
            match self.line.enter(&name, &namespace, bytes) {
                Entry::In(number) => puts.push(Put {
                    shared: Arc::clone(self),
                    name,
                    namespace: Arc::clone(&namespace),
                    hash,
                    chunk,
                    number,
                    bytes,
                }),
                Entry::Known => {}
                Entry::NoRoom => {
                    // Behind a gap nothing is found.
                    add(&self.counts.dropped_chunks, (num_chunks - at) as u64);
                    break;
                }
            }
        }
        let taken = puts.len();
        if taken > 0 {
            self.handle.spawn(run(Arc::clone(self), puts));
        }
        taken
    }

    /// Whether puts have any prospect.
    pub(super) fn takes_puts(&self) -> bool {
        self.is_in_use() && self.hold.lets_through()
    }
}
