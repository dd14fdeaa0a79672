//! Reads of many chunks, and how their callers wait for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use lmcache_memory::object::ChunkMut;
use parking_lot::{Condvar, Mutex};

use super::Arrival;
use super::faults::{Fault, Trouble};

/// A read of many chunks, answered as far as it goes by its deadline.
pub(super) struct Reading {
    pub(super) arrivals: Mutex<Vec<Option<Arrival>>>,
    /// The first chunk that does not come.
    pub(super) gap: AtomicUsize,
    pub(super) done: Condvar,
    /// Chunks that have their memory: it is given in order, so that no chunk takes the room that an earlier one
    /// needs.
    placed: Mutex<usize>,
    moved: Condvar,
}

/// The answer for one of its chunks: given as this is dropped, come what may.
pub(super) struct Answer {
    pub(super) reading: Arc<Reading>,
    pub(super) at: usize,
    pub(super) arrival: Option<Arrival>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.reading.settle(self.at, self.arrival.take());
    }
}

impl Reading {
    pub(super) fn new(num_chunks: usize) -> Self {
        Self {
            arrivals: Mutex::new((0..num_chunks).map(|_| None).collect()),
            gap: AtomicUsize::new(num_chunks),
            done: Condvar::new(),
            placed: Mutex::new(0),
            moved: Condvar::new(),
        }
    }

    /// What `allocate` gives, once all chunks before this one have their memory; an error if one of them does not
    /// come. Their reads were queued earlier, so each of them is under way or done.
    pub(super) fn place(
        &self,
        at: usize,
        allocate: impl FnOnce() -> Result<ChunkMut, Trouble>,
    ) -> Result<ChunkMut, Trouble> {
        let mut placed = self.placed.lock();
        while *placed < at && at < self.gap.load(Ordering::Relaxed) {
            self.moved.wait(&mut placed);
        }
        if at >= self.gap.load(Ordering::Relaxed) {
            return Err(Trouble::new(
                Fault::Withdrawn,
                "a chunk before it is missing",
            ));
        }
        let chunk = allocate()?;
        *placed = (*placed).max(at + 1);
        drop(placed);
        self.moved.notify_all();
        Ok(chunk)
    }

    /// Nobody waits for what has not come.
    pub(super) fn end(&self) {
        self.lower_gap(0);
    }

    fn lower_gap(&self, to: usize) {
        self.gap.fetch_min(to, Ordering::Relaxed);
        // Behind the lock: whoever looks at the gap under it waits already, or sees it.
        drop(self.placed.lock());
        self.moved.notify_all();
    }

    fn settle(&self, at: usize, arrival: Option<Arrival>) {
        let mut arrivals = self.arrivals.lock();
        match arrival {
            // At the deadline the places were taken away.
            Some(arrival) => {
                if let Some(place) = arrivals.get_mut(at) {
                    *place = Some(arrival);
                }
            }
            None => self.lower_gap(at),
        }
        drop(arrivals);
        self.done.notify_all();
    }

    pub(super) fn wait(&self, due: Option<Instant>) -> Vec<Arrival> {
        let mut arrivals = self.arrivals.lock();
        loop {
            let gap = self.gap.load(Ordering::Relaxed);
            let is_done = arrivals[..gap].iter().all(Option::is_some);
            let late = match due {
                _ if is_done => true,
                Some(due) => self.done.wait_until(&mut arrivals, due).timed_out(),
                None => {
                    self.done.wait(&mut arrivals);
                    false
                }
            };
            if late {
                let gap = self.gap.load(Ordering::Relaxed);
                let mut came = std::mem::take(&mut *arrivals);
                came.truncate(gap);
                return came.into_iter().map_while(|arrival| arrival).collect();
            }
        }
    }
}
