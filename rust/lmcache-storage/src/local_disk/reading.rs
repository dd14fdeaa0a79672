//! Reads of many chunks, and how their callers wait for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Arrival;

/// A read of many chunks, answered as far as it goes by its deadline.
pub(super) struct Reading {
    pub(super) arrivals: Mutex<Vec<Option<Arrival>>>,
    /// The first chunk that does not come.
    pub(super) gap: AtomicUsize,
    pub(super) done: Condvar,
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
    fn settle(&self, at: usize, arrival: Option<Arrival>) {
        let mut arrivals = self.arrivals.lock();
        match arrival {
            // At the deadline the places were taken away.
            Some(arrival) => {
                if let Some(place) = arrivals.get_mut(at) {
                    *place = Some(arrival);
                }
            }
            None => {
                self.gap.fetch_min(at, Ordering::Relaxed);
            }
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
