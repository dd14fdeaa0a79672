//! The threads that do the reading and writing, and the two lines before them.
//!
//! Reads (somebody waits) go before puts (nobody does), and puts never take the last thread. Puts are bounded
//! in bytes: what they hold is host memory.

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Lines {
    reads: VecDeque<Job>,
    puts: VecDeque<(u64, u64, Job)>,
    queued_bytes: u64,
    running_puts: usize,
    /// Puts that are not done, by number.
    unfinished: BTreeSet<u64>,
    next: u64,
    closed: bool,
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

    /// Takes in a put of so many bytes; gives the job back if there is no room or the queue is closed.
    pub(crate) fn put(&self, bytes: u64, job: Job) -> Result<(), Job> {
        let mut lines = self.lines.lock();
        // One is always let in, however big.
        let fits = lines.queued_bytes == 0 || lines.queued_bytes + bytes <= self.max_queued_bytes;
        if lines.closed || !fits {
            drop(lines);
            return Err(job);
        }
        let number = lines.next;
        lines.next += 1;
        lines.queued_bytes += bytes;
        lines.unfinished.insert(number);
        lines.puts.push_back((number, bytes, job));
        drop(lines);
        self.work.notify_one();
        Ok(())
    }

    /// Puts that are not done, and their bytes.
    pub(crate) fn queued(&self) -> (u64, u64) {
        let lines = self.lines.lock();
        (lines.unfinished.len() as u64, lines.queued_bytes)
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
        for (number, bytes, _) in &puts {
            lines.unfinished.remove(number);
            lines.queued_bytes -= bytes;
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
                && let Some((number, bytes, job)) = lines.puts.pop_front()
            {
                lines.running_puts += 1;
                drop(lines);
                run(job);
                lines = self.lines.lock();
                lines.running_puts -= 1;
                lines.queued_bytes -= bytes;
                lines.unfinished.remove(&number);
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
