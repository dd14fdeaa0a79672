//! A few threads that help one copy at a time along.
//!
//! A pool belongs to one registered cache and starts with its first large copy. So nothing starts at import,
//! engines share no thread, and a forked child, which may not use its parent's handles, starts its own.

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Moving bytes needs hardly any.
const STACK_BYTES: usize = 256 << 10;

/// Threads that wait for work; they end when the pool is dropped.
#[derive(Debug)]
pub(super) struct Pool {
    workers: Vec<Sender<Arc<Call>>>,
}

/// One piece of work that several threads do together, each until nothing is left of it.
struct Call {
    work: *const (dyn Fn() + Sync),
    progress: Mutex<Progress>,
    left: Condvar,
}

struct Progress {
    /// Whether a thread may still join in.
    open: bool,
    /// Threads that are at work, the caller's own aside.
    inside: usize,
    panic: Option<Box<dyn Any + Send>>,
}

// SAFETY: `work` is `Sync`, so any thread may call it, and is called only while `share` waits for it (see
// `help`); all else is behind the lock.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

impl Pool {
    /// Starts `num_threads`, or as many as the system gives.
    pub(super) fn start(num_threads: usize) -> Self {
        let start = |number| {
            let (sender, calls) = channel::<Arc<Call>>();
            let worker = thread::Builder::new()
                .name(format!("lmcache-copy-{number}"))
                .stack_size(STACK_BYTES);
            let run = move || calls.into_iter().for_each(|call| call.help());
            worker.spawn(run).ok().map(|_| sender)
        };
        Self {
            workers: (0..num_threads).map_while(start).collect(),
        }
    }

    /// Runs `work` on this thread and on up to `helpers` others; returns when all of them have returned.
    ///
    /// A thread that has not begun by the time the caller is through is not waited for, so a busy processor
    /// costs nothing. A panic in any of them goes on in the caller.
    pub(super) fn share(&self, helpers: usize, work: &(dyn Fn() + Sync)) {
        let work: *const (dyn Fn() + Sync + '_) = work;
        // SAFETY: the types differ in the lifetime only. `Call::help` calls `work` only between joining an
        // open call and leaving it, and `Closing` lets nobody join and waits until all have left before this
        // function returns or unwinds; until then the borrow holds.
        let work: *const (dyn Fn() + Sync + 'static) = unsafe { std::mem::transmute(work) };
        let call = Arc::new(Call {
            work,
            progress: Mutex::new(Progress {
                open: true,
                inside: 0,
                panic: None,
            }),
            left: Condvar::new(),
        });
        let closing = Closing(&call);
        for worker in self.workers.iter().take(helpers) {
            // Its receiver lives as long as its sender.
            let _ = worker.send(Arc::clone(&call));
        }
        // SAFETY: the caller's own borrow.
        unsafe { (*work)() };
        drop(closing);
        let panic = call.lock().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Call {
    fn help(&self) {
        {
            let mut progress = self.lock();
            if !progress.open {
                return;
            }
            progress.inside += 1;
        }
        // SAFETY: counted as inside of an open call, so `share` waits and its borrow holds.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { (*self.work)() }));
        let mut progress = self.lock();
        progress.inside -= 1;
        if let Err(panic) = outcome {
            progress.panic = Some(panic);
        }
        self.left.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        // Nothing panics under the lock.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a call: nobody joins any more, and all who did have left.
struct Closing<'a>(&'a Call);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut progress = self.0.lock();
        progress.open = false;
        while progress.inside > 0 {
            let waited = self.0.left.wait(progress);
            progress = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Processors that the calling thread may run on.
pub(super) fn allowed_cpus() -> usize {
    // SAFETY: all-zero is a valid set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: asks about this thread and writes one set, which is ours.
    let outcome = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if outcome != 0 {
        // A machine with more processors than the set has bits.
        return thread::available_parallelism().map_or(1, usize::from);
    }
    // SAFETY: reads the set.
    usize::try_from(unsafe { libc::CPU_COUNT(&set) }).map_or(1, |count| count.max(1))
}

/// How much less of a contended processor a thread gets whose work can wait: about a tenth.
const FAR_BACK: libc::c_int = 10;

/// Lets the calling thread take no processor from another thread when it wakes up; if `far`, nor much of one
/// that others want later on.
///
/// Whoever wakes it is on its way to something more urgent, and on one processor would otherwise wait for it.
pub(super) fn stand_back(far: bool) {
    // SAFETY: all-zero is the only parameter there is for this policy.
    let param: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: is about this thread, and reads one parameter, which is ours. A system that refuses changes
    // nothing but the order of work.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const param) };
    if far {
        // SAFETY: as above; on Linux 0 is this thread alone.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, FAR_BACK) };
    }
}

/// Processors of the machine that nothing runs on now; all that could be where the system does not say.
pub(super) fn idle_cpus() -> usize {
    // SAFETY: reads a number.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    let online = usize::try_from(online).unwrap_or(usize::MAX);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    online.saturating_sub(num_runnable(&load).unwrap_or(0))
}

/// Threads that run or want to, this one included: the fourth word of /proc/loadavg, `3/812`.
fn num_runnable(load: &str) -> Option<usize> {
    let (runnable, _) = load.split_whitespace().nth(3)?.split_once('/')?;
    runnable.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn threads_that_want_to_run_are_read_from_the_load() {
        assert_eq!(num_runnable("20.35 18.33 12.65 3/812 12345\n"), Some(3));
        assert_eq!(num_runnable("20.35 18.33 12.65"), None);
    }

    #[test]
    fn work_is_over_when_share_returns() {
        let pool = Pool::start(3);
        for round in 0..2000 {
            let items: Vec<usize> = (0..round % 70).collect();
            let (taken, done) = (Mutex::new(items.iter()), AtomicUsize::new(0));
            pool.share(round % 4, &|| {
                while let Some(item) = { taken.lock().expect("no panic").next() } {
                    done.fetch_add(item + 1, Ordering::Relaxed);
                }
            });
            let expected = items.len() * (items.len() + 1) / 2;
            assert_eq!(done.load(Ordering::Relaxed), expected);
        }
    }

    #[test]
    fn a_busy_thread_is_not_waited_for() {
        let pool = Pool::start(1);
        let (hold, held) = channel::<()>();
        let (held, entered) = (Mutex::new(held), AtomicUsize::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                pool.share(1, &|| {
                    entered.fetch_add(1, Ordering::SeqCst);
                    // Ends for both when `hold` is dropped.
                    let _ = held.lock().expect("no panic").recv();
                });
            });
            while entered.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
            let alone = AtomicUsize::new(0);
            pool.share(1, &|| {
                alone.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(alone.load(Ordering::SeqCst), 1);
            drop(hold);
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::start(1);
        let (caller, entered) = (thread::current().id(), AtomicUsize::new(0));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.share(1, &|| {
                entered.fetch_add(1, Ordering::SeqCst);
                while entered.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
                assert_eq!(thread::current().id(), caller, "in the helper");
            });
        }));
        assert!(outcome.is_err());
        let both = AtomicUsize::new(0);
        pool.share(1, &|| {
            both.fetch_add(1, Ordering::SeqCst);
            while both.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
        });
        assert_eq!(both.load(Ordering::SeqCst), 2);
    }
}
