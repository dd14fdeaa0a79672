//! Copies in host memory. All unsafe code that touches an engine's KV on the host is in this folder.

use std::any::Any;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use lmcache_core::layout::{CopyPlan, PagedLayout};

use crate::error::TransferError;
use crate::layerwise;
use pool::Pool;
use tuning::Tuning;
use walk::Style;

mod pool;
mod tuning;
mod walk;

/// An engine's paged KV cache in host memory: one base address a layer, one layout for all.
///
/// Holds whatever keeps the memory alive (the engine's tensors), so that addresses stay valid as long as
/// the value does.
pub struct PagedCache {
    bases: Vec<*mut u8>,
    layout: PagedLayout,
    num_blocks: usize,
    tuning: Tuning,
    /// Starts with the first copy that is large enough.
    pool: OnceLock<Pool>,
    _keep_alive: Box<dyn Any + Send + Sync>,
}

// SAFETY: the addresses point to memory that `_keep_alive` owns. The engine promises (vLLM's connector
// contract; the library API's documentation) that it neither reads the blocks a load writes nor writes the
// blocks a save reads while the call runs, so access from another thread races with nobody.
unsafe impl Send for PagedCache {}
// SAFETY: as above; `&PagedCache` gives out no reference into the memory.
unsafe impl Sync for PagedCache {}

impl PagedCache {
    /// Registers `layers` (address, bytes) of `num_blocks` blocks each.
    ///
    /// # Safety
    /// Each address must be valid for reads and writes of its bytes until `keep_alive` is dropped, and the
    /// engine must leave the blocks named in a copy alone while the copy runs.
    pub unsafe fn new(
        layers: &[(usize, usize)],
        layout: PagedLayout,
        num_blocks: usize,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, TransferError> {
        if layers.is_empty() {
            return Err(TransferError::NoLayers);
        }
        for (layer, &(address, len)) in layers.iter().enumerate() {
            if address == 0 {
                return Err(TransferError::NullLayer { layer });
            }
            layout.validate(num_blocks, len)?;
        }
        let bases = layers
            .iter()
            .map(|&(address, _)| address as *mut u8)
            .collect();
        Ok(Self {
            bases,
            layout,
            num_blocks,
            tuning: Tuning::measured(),
            pool: OnceLock::new(),
            _keep_alive: keep_alive,
        })
    }

    /// Lets a copy use at most `max_threads`, the caller's own included; unset: four, or as many processors as
    /// the caller may use, if these are fewer.
    pub fn with_max_threads(mut self, max_threads: usize) -> Self {
        self.tuning.max_threads = max_threads;
        self
    }

    /// Threads that a copy may use, the caller's own included.
    pub fn max_threads(&self) -> usize {
        self.tuning.max_threads
    }

    #[cfg(test)]
    fn with_tuning(self, tuning: Tuning) -> Self {
        Self { tuning, ..self }
    }

    /// How each layer lies in memory.
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// Blocks of each layer.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Registered layers.
    pub fn num_layers(&self) -> usize {
        self.bases.len()
    }

    /// Bytes that a chunk of `num_tokens` takes in the stored form, over all layers.
    pub fn chunk_bytes(&self, num_tokens: usize) -> Result<usize, TransferError> {
        layerwise::chunk_bytes((&self.layout, self.num_layers()), num_tokens)
    }

    /// Copies one layer out of the cache; `chunk` is that layer's part of the stored form, `call_bytes` what
    /// the whole call moves.
    pub(crate) fn gather(
        &self,
        layer: usize,
        plan: &CopyPlan,
        chunk: &mut [u8],
        call_bytes: usize,
    ) {
        require_room(plan, chunk.len());
        let style = self.style(call_bytes >= self.tuning.stream_gather_from);
        // SAFETY: the plan was built for this layout and `num_blocks`, and `new` checked that all of
        // these blocks lie inside the layer's memory, which `_keep_alive` keeps; the engine leaves the
        // blocks alone meanwhile. The target has room for the plan and is ours alone, so the two do not overlap.
        unsafe { walk::walk::<true>(plan, self.bases[layer], chunk.as_mut_ptr(), style) };
    }

    /// Copies one layer into the cache; `chunk` is that layer's part of the stored form, `call_bytes` what
    /// the whole call moves.
    pub(crate) fn scatter(&self, layer: usize, plan: &CopyPlan, chunk: &[u8], call_bytes: usize) {
        require_room(plan, chunk.len());
        let style = self.style(call_bytes >= self.tuning.stream_scatter_from);
        // SAFETY: bounds and life as in `gather`. The source is sealed and held by the caller, so it
        // does not change, and a scatter only reads it; no other thread reads or writes these blocks until
        // the call returns.
        unsafe { walk::walk::<false>(plan, self.bases[layer], chunk.as_ptr().cast_mut(), style) };
    }

    /// Does `work` for each of `steps`, which move `call_bytes` together, by as many threads as that is worth.
    pub(crate) fn each<T: Send>(
        &self,
        steps: impl Iterator<Item = T> + Send,
        call_bytes: usize,
        work: impl Fn(T) + Sync,
    ) {
        let num_threads = self.num_threads(call_bytes);
        if num_threads < 2 {
            return steps.for_each(work);
        }
        let pool = self.pool.get_or_init(|| {
            // Counts a control group's share of the processors, too.
            let granted = thread::available_parallelism().map_or(1, usize::from);
            Pool::start(self.tuning.max_threads.min(granted) - 1)
        });
        // Taken one at a time, so that a thread that is held up leaves the rest to the others.
        let steps = Mutex::new(steps);
        let next = || steps.lock().unwrap_or_else(PoisonError::into_inner).next();
        pool.share(num_threads - 1, &|| {
            while let Some(step) = next() {
                work(step);
            }
        });
    }

    /// Threads for a call, the caller's own included.
    fn num_threads(&self, call_bytes: usize) -> usize {
        if call_bytes < self.tuning.shared_from || self.tuning.max_threads < 2 {
            return 1;
        }
        // Asked each time: an engine binds its threads when it likes. One bound to a single processor, as
        // vLLM's are on the CPU, would only be slowed by company there.
        let num_threads = self.tuning.max_threads.min(pool::allowed_cpus());
        if num_threads < 2 || self.tuning.even_if_busy {
            return num_threads;
        }
        // A thread that joins and then waits for a processor, with a piece of the copy in its hands, costs
        // more than it brings (measured on a machine with ten times as many threads as processors: the copy
        // took two to five times as long as alone).
        num_threads.min(1 + pool::idle_cpus())
    }

    fn style(&self, stream: bool) -> Style {
        Style {
            stream,
            wide: self.tuning.wide,
        }
    }
}

/// For a thread whose work nobody is to be kept from his own by; `far` if nobody waits for it either.
pub(crate) fn stand_back(far: bool) {
    pool::stand_back(far);
}

/// Panics if the plan's part of a chunk does not fit into `len` bytes.
fn require_room(plan: &CopyPlan, len: usize) {
    // Stretches are in order of the chunk.
    let needed = plan
        .stretches()
        .last()
        .map_or(0, |last| last.chunk + last.rows * plan.grid().row_bytes());
    assert!(
        needed <= len,
        "a plan of {needed} bytes for a chunk's layer of {len}"
    );
}

impl fmt::Debug for PagedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedCache")
            .field("num_layers", &self.bases.len())
            .field("num_blocks", &self.num_blocks)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
