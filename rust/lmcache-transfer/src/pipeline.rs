//! Loads that run ahead of the layers an engine computes.
//!
//! An engine asks for a layer right before it needs it ([`Loads::wait`]). A thread of ours writes layers in
//! order meanwhile, at most [`LOOK_AHEAD`] beyond the one asked for, so that what is read from the store stays
//! warm until it is used and a load that is called off has not been done in vain. Whoever waits writes layers
//! himself that nobody has begun: the thread makes loads overlap with computing, and nothing depends on it. An
//! engine that has one core has no thread of ours beside it: copies are work, and two threads would only wait for
//! each other there.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::flow::Loaded;
use crate::layerwise::LoadJob;

/// Layers that may be written beyond the one asked for.
pub const LOOK_AHEAD: usize = 2;

/// The thread that writes layers ahead. It starts with the first load and ends with the value, or its close.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    bytes_per_second: Option<u64>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Arc<Flow>>,
    thread: Option<JoinHandle<()>>,
    /// Whether a thread has a core to itself; asked once.
    has_room: Option<bool>,
    is_closed: bool,
}

impl Copier {
    /// Starts nothing yet. `bytes_per_second` slows its loads down, whoever writes them: for measurements. A
    /// slow copier waits more than it works, and has its thread on any machine.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            shared: Arc::default(),
            bytes_per_second,
        }
    }

    /// Ends the thread. Loads under way go on without it, and so do later ones. Idempotent.
    pub fn close(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.is_closed = true;
        for flow in queue.waiting.drain(..) {
            flow.advance(|progress| progress.is_unaided = true);
        }
        let thread = queue.thread.take();
        drop(queue);
        self.shared.arrived.notify_all();
        if let Some(thread) = thread {
            // It catches what panics; there is nothing to hear from it.
            let _ = thread.join();
        }
    }

    fn aid(&self, flow: &Arc<Flow>) {
        let mut queue = lock(&self.shared.queue);
        if queue.is_closed {
            return;
        }
        let has_room = *queue.has_room.get_or_insert_with(|| {
            self.bytes_per_second.is_some()
                || thread::available_parallelism().is_ok_and(|cores| cores.get() > 1)
        });
        if queue.thread.is_none() && has_room {
            let shared = Arc::clone(&self.shared);
            let named = thread::Builder::new().name("lmcache-copier".into());
            // Without the thread, whoever waits does the work.
            queue.thread = named.spawn(move || shared.serve()).ok();
        }
        if queue.thread.is_some() {
            queue.waiting.push_back(Arc::clone(flow));
            drop(queue);
            self.shared.arrived.notify_one();
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn serve(&self) {
        while let Some(flow) = self.next() {
            flow.aid();
            lock(&self.queue)
                .waiting
                .retain(|waiting| !Arc::ptr_eq(waiting, &flow));
        }
    }

    fn next(&self) -> Option<Arc<Flow>> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.is_closed {
                return None;
            }
            if let Some(flow) = queue.waiting.front() {
                return Some(Arc::clone(flow));
            }
            queue = sleep(&self.arrived, queue);
        }
    }
}

/// The loads of one step, of which a layer after the other is written.
///
/// Dropping it ends the writing: when the drop returns, no byte is written any more and every lease is back.
#[derive(Debug)]
pub struct Loads(Arc<Flow>);

impl Loads {
    /// Begins to write; without a copier nothing happens until somebody waits.
    pub fn begin(jobs: Vec<LoadJob>, copier: Option<&Copier>) -> Self {
        let num_layers = jobs.iter().map(LoadJob::num_layers).max().unwrap_or(0);
        let rate = copier.and_then(|copier| copier.bytes_per_second);
        let progress = Progress {
            next: 0,
            // As if the first layer were asked for.
            limit: LOOK_AHEAD,
            is_done: vec![false; num_layers].into(),
            is_stopped: false,
            is_unaided: false,
        };
        let flow = Arc::new(Flow {
            bucket: rate.map(Bucket::new),
            jobs: RwLock::new(jobs),
            progress: Mutex::new(progress),
            moved: Condvar::new(),
        });
        if let Some(copier) = copier.filter(|_| num_layers > 0) {
            copier.aid(&flow);
        }
        Self(flow)
    }

    /// Returns once the layer is written. Layers that the loads do not have are written at once.
    pub fn wait(&self, layer: usize) {
        self.0.wait(layer);
    }

    /// Writes what is left and says, job by job, what was loaded; the leases are given back.
    pub fn finish(&self) -> Vec<Loaded> {
        let num_layers = lock(&self.0.progress).is_done.len();
        for layer in 0..num_layers {
            self.0.wait(layer);
        }
        let jobs = self.0.stop();
        jobs.into_iter().map(LoadJob::finish).collect()
    }

    /// Writes nothing any more: as if dropped. Whoever waits goes on.
    pub fn stop(&self) {
        self.0.stop();
    }
}

impl Drop for Loads {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[derive(Debug)]
struct Flow {
    /// Read while a layer is written; taken for good by whoever ends the loads, who thereby waits for writers.
    jobs: RwLock<Vec<LoadJob>>,
    progress: Mutex<Progress>,
    moved: Condvar,
    bucket: Option<Bucket>,
}

#[derive(Debug)]
struct Progress {
    /// The first layer that nobody has begun to write.
    next: usize,
    /// The last layer that may be begun unasked.
    limit: usize,
    is_done: Box<[bool]>,
    is_stopped: bool,
    is_unaided: bool,
}

impl Progress {
    /// The next layer to write, up to `last`; it is the caller's from now on.
    fn claim(&mut self, last: usize) -> Option<usize> {
        let layer = self.next;
        if self.is_stopped || layer > last || layer >= self.is_done.len() {
            return None;
        }
        self.next += 1;
        Some(layer)
    }
}

impl Flow {
    fn advance(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut lock(&self.progress));
        self.moved.notify_all();
    }

    fn wait(&self, layer: usize) {
        self.advance(|progress| progress.limit = progress.limit.max(layer + LOOK_AHEAD));
        let mut progress = lock(&self.progress);
        loop {
            if progress.is_stopped || progress.is_done.get(layer).is_none_or(|&done| done) {
                return;
            }
            if let Some(own) = progress.claim(layer) {
                drop(progress);
                self.write(own);
                progress = lock(&self.progress);
            } else {
                progress = sleep(&self.moved, progress);
            }
        }
    }

    /// The thread's side: writes what may be written until there is nothing left to do.
    fn aid(&self) {
        let mut progress = lock(&self.progress);
        loop {
            let is_over = progress.next >= progress.is_done.len();
            if is_over || progress.is_stopped || progress.is_unaided {
                return;
            }
            let limit = progress.limit;
            if let Some(own) = progress.claim(limit) {
                drop(progress);
                self.write(own);
                progress = lock(&self.progress);
            } else {
                progress = sleep(&self.moved, progress);
            }
        }
    }

    /// Writes one layer. A job that panics misses the layer, and so has loaded nothing in the end; the layer
    /// counts as done, or whoever waits for it would wait for ever.
    fn write(&self, layer: usize) {
        let jobs = self.jobs.read().unwrap_or_else(PoisonError::into_inner);
        for job in jobs.iter() {
            if let Some(bucket) = &self.bucket {
                bucket.pay(job.layer_bytes());
            }
            let _ = catch_unwind(AssertUnwindSafe(|| job.layer(layer)));
        }
        drop(jobs);
        self.advance(|progress| progress.is_done[layer] = true);
    }

    /// Lets nobody begin another layer, waits for those who write one, and takes the jobs.
    fn stop(&self) -> Vec<LoadJob> {
        self.advance(|progress| progress.is_stopped = true);
        // Who claimed a layer and holds no lock yet will find no job.
        let mut jobs = self.jobs.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *jobs)
    }
}

/// Lets so many bytes pass in a second.
#[derive(Debug)]
pub(crate) struct Bucket {
    bytes_per_second: u64,
    free_at: Mutex<Instant>,
}

impl Bucket {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second,
            free_at: Mutex::new(Instant::now()),
        }
    }

    pub(crate) fn pay(&self, bytes: usize) {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let mut free_at = lock(&self.free_at);
        let until = (*free_at).max(Instant::now()) + cost;
        *free_at = until;
        drop(free_at);
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// What the locks guard is whole at any moment, so a panic of another holder leaves nothing half-done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn sleep<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use lmcache_memory::local_cpu::LocalCpu;

    use super::*;
    use crate::layerwise::tests::{Engine, LAYERS, assert_idle, chunks, hashes, pool};

    const BLOCKS: [u32; 4] = [5, 2, 9, 3];

    /// With its thread on any machine; the limit is too high to be felt.
    fn copier() -> Copier {
        Copier::new(Some(1 << 50))
    }

    /// A pool with two chunks, the cache they came from, and another cache with other bytes.
    fn stored() -> (LocalCpu, Engine, Engine) {
        let (source, cpu) = (Engine::new(0), pool());
        crate::flow::store(&cpu, &source.paged, &chunks(&hashes(2), &BLOCKS), 0).expect("stores");
        (cpu, source, Engine::new(0xa5))
    }

    fn job(cpu: &LocalCpu, target: &Engine) -> LoadJob {
        let hashes = hashes(2);
        LoadJob::begin(cpu, &target.paged, "r", &chunks(&hashes, &BLOCKS), 0).expect("begins")
    }

    fn is_written(source: &Engine, target: &Engine, layer: usize) -> bool {
        let block =
            |engine: &Engine, block: u32| engine.layer(layer)[block as usize * 20..][..20].to_vec();
        BLOCKS
            .iter()
            .all(|&id| block(source, id) == block(target, id))
    }

    /// Layers whose writing is over, once the thread has nothing left that it may do.
    fn settled(loads: &Loads) -> usize {
        let flow = &loads.0;
        loop {
            let progress = lock(&flow.progress);
            let num_done = progress.is_done.iter().filter(|&&done| done).count();
            let may_go_on = progress.next < progress.is_done.len().min(progress.limit + 1);
            if num_done == progress.next && !may_go_on {
                return num_done;
            }
            drop(progress);
            thread::yield_now();
        }
    }

    #[test]
    fn the_thread_runs_ahead_and_no_further_than_it_may() {
        let (cpu, source, target) = stored();
        let copier = copier();
        let loads = Loads::begin(vec![job(&cpu, &target)], Some(&copier));
        assert_eq!(settled(&loads), LOOK_AHEAD + 1);
        for layer in 0..LAYERS {
            loads.wait(layer);
            let num_done = settled(&loads);
            assert_eq!(num_done, LAYERS.min(layer + LOOK_AHEAD + 1));
            // Nobody writes now: what is done is there, and what is not is untouched.
            for other in 0..LAYERS {
                assert_eq!(is_written(&source, &target, other), other < num_done);
            }
        }
        assert_eq!(loads.finish()[0].tokens, 16);
        assert_idle(&cpu);
    }

    #[test]
    fn a_layer_waited_for_is_written_with_and_without_the_thread_in_any_order() {
        for (is_aided, order) in [
            (false, [0, 1, 2, 3, 4, 5, 6]),
            (true, [3, 0, 6, 1, 1, 5, 2]),
            (false, [6, 5, 4, 3, 2, 1, 0]),
        ] {
            let (cpu, source, target) = stored();
            let copier = copier();
            let loads = Loads::begin(vec![job(&cpu, &target)], is_aided.then_some(&copier));
            for layer in order {
                loads.wait(layer);
                assert!(lock(&loads.0.progress).is_done[layer]);
            }
            loads.wait(LAYERS + 3);
            let loaded = loads.finish();
            assert!((0..LAYERS).all(|layer| is_written(&source, &target, layer)));
            assert_eq!((loaded.len(), loaded[0].end), (1, 16));
            assert_idle(&cpu);
        }
    }

    #[test]
    fn a_drop_waits_for_the_writer_and_gives_everything_back() {
        for _ in 0..50 {
            let (cpu, source, target) = stored();
            // Slow enough that the thread is met at work.
            let copier = Copier::new(Some(1 << 20));
            let loads = Loads::begin(vec![job(&cpu, &target)], Some(&copier));
            drop(loads);
            assert_idle(&cpu);
            let before: Vec<_> = (0..LAYERS)
                .map(|layer| target.layer(layer).to_vec())
                .collect();
            thread::sleep(Duration::from_micros(200));
            for (layer, bytes) in before.iter().enumerate() {
                assert_eq!(
                    target.layer(layer),
                    &bytes[..],
                    "nothing is written after the drop"
                );
            }
            assert!((LOOK_AHEAD + 1..LAYERS).all(|layer| !is_written(&source, &target, layer)));
        }
    }

    #[test]
    fn loads_go_on_when_the_copier_is_closed_under_them() {
        let (cpu, source, target) = stored();
        let copier = copier();
        let loads = Loads::begin(vec![job(&cpu, &target)], Some(&copier));
        copier.close();
        copier.close();
        let late = Loads::begin(vec![job(&cpu, &target)], Some(&copier));
        assert_eq!(loads.finish()[0].tokens, 16);
        assert_eq!(late.finish()[0].tokens, 16);
        assert!((0..LAYERS).all(|layer| is_written(&source, &target, layer)));
        assert_idle(&cpu);
    }

    #[test]
    fn several_loads_share_the_thread_and_none_waits_for_another() {
        let (cpu, source, target) = stored();
        let copier = copier();
        let begin = || Loads::begin(vec![job(&cpu, &target)], Some(&copier));
        let (stuck, later) = (begin(), begin());
        // The thread stays with the first, which nobody asks for its layers.
        assert_eq!(settled(&stuck), LOOK_AHEAD + 1);
        assert_eq!(later.finish()[0].tokens, 16);
        assert!((0..LAYERS).all(|layer| is_written(&source, &target, layer)));
        drop(stuck);
        assert_idle(&cpu);
    }

    #[test]
    fn no_thread_is_started_for_nothing() {
        let copier = copier();
        assert!(Loads::begin(Vec::new(), Some(&copier)).finish().is_empty());
        assert!(lock(&copier.shared.queue).thread.is_none());
    }
}
