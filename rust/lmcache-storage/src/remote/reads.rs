//! Reads of many chunks: several under way, taken in their order, and given as far as they came by the deadline.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use parking_lot::{Condvar, Mutex};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::client::Refusal;
use super::landing::{Landing, Turn, Unusable};
use super::{Shared, add};
use crate::backend::Arrival;
use crate::object_form::key_text;

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
    let landings = hashes.into_iter().zip(Turn::each()).map(|(hash, turn)| {
        let key = key_text(&namespace, hash);
        Landing::new(key, &shared.options, pool.clone(), turn)
    });
    // Each is a task of its own: one thread alone may be slower than the network.
    let mut values = stream::iter(names.into_iter().zip(landings))
        .map(|(name, landing)| async move {
            // In the order of the prefix, as memory is: none that has a permit waits for one without.
            let permits = Arc::clone(&shared.read_permits);
            let permit = permits.acquire_owned().await.ok()?;
            Fetch(tokio::spawn(fetch(
                Arc::clone(shared),
                name,
                landing,
                permit,
            )))
            .await
        })
        .buffered(shared.options.operations);
    while let Some(Some((name, outcome))) = values.next().await {
        match outcome {
            Ok((arrival, received)) => {
                add(&shared.counts.got_chunks, 1);
                add(&shared.counts.got_bytes, arrival.chunk.len() as u64);
                add(&shared.counts.received_bytes, received);
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

/// What became of a value, and how many bytes it had.
type Fetched = (String, Result<(Arrival, u64), Unusable>);

/// One value; `None` if there is none.
async fn fetch(
    shared: Arc<Shared>,
    name: String,
    mut landing: Landing,
    _permit: OwnedSemaphorePermit,
) -> Option<Fetched> {
    let got = shared.client.get(&name, &mut landing);
    if !shared.call("get", got).await? {
        return None;
    }
    let received = landing.came();
    let outcome = landing.finish().await.map(|arrival| (arrival, received));
    Some((name, outcome))
}

/// A fetch that goes with whoever wanted it.
struct Fetch(JoinHandle<Option<Fetched>>);

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Future for Fetch {
    type Output = Option<Fetched>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // One that panicked has brought nothing.
        Pin::new(&mut self.0)
            .poll(context)
            .map(|joined| joined.ok()?)
    }
}
