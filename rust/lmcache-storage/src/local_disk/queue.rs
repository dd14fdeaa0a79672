//! The threads that do the reading and writing, and the two lines before them.
//!
//! Reads (somebody waits) go before puts (nobody does), and puts never take the last thread. Puts are bounded
//! in bytes: what they hold is host memory. A put may wait without holding any, and takes its memory in its
//! turn; of those the number is bounded.

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// Puts that may wait without memory: some hundred bytes each.
pub(crate) const MAX_WAITING: usize = 1 << 16;

/// A place among the puts.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    /// Of memory that it holds; `None` if it holds none.
    bytes: Option<u64>,
}

#[derive(Default)]
struct Lines {
    reads: VecDeque<Job>,
    puts: VecDeque<(Place, Job)>,
    queued_bytes: u64,
    /// Puts that hold no memory and are not begun.
    waiting: usize,
    running_puts: usize,
    /// Puts that are not done, by number.
    unfinished: BTreeSet<u64>,
    next: u64,
    closed: bool,
}

impl Lines {
    fn enter(&mut self, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.queued_bytes += bytes,
            None => self.waiting += 1,
        }
    }

    fn leave(&mut self, place: &Place) {
        match place.bytes {
            Some(bytes) => self.queued_bytes -= bytes,
            None => self.waiting -= 1,
        }
    }
}

/// See the module documentation.
pub(crate) struct Queue {
    lines: Mutex<Lines>,
    work: Condvar,
    done: Condvar,
    max_queued_bytes: u64,
    max_running_puts: usize,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Queue {
    /// Starts `threads` threads, two at least. They end after [`Queue::close`].
    pub(crate) fn start(threads: usize, max_queued_bytes: u64) -> std::io::Result<Arc<Self>> {
        let threads = threads.max(2);
        let queue = Arc::new(Self {
            lines: Mutex::new(Lines::default()),
            work: Condvar::new(),
            done: Condvar::new(),
            max_queued_bytes,
            max_running_puts: threads.div_ceil(2),
        });
        for _ in 0..threads {
            let of_thread = Arc::clone(&queue);
            let named = thread::Builder::new().name("lmcache_rs-disk".into());
            if let Err(error) = named.spawn(move || of_thread.serve()) {
                queue.close(Duration::ZERO);
                return Err(error);
            }
        }
        Ok(queue)
    }

    /// Takes in a read; once closed, drops it.
    pub(crate) fn read(&self, job: Job) {
        let mut lines = self.lines.lock();
        if lines.closed {
            drop(lines);
            return drop(job);
        }
        lines.reads.push_back(job);
        drop(lines);
        self.work.notify_one();
    }

    /// A place for a put that holds so many bytes, or with `None` for one that holds none. `None` if there is no
    /// room, or the queue is closed. It is to be filled by [`Queue::put`].
    pub(crate) fn place(&self, bytes: Option<u64>) -> Option<Place> {
        let mut lines = self.lines.lock();
        let fits = match bytes {
            // One is always let in, however big.
            Some(bytes) => {
                lines.queued_bytes == 0 || lines.queued_bytes + bytes <= self.max_queued_bytes
            }
            None => lines.waiting < MAX_WAITING,
        };
        if lines.closed || !fits {
            return None;
        }
        let number = lines.next;
        lines.next += 1;
        lines.unfinished.insert(number);
        lines.enter(bytes);
        Some(Place { number, bytes })
    }

    /// Takes in a put; once closed, drops it.
    pub(crate) fn put(&self, place: Place, job: Job) {
        let mut lines = self.lines.lock();
        if lines.closed {
            lines.leave(&place);
            lines.unfinished.remove(&place.number);
            drop(lines);
            self.done.notify_all();
            return drop(job);
        }
        lines.puts.push_back((place, job));
        drop(lines);
        self.work.notify_one();
    }

    /// Puts that are not done, their bytes, and how many of them wait without memory.
    pub(crate) fn queued(&self) -> (u64, u64, u64) {
        let lines = self.lines.lock();
        let waiting = lines.waiting as u64;
        (lines.unfinished.len() as u64, lines.queued_bytes, waiting)
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    pub(crate) fn flush(&self, within: Duration) -> bool {
        let mut lines = self.lines.lock();
        let last = lines.next;
        let due = Instant::now().checked_add(within);
        while lines
            .unfinished
            .first()
            .is_some_and(|number| *number < last)
        {
            match due {
                Some(due) => {
                    if self.done.wait_until(&mut lines, due).timed_out() {
                        return lines
                            .unfinished
                            .first()
                            .is_none_or(|number| *number >= last);
                    }
                }
                None => self.done.wait(&mut lines),
            }
        }
        true
    }

    /// Ends the queue: pending puts are done first, as far as there is time, and dropped otherwise.
    pub(crate) fn close(&self, within: Duration) -> bool {
        let in_time = self.flush(within);
        let mut lines = self.lines.lock();
        lines.closed = true;
        let reads = std::mem::take(&mut lines.reads);
        let puts = std::mem::take(&mut lines.puts);
        for (place, _) in &puts {
            lines.unfinished.remove(&place.number);
            lines.leave(place);
        }
        drop(lines);
        drop((reads, puts));
        self.work.notify_all();
        self.done.notify_all();
        in_time
    }

    fn serve(&self) {
        let mut lines = self.lines.lock();
        loop {
            if let Some(job) = lines.reads.pop_front() {
                drop(lines);
                run(job);
                lines = self.lines.lock();
            } else if lines.running_puts < self.max_running_puts
                && let Some((place, job)) = lines.puts.pop_front()
            {
                lines.running_puts += 1;
                if place.bytes.is_none() {
                    lines.leave(&place);
                }
                drop(lines);
                run(job);
                lines = self.lines.lock();
                lines.running_puts -= 1;
                if place.bytes.is_some() {
                    lines.leave(&place);
                }
                lines.unfinished.remove(&place.number);
                self.done.notify_all();
            } else if lines.closed {
                return;
            } else {
                self.work.wait(&mut lines);
            }
        }
    }
}

/// A job that panics takes no thread with it; what it held is dropped.
fn run(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}
