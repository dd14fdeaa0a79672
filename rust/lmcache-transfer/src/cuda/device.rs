//! A GPU as a process uses it: one driver, one executor, the pools it reaches, and what is under way.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use lmcache_memory::mapped::Mapped;

use crate::cuda::costs::{self, Costs, Learned};
use crate::cuda::current::{Current, PAGE_LOCK_SLICE_BYTES};
use crate::cuda::driver::{Context, DeviceFacts, Driver};
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, Executor};
use crate::cuda::flights::Flights;
use crate::cuda::handles::{PageLock, StreamId};
use crate::cuda::kernels::{self, Direction};
use crate::cuda::planted;
use crate::pipeline::lock;

/// What the start of a GPU may spend on learning what copies cost there; once for a GPU and driver.
const LEARNING: Duration = Duration::from_secs(1);

/// How a pool's memory lies for the GPUs of this process.
#[derive(Debug)]
pub enum PoolLock {
    /// Page-locked: copy engines and kernels reach it by themselves.
    Locked(PageLock),
    /// The driver refused. Only the copy engines move its bytes, through buffers of the driver's own, and the calls
    /// that ask for it may wait.
    Pageable(CudaError),
}

/// How memory lies for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// On the device itself: no link is in between.
    OnDevice,
    /// Page-locked host memory.
    PageLocked,
    /// Other host memory, which only the copy engines move, through buffers of the driver's own.
    Pageable,
}

/// A GPU that this process has opened, though it may have closed it since.
struct Opened {
    driver: String,
    ordinal: i32,
    device: Weak<Device>,
    /// What was learnt then: no process spends the time twice.
    costs: Option<Costs>,
}

/// One GPU, opened.
#[derive(Debug)]
pub struct Device {
    ordinal: i32,
    facts: DeviceFacts,
    driver_version: i32,
    executor: Arc<Executor>,
    /// Stores do not wait for loads to land, nor loads for stores.
    stores: Flights,
    loads: Flights,
    forced: Mutex<Option<CopyPath>>,
    /// Copies by the name of the way they took.
    counts: Mutex<BTreeMap<&'static str, u64>>,
    /// What the operator should read once, and has not been given yet.
    notices: Mutex<Vec<String>>,
}

impl Device {
    /// Opens GPU number `ordinal`; whoever asks again while somebody has it gets the same one.
    ///
    /// A build without kernels is an error here, although copy engines could do without: token by token they are
    /// slower than computing. Kernels that an old driver refuses are a notice, for there the cure is the operator's.
    ///
    /// Whoever opens it first waits until the costs of copies are learnt, a second at most: this is for the start of
    /// an engine, not for a step.
    pub fn open(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
        kernels::image()?;
        let driver = Driver::open()?;
        let mut opened = lock(&OPENED);
        let known = opened
            .iter_mut()
            .find(|known| known.ordinal == ordinal && known.driver == driver.path());
        if let Some(device) = known.as_ref().and_then(|known| known.device.upgrade()) {
            device.context().driver().refuse_fork()?;
            return Ok(device);
        }
        let context = Context::primary(&driver, ordinal)?;
        let device = Arc::new(Self::over(ordinal, Executor::new(&context)?)?);
        match known {
            Some(known) => {
                known.device = Arc::downgrade(&device);
                if let Some(costs) = &known.costs {
                    device.executor.adopt(costs.clone());
                }
            }
            None => {
                device.learn(costs::default_folder().as_deref(), LEARNING);
                opened.push(Opened {
                    driver: driver.path().to_owned(),
                    ordinal,
                    device: Arc::downgrade(&device),
                    costs: device.executor.costs().cloned(),
                });
            }
        }
        Ok(device)
    }

    /// GPU number `ordinal` by an executor of its own, shared with nobody; nothing is learnt.
    pub fn over(ordinal: i32, executor: Arc<Executor>) -> Result<Self, CudaError> {
        let refused = executor.without_kernels().map(CudaError::to_string);
        Ok(Self {
            ordinal,
            facts: executor.context.device_facts()?,
            driver_version: executor.context.driver().version()?,
            executor,
            stores: Flights::default(),
            loads: Flights::default(),
            forced: Mutex::new(None),
            counts: Mutex::new(CopyPath::ALL.map(|path| (path.name(), 0)).into()),
            notices: Mutex::new(refused.into_iter().collect()),
        })
    }

    /// As [`Executor::learn`]; what comes of it, unless all is well, is a notice.
    pub fn learn(&self, folder: Option<&Path>, limit: Duration) {
        let gpu = self.ordinal;
        let notice = match self.executor.learn(folder, limit) {
            Ok(Learned::Remembered | Learned::Measured { unsaved: None }) => return,
            Ok(Learned::Measured { unsaved: Some(why) }) => format!(
                "what copies cost on GPU {gpu} was measured and cannot be remembered ({why}), so each start \
                 measures again; set XDG_CACHE_HOME to a folder that can be written"
            ),
            Ok(Learned::OutOfTime) => format!(
                "GPU {gpu} was too busy for measuring what copies cost within {limit:?}; a rule of thumb chooses \
                 their way until the next start"
            ),
            Err(fault) => format!(
                "what copies cost on GPU {gpu} cannot be measured ({fault}); a rule of thumb chooses their way"
            ),
        };
        lock(&self.notices).push(notice);
    }

    /// What an operator should read, each to be had once.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.notices))
    }

    /// Its number.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Which GPU it is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The newest CUDA that the driver serves, 1000 × major + 10 × minor.
    pub fn driver_version(&self) -> i32 {
        self.driver_version
    }

    /// Its streams and kernels.
    pub fn executor(&self) -> &Arc<Executor> {
        &self.executor
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.executor.context
    }

    pub(super) fn enter(&self) -> Result<Current, CudaError> {
        self.context().enter()
    }

    /// Page-locks a pool, unless that was tried before: once for all GPUs of the process, until the pool's memory
    /// goes.
    pub fn lock_pool<'a>(&self, pool: &'a Mapped) -> &'a PoolLock {
        let said = pool.attach_once(|pool| {
            // Not `enter`: what an earlier drop left says nothing of this pool.
            let context = self.context();
            let pushed = context.driver().refuse_fork().and_then(|()| context.push());
            let locked = pushed.and_then(|current| {
                // SAFETY: what is attached to a pool's memory ends before the memory does.
                unsafe {
                    current.page_lock(
                        pool.base().as_ptr(),
                        pool.len(),
                        PAGE_LOCK_SLICE_BYTES,
                        Arc::new(()),
                    )
                }
            });
            Box::new(match locked {
                Ok(lock) => PoolLock::Locked(lock),
                Err(fault) => PoolLock::Pageable(fault),
            })
        });
        said.downcast_ref().expect("nobody else attaches anything")
    }

    /// How a pool lies, which is page-locked if it can be.
    pub fn reach(&self, pool: &Mapped) -> Reach {
        match self.lock_pool(pool) {
            PoolLock::Locked(_) => Reach::PageLocked,
            PoolLock::Pageable(_) => Reach::Pageable,
        }
    }

    /// Makes every copy from now on take this way where it can; for measurements and tests.
    pub fn force_path(&self, path: Option<CopyPath>) {
        *lock(&self.forced) = path;
    }

    /// The way for `runs` runs of `bytes` bytes together, between the engine's cache and other memory.
    ///
    /// Within the device that is the kernel, whose bandwidth is the device's. Memory that is not page-locked is
    /// moved by the copy engines, a call each: a batch of them would have to wait for each in turn.
    pub fn choose(
        &self,
        direction: Direction,
        reach: Reach,
        runs: usize,
        bytes: usize,
    ) -> CopyPath {
        let forced = *lock(&self.forced);
        match (reach, forced) {
            (Reach::Pageable, _) => CopyPath::Single,
            (Reach::OnDevice, None | Some(CopyPath::Staged)) => CopyPath::Kernel,
            (_, Some(forced)) => forced,
            (Reach::PageLocked, None) => self.executor.choose(direction, runs, bytes),
        }
    }

    pub(super) fn count(&self, path: CopyPath) {
        *lock(&self.counts).entry(path.name()).or_default() += 1;
    }

    /// Copies that were begun, by the way they took; every way is named.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.counts).clone()
    }

    /// Holds `held` until everything that a direction's stream has been given is done.
    pub fn hold(&self, direction: Direction, held: Box<dyn Any + Send>) -> Result<(), CudaError> {
        let stream = self.executor.stream(direction);
        let marked = self.enter().and_then(|current| {
            let event = current.event()?;
            current.record(&event, stream)?;
            Ok(event)
        });
        let context = Arc::clone(self.context());
        let waits = !planted::left_out("release after copies");
        match marked {
            Ok(event) => self.flights(direction).add(move || {
                if waits {
                    context.at_last(|current| current.synchronize(&event));
                }
                drop(held);
            }),
            Err(fault) => {
                context.at_last(|current| current.drain(stream));
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Does `landing`, which waits for copies by itself, when its turn comes; without delaying the caller.
    pub fn land(&self, direction: Direction, landing: impl FnOnce() + Send + 'static) {
        self.flights(direction).add(landing);
    }

    fn flights(&self, direction: Direction) -> &Flights {
        match direction {
            Direction::Gather => &self.stores,
            Direction::Scatter => &self.loads,
        }
    }

    /// Returns once all that copies held has been given back, and all stores that are done are published.
    pub fn settle(&self) {
        self.stores.settle();
        self.loads.settle();
    }

    /// Copies under way that hold something.
    pub fn num_under_way(&self) -> usize {
        self.stores.num_waiting() + self.loads.num_waiting()
    }

    /// Waits here for everything that a direction's stream has been given.
    pub fn drain(&self, direction: Direction) -> Result<(), CudaError> {
        if planted::left_out("host after stream") {
            return Ok(());
        }
        self.enter()?.drain(self.executor.stream(direction))
    }

    /// Waits here for everything that a stream of the engine's has been given.
    pub fn drain_engine(&self, engine: StreamId) -> Result<(), CudaError> {
        self.enter()?.drain(engine)
    }
}
