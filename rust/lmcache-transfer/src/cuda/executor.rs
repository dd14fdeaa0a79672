//! Copies between an engine's cache on a GPU and stored chunks in page-locked memory, a layer at a time.
//!
//! Two streams of ours, one for stores and one for loads, are ordered against the engine's by events alone: a
//! store's layer waits for what the engine has been given so far, the engine waits for a load's layer before it
//! reads it, and blocks go back to the engine behind the event that ends the job ([`Ticket::fence`]). A job owns
//! its chunks until that event: nothing is evicted, published or reused under a copy.
//!
//! [`DeviceJob::layer`] neither allocates nor waits: all that can be known before is made in `begin`.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use lmcache_core::layout::PagedLayout;

use crate::cuda::costs::{Costs, Identity, Learned};
use crate::cuda::current::Current;
use crate::cuda::driver::Context;
use crate::cuda::error::CudaError;
use crate::cuda::handles::{Kernels, Stream, StreamId};
pub use crate::cuda::job::{ChunkMemory, DeviceJob, Ticket};
use crate::cuda::kernels::Direction;
use crate::cuda::measure;
use crate::cuda::staged::{STAGING_BYTES, Staging};
use crate::cuda::tables::Tables;

/// How bytes are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPath {
    /// By the copy engines, all runs of a layer in one call where the driver has one for that; for long runs.
    Engine,
    /// By the copy engines, a call a run; for very few.
    Single,
    /// By a kernel that reads or writes page-locked memory itself; for many short ones.
    Kernel,
    /// By a kernel into or out of a buffer on the device, and the copy engines between that and page-locked
    /// memory; for many short runs over a link that kernels are slow on.
    Staged,
}

impl CopyPath {
    /// All of them; of two that cost the same, the one that leaves the multiprocessors alone comes first.
    pub const ALL: [Self; 4] = [Self::Engine, Self::Single, Self::Kernel, Self::Staged];

    /// Where nothing has been measured: a kernel from 64 runs of less than 28 KiB on.
    pub fn unmeasured(runs: usize, bytes: usize) -> Self {
        if runs >= 64 && bytes / runs < 28 << 10 {
            Self::Kernel
        } else {
            Self::Engine
        }
    }

    /// Its name in banners, statistics and remembered costs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Single => "single",
            Self::Kernel => "kernel",
            Self::Staged => "staged",
        }
    }

    /// Whether it launches a kernel.
    pub fn needs_kernels(self) -> bool {
        matches!(self, Self::Kernel | Self::Staged)
    }
}

/// The streams, kernels, tables and costs of one GPU.
#[derive(Debug)]
pub struct Executor {
    store: Stream,
    load: Stream,
    pub(super) kernels: Option<Kernels>,
    /// Why there are none, where this build's were to be loaded.
    without_kernels: Option<CudaError>,
    store_staging: Staging,
    load_staging: Staging,
    /// Tables that no job uses at present.
    idle: Mutex<Vec<Tables>>,
    costs: OnceLock<Costs>,
    pub(super) context: Arc<Context>,
}

impl Executor {
    /// Streams of its own, and the kernels of this build; where it has none, or the driver is too old for them,
    /// everything goes by the copy engines and [`Executor::without_kernels`] says why.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        let current = context.enter()?;
        Self::loading(&current, current.kernels())
    }

    /// The same with what came of loading the kernels elsewhere.
    pub fn loading(
        current: &Current,
        kernels: Result<Kernels, CudaError>,
    ) -> Result<Arc<Self>, CudaError> {
        match kernels {
            Ok(kernels) => Self::made(current, Some(kernels), None, STAGING_BYTES),
            Err(why @ (CudaError::NoKernels { .. } | CudaError::KernelsRefused { .. })) => {
                Self::made(current, None, Some(why), STAGING_BYTES)
            }
            Err(fault) => Err(fault),
        }
    }

    /// The same with kernels that are already loaded, or with none.
    pub fn with_kernels(
        current: &Current,
        kernels: Option<Kernels>,
    ) -> Result<Arc<Self>, CudaError> {
        Self::made(current, kernels, None, STAGING_BYTES)
    }

    /// The same with at most so much device memory a direction to stage in; 0 never stages.
    pub fn with_staging(
        current: &Current,
        kernels: Option<Kernels>,
        staging_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        Self::made(current, kernels, None, staging_bytes)
    }

    fn made(
        current: &Current,
        kernels: Option<Kernels>,
        without_kernels: Option<CudaError>,
        staging_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            store: current.stream()?,
            load: current.stream()?,
            kernels,
            without_kernels,
            store_staging: Staging::new(staging_bytes),
            load_staging: Staging::new(staging_bytes),
            idle: Mutex::new(Vec::new()),
            costs: OnceLock::new(),
            context: Arc::clone(current.context()),
        }))
    }

    /// Why only the copy engines move bytes: one notice for whoever starts the engine.
    pub fn without_kernels(&self) -> Option<&CudaError> {
        self.without_kernels.as_ref()
    }

    /// The stream that a direction's copies are given to.
    pub fn stream(&self, direction: Direction) -> StreamId {
        match direction {
            Direction::Gather => self.store.id(),
            Direction::Scatter => self.load.id(),
        }
    }

    /// Learns what each way costs on this GPU: from the file in `folder` that an earlier process left, or by
    /// timing them for about as long as `limit` says, and leaves a file. Jobs that have begun keep their way.
    ///
    /// For the start, before the engine has work: timing shares the link with whatever else uses it. On an error,
    /// and where time ran out, the rule of thumb stays.
    pub fn learn(&self, folder: Option<&Path>, limit: Duration) -> Result<Learned, CudaError> {
        if self.costs.get().is_some() {
            return Ok(Learned::Remembered);
        }
        let identity = Identity {
            uuid: self.context.device_facts()?.uuid,
            driver: self.context.driver().version()?,
            kernels: self.kernels.is_some(),
        };
        if let Some(costs) = folder.and_then(|folder| Costs::read(folder, &identity)) {
            self.costs.get_or_init(|| costs);
            return Ok(Learned::Remembered);
        }
        let Some(costs) = measure::costs(self, limit)? else {
            return Ok(Learned::OutOfTime);
        };
        let costs = self.costs.get_or_init(|| costs);
        let kept = folder.map(|folder| costs.write(folder, &identity));
        Ok(Learned::Measured {
            unsaved: kept.and_then(Result::err).map(|fault| fault.to_string()),
        })
    }

    /// Takes over what was learnt of this very GPU before, unless something is known.
    pub fn adopt(&self, costs: Costs) {
        self.costs.get_or_init(|| costs);
    }

    /// What each way costs here, once it has been learnt.
    pub fn costs(&self) -> Option<&Costs> {
        self.costs.get()
    }

    /// The way for `runs` runs of `bytes` bytes together: by what has been learnt, else by the rule of thumb.
    pub fn choose(&self, direction: Direction, runs: usize, bytes: usize) -> CopyPath {
        match self.costs.get() {
            Some(costs) => {
                let is_refused = self.staging(direction).is_refused();
                let offered = |path| path != CopyPath::Staged || !is_refused;
                costs.table(direction).choose_among(runs, bytes, offered)
            }
            None => CopyPath::unmeasured(runs, bytes),
        }
    }

    pub(super) fn staging(&self, direction: Direction) -> &Staging {
        match direction {
            Direction::Gather => &self.store_staging,
            Direction::Scatter => &self.load_staging,
        }
    }

    /// Tables with room for `words`, used before or new.
    pub(super) fn tables(&self, current: &Current, words: usize) -> Result<Tables, CudaError> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = idle.iter().position(|tables| tables.len() >= words);
        if let Some(found) = fitting {
            return Ok(idle.swap_remove(found));
        }
        drop(idle);
        Tables::new(current, words)
    }

    pub(super) fn give_back(&self, tables: Option<Tables>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(tables);
    }
}

/// An engine's paged KV cache in device memory: one base address a layer, one layout for all.
pub struct DeviceCache {
    pub(super) bases: Vec<u64>,
    pub(super) layout: PagedLayout,
    pub(super) num_blocks: usize,
    _keep_alive: Box<dyn Any + Send + Sync>,
}

impl DeviceCache {
    /// Registers `layers` (device address, bytes) of `num_blocks` blocks each.
    ///
    /// # Safety
    /// Each address must be valid device memory of its bytes until `keep_alive` is dropped.
    pub unsafe fn new(
        layers: &[(u64, usize)],
        layout: PagedLayout,
        num_blocks: usize,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        for &(_, len) in layers {
            layout.validate(num_blocks, len)?;
        }
        Ok(Self {
            bases: layers.iter().map(|&(address, _)| address).collect(),
            layout,
            num_blocks,
            _keep_alive: keep_alive,
        })
    }

    /// Registered layers.
    pub fn num_layers(&self) -> usize {
        self.bases.len()
    }
}

impl fmt::Debug for DeviceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCache")
            .field("num_layers", &self.bases.len())
            .field("num_blocks", &self.num_blocks)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
