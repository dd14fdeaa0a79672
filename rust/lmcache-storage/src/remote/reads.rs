//! Reads of many chunks: several under way, taken in their order, and given as far as they came by the deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use parking_lot::{Condvar, Mutex};

use super::client::Refusal;
use super::value::{self, Unusable};
use super::{Shared, add};
use crate::backend::Arrival;
use crate::object_form::{PAGE_BYTES, key_text};

/// What has come of one read.
#[derive(Debug, Default)]
struct Reading {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    arrivals: Vec<Arrival>,
    is_done: bool,
}

/// Says that nothing more comes, as it is dropped.
struct Last(Arc<Reading>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.state.lock().is_done = true;
        self.0.changed.notify_all();
    }
}

impl Reading {
    /// What is there when it is done, or at the deadline.
    fn wait(&self, due: Option<Instant>) -> (Vec<Arrival>, bool) {
        let mut state = self.state.lock();
        while !state.is_done {
            match due {
                Some(due) => {
                    if self.changed.wait_until(&mut state, due).timed_out() {
                        break;
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
        let is_done = state.is_done;
        // What comes later is nobody's.
        state.is_done = true;
        (std::mem::take(&mut state.arrivals), is_done)
    }

    /// Adds a chunk; false if nobody waits for it.
    fn push(&self, arrival: Arrival) -> bool {
        let mut state = self.state.lock();
        if state.is_done {
            return false;
        }
        state.arrivals.push(arrival);
        true
    }
}

impl Shared {
    /// Reads chunks, from the first to the first gap; those that came `within` that time.
    pub(super) fn get(
        self: &Arc<Self>,
        pool: &LocalCpu,
        namespace: &str,
        hashes: &[ChunkHash],
        within: Duration,
    ) -> Vec<Arrival> {
        if hashes.is_empty() || !self.answers_reads() {
            return Vec::new();
        }
        let began = Instant::now();
        let due = began.checked_add(within);
        let reading = Arc::new(Reading::default());
        let last = Last(Arc::clone(&reading));
        let task = self.handle.spawn(read(
            Arc::clone(self),
            last,
            pool.clone(),
            self.know(namespace),
            hashes.into(),
        ));
        let (arrivals, is_done) = reading.wait(due);
        if !is_done {
            task.abort();
            let found = format!(
                "{} of {} chunks within {within:?}",
                arrivals.len(),
                hashes.len()
            );
            self.faults.note("get", "deadline", &found);
            // The server, and not our own crowd, if nothing at all has come from it meanwhile.
            if !self.breaker.succeeded_since(began) && self.breaker.note_outage(&Refusal::Timeout) {
                self.probe();
            }
        }
        arrivals
    }

    fn unpack(&self, pool: &LocalCpu, value: &Bytes, key: &str) -> Result<Arrival, Unusable> {
        let room = |bytes: usize| pool.allocate(&[bytes]).and_then(|mut one| one.pop());
        let (chunk, description) = value::open(
            value,
            key,
            self.options.serde,
            self.options.max_value_bytes,
            room,
        )?;
        add(&self.counts.got_chunks, 1);
        add(&self.counts.got_bytes, chunk.len() as u64);
        add(&self.counts.received_bytes, value.len() as u64);
        Ok(Arrival { chunk, description })
    }
}

async fn read(
    shared: Arc<Shared>,
    last: Last,
    pool: LocalCpu,
    namespace: Arc<str>,
    hashes: Vec<ChunkHash>,
) {
    let shared = &shared;
    let names = shared.names.of_each(&namespace, &hashes);
    // No more than fits: what is larger is not ours to read.
    let most = pool.capacity_bytes() + MAX_HEADER_BYTES;
    let most = most.min(shared.options.max_value_bytes);
    let fetch = |name: String| async move {
        let _permit = shared.read_permits.acquire().await.ok()?;
        let found = shared.call("get", shared.client.get(&name, most)).await;
        Some((name, found??))
    };
    let mut values = stream::iter(names)
        .map(fetch)
        .buffered(shared.options.operations);
    for hash in hashes {
        let Some(Some((name, value))) = values.next().await else {
            return;
        };
        match shared.unpack(&pool, &value, &key_text(&namespace, hash)) {
            Ok(arrival) => {
                if !last.0.push(arrival) {
                    return;
                }
                last.0.changed.notify_all();
            }
            Err(Unusable::NoRoom(bytes)) => {
                let found = format!("no room for {bytes} bytes");
                return shared.faults.note("get", "no_memory", &found);
            }
            Err(Unusable::Defect(defect)) => {
                shared.faults.note("get", defect.name(), &name);
                // It is found no more; nobody waits for that.
                let shared = Arc::clone(shared);
                tokio::spawn(
                    async move { shared.call("remove", shared.client.remove(&[name])).await },
                );
                return;
            }
        }
    }
}

/// More than a header of any chunk: eight bytes a position, and a key.
const MAX_HEADER_BYTES: u64 = 8 * (1 << 20) + 16 * PAGE_BYTES as u64;
