//! A GPU as a process uses it: one driver, one executor, the pools it reaches, and what is under way.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lmcache_memory::mapped::Mapped;

use crate::cuda::current::{Current, PAGE_LOCK_SLICE_BYTES};
use crate::cuda::driver::{Context, DeviceFacts, Driver};
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, Executor};
use crate::cuda::flights::Flights;
use crate::cuda::handles::{PageLock, StreamId};
use crate::cuda::kernels::{self, Direction};

/// How a pool's memory lies for the GPUs of this process.
#[derive(Debug)]
pub enum PoolLock {
    /// Page-locked: copy engines and kernels reach it by themselves.
    Locked(PageLock),
    /// The driver refused. Only the copy engines move its bytes, through buffers of the driver's own, and the calls
    /// that ask for it may wait.
    Pageable(CudaError),
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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Opens GPU number `ordinal`; whoever asks again while somebody has it gets the same one.
    ///
    /// A build without kernels is an error here, although copy engines could do without: token by token they are
    /// slower than computing.
    pub fn open(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        static OPEN: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());
        kernels::image()?;
        let driver = Driver::open()?;
        let mut open = lock(&OPEN);
        open.retain(|device| device.strong_count() > 0);
        let is_asked_for = |device: &Arc<Self>| {
            device.ordinal == ordinal && device.context().driver().path() == driver.path()
        };
        if let Some(device) = open.iter().filter_map(Weak::upgrade).find(is_asked_for) {
            device.context().driver().refuse_fork()?;
            return Ok(device);
        }
        let context = Context::primary(&driver, ordinal)?;
        let device = Arc::new(Self {
            ordinal,
            facts: context.device_facts()?,
            driver_version: driver.version()?,
            executor: Executor::new(&context)?,
            stores: Flights::default(),
            loads: Flights::default(),
            forced: Mutex::new(None),
            counts: Mutex::default(),
        });
        open.push(Arc::downgrade(&device));
        Ok(device)
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

    /// Whether kernels reach the pool.
    pub fn is_reached(&self, pool: &Mapped) -> bool {
        matches!(self.lock_pool(pool), PoolLock::Locked(_))
    }

    /// Makes every copy from now on take this way where it can; for measurements and tests.
    pub fn force_path(&self, path: Option<CopyPath>) {
        *lock(&self.forced) = path;
    }

    /// The way for `runs` runs of `bytes` bytes together, between the device and memory that kernels reach or not.
    pub fn choose(
        &self,
        direction: Direction,
        is_reached: bool,
        runs: usize,
        bytes: usize,
    ) -> CopyPath {
        if !is_reached {
            return CopyPath::Engine;
        }
        let forced = *lock(&self.forced);
        forced.unwrap_or_else(|| self.executor.choose(direction, runs, bytes))
    }

    pub(super) fn count(&self, path: CopyPath) {
        *lock(&self.counts).entry(path.name()).or_default() += 1;
    }

    /// Copies that were begun, by the way they took.
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
        match marked {
            Ok(event) => self.flights(direction).add(move || {
                context.at_last(|current| current.synchronize(&event));
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
        self.enter()?.drain(self.executor.stream(direction))
    }

    /// Waits here for everything that a stream of the engine's has been given.
    pub fn drain_engine(&self, engine: StreamId) -> Result<(), CudaError> {
        self.enter()?.drain(engine)
    }
}
