//! What copies that are under way hold, and the thread that gives it back when they are done.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::cuda::planted;

/// Waits for copies and then does what comes after them.
type Landing = Box<dyn FnOnce() + Send>;

/// Landings, one after another, in a thread that starts with the first of them.
#[derive(Debug, Default)]
pub(super) struct Flights {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Landing>,
    /// Landings handed over, and landings done, since the start.
    added: u64,
    landed: u64,
    is_closed: bool,
}

impl Flights {
    /// Hands a landing over; it is done here where no thread can be had.
    pub(super) fn add(&self, landing: impl FnOnce() + Send + 'static) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let named = thread::Builder::new().name("lmcache-landings".into());
            *thread = named.spawn(move || shared.serve()).ok();
        }
        if thread.is_none() {
            drop(thread);
            return landing();
        }
        let mut state = self.shared.lock();
        state.waiting.push_back(Box::new(landing));
        state.added += 1;
        drop(state);
        self.shared.moved.notify_all();
    }

    /// Returns once everything handed over before is done.
    pub(super) fn settle(&self) {
        if planted::left_out("settle after landings") {
            return;
        }
        let mut state = self.shared.lock();
        let last = state.added;
        while state.landed < last {
            state = self
                .shared
                .moved
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Landings that are not done.
    pub(super) fn num_waiting(&self) -> usize {
        let state = self.shared.lock();
        (state.added - state.landed) as usize
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.moved.notify_all();
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // The last handle may end in a landing, that is in the thread itself.
        if let Some(thread) = thread.filter(|it| it.thread().id() != thread::current().id())
            && !planted::left_out("close after landings")
        {
            // It catches what panics; there is nothing to hear from it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// What the lock guards is whole at any moment.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        loop {
            let mut state = self.lock();
            let landing = loop {
                if let Some(landing) = state.waiting.pop_front() {
                    break landing;
                }
                if state.is_closed {
                    return;
                }
                state = self
                    .moved
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            // A chunk whose landing panics is dropped unpublished as its owner unwinds.
            let _ = catch_unwind(AssertUnwindSafe(landing));
            self.lock().landed += 1;
            self.moved.notify_all();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("num_waiting", &self.lock().waiting.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn landings_are_done_in_order_and_settle_waits_for_all_of_them() {
        let flights = Flights::default();
        let (gate, opened) = mpsc::channel::<()>();
        let done = Arc::new(Mutex::new(Vec::new()));
        let hold = move || opened.recv().expect("opened");
        flights.add(hold);
        for number in 0..3 {
            let done = Arc::clone(&done);
            flights.add(move || done.lock().expect("whole").push(number));
        }
        assert_eq!(flights.num_waiting(), 4);
        assert!(done.lock().expect("whole").is_empty());
        gate.send(()).expect("waits");
        flights.settle();
        assert_eq!(flights.num_waiting(), 0);
        assert_eq!(*done.lock().expect("whole"), [0, 1, 2]);
    }

    #[test]
    fn a_landing_that_panics_ends_alone_and_a_drop_waits_for_the_rest() {
        let count = Arc::new(AtomicUsize::new(0));
        let flights = Flights::default();
        flights.add(|| panic!("planted"));
        for _ in 0..5 {
            let count = Arc::clone(&count);
            flights.add(move || {
                count.fetch_add(1, Ordering::SeqCst);
            });
        }
        drop(flights);
        assert_eq!(count.load(Ordering::SeqCst), 5);
    }
}
