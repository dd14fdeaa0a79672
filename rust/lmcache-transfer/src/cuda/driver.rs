//! A CUDA driver opened at run time, and what we hold of it: a context, streams, events, memory, kernels.
//!
//! Every call is made through [`Current`], which has made the device's primary context (the one torch uses)
//! current for this thread and puts back what was there before. A handle's drop cannot return an error, so the
//! driver's words are kept and the next entry returns them. In a forked child entering is refused and drops do
//! nothing: the handles are the parent's.

use std::any::Any;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::process;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;

use crate::cuda::error::CudaError;
use crate::cuda::kernels::{self, CopyKernel, LaunchShape, PagedCopy, RopeShift, ShiftKernel};
use crate::cuda::symbols::{
    Address, Code, CopyAttributes, EventHandle, GetProcAddress, Handle, LEGACY_STREAM, NOT_READY,
    SOURCE_IN_STREAM_ORDER, StreamHandle, Symbols,
};

/// Names another library than `libcuda.so.1`.
pub const LIBRARY_SWITCH: &str = "LMCACHE_RS_LIBCUDA";
/// Bytes registered in one call: some drivers fail, and all stall, on half a terabyte at once.
pub const PAGE_LOCK_SLICE_BYTES: usize = 64 << 30;

const GET_PROC_ADDRESS: &str = "cuGetProcAddress_v2";
const NON_BLOCKING: c_uint = 1;
const WITHOUT_TIMING: c_uint = 2;
/// Known to every context, and mapped for kernels.
const PORTABLE_AND_MAPPED: c_uint = 3;

/// An opened driver.
pub struct Driver {
    symbols: Symbols,
    path: String,
    /// The process that opened it.
    pid: u32,
    /// The first failure of a drop, for the next entry.
    failed: Mutex<Option<CudaError>>,
    /// Never closed: the driver has threads of its own, and the engine uses it too.
    _library: ManuallyDrop<Library>,
}

impl Driver {
    /// Opens `libcuda.so.1`, or what [`LIBRARY_SWITCH`] names.
    pub fn open() -> Result<Arc<Self>, CudaError> {
        #[expect(
            clippy::disallowed_methods,
            reason = "a switch of the process, not a setting"
        )]
        let named = std::env::var_os(LIBRARY_SWITCH).filter(|path| !path.is_empty());
        Self::open_at(Path::new(&named.unwrap_or_else(|| "libcuda.so.1".into())))
    }

    /// Opens the driver library at `path`.
    pub fn open_at(path: &Path) -> Result<Arc<Self>, CudaError> {
        let shown = path.display().to_string();
        // SAFETY: a CUDA driver's initialisers may run at any time in any thread; that `path` is one is what
        // whoever names it says, as with every library.
        let library = unsafe { Library::new(path) }.map_err(|fault| CudaError::NoDriver {
            path: shown.clone(),
            reason: fault.source().unwrap_or(&fault).to_string(),
        })?;
        let library = ManuallyDrop::new(library);
        // SAFETY: CUDA's own declaration of the function of this name, the same since 12.0.
        let found = unsafe { library.get::<GetProcAddress>(GET_PROC_ADDRESS) };
        let Ok(get_proc_address) = found.map(|symbol| *symbol) else {
            return Err(CudaError::DriverTooOld {
                path: shown,
                symbol: GET_PROC_ADDRESS,
            });
        };
        let find = |symbol: &'static CStr, release: c_int| {
            let mut function = ptr::null_mut();
            let mut status = 0;
            // SAFETY: the name ends in NUL, and both answers go to locals.
            let code = unsafe {
                get_proc_address(
                    symbol.as_ptr(),
                    &mut function,
                    release,
                    LEGACY_STREAM,
                    &mut status,
                )
            };
            if code == 0 && status == 0 {
                function
            } else {
                ptr::null_mut()
            }
        };
        // SAFETY: the driver answers the function of that name and release; the library stays open for good.
        let symbols =
            unsafe { Symbols::resolve(find) }.map_err(|symbol| CudaError::MissingSymbol {
                path: shown.clone(),
                symbol,
            })?;
        let driver = Arc::new(Self {
            symbols,
            path: shown,
            pid: process::id(),
            failed: Mutex::new(None),
            _library: library,
        });
        // SAFETY: no memory is shared with the call.
        driver.check("cuInit", unsafe { (driver.symbols.init)(0) })?;
        Ok(driver)
    }

    /// What was opened.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The newest CUDA it serves, 1000 × major + 10 × minor.
    pub fn version(&self) -> Result<i32, CudaError> {
        self.refuse_fork()?;
        self.ask("cuDriverGetVersion", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols.driver_version)(answer) }
        })
    }

    /// GPUs that it shows to this process.
    pub fn device_count(&self) -> Result<i32, CudaError> {
        self.refuse_fork()?;
        self.ask("cuDeviceGetCount", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols.device_count)(answer) }
        })
    }

    /// Whether many copies can be handed over in one call (CUDA 12.8).
    pub fn has_batched_copies(&self) -> bool {
        self.symbols.copy_batch.is_some()
    }

    fn refuse_fork(&self) -> Result<(), CudaError> {
        match process::id() {
            pid if pid == self.pid => Ok(()),
            used_in => Err(CudaError::Forked {
                made_in: self.pid,
                used_in,
            }),
        }
    }

    fn ask<T: Default>(
        &self,
        call: &'static str,
        question: impl FnOnce(*mut T) -> Code,
    ) -> Result<T, CudaError> {
        let mut answer = T::default();
        self.check(call, question(&mut answer))?;
        Ok(answer)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let words = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = ptr::null();
            // SAFETY: the answer goes to a local.
            let told = unsafe { function(code, &mut text) };
            if told != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: the driver answers a text of its own that ends in NUL and is never freed.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Err(CudaError::Call {
            call,
            code,
            name: words(self.symbols.error_name),
            text: words(self.symbols.error_text),
        })
    }

    /// Keeps a drop's failure for the next entry; the first one is the one that tells.
    fn keep(&self, outcome: Result<(), CudaError>) {
        if let Err(fault) = outcome {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(fault);
        }
    }

    fn take_failure(&self) -> Option<CudaError> {
        self.failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// What tells one GPU from another: measured costs are remembered by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The vendor's name of the model.
    pub name: String,
    /// The piece itself.
    pub uuid: [u8; 16],
    /// Compute capability × 10.
    pub capability: i32,
}

/// A device's primary context, retained; torch's is the same one.
#[derive(Debug)]
pub struct Context {
    driver: Arc<Driver>,
    device: c_int,
    handle: Handle,
}

impl Context {
    /// Retains the primary context of GPU number `device`.
    pub fn primary(driver: &Arc<Driver>, device: i32) -> Result<Arc<Self>, CudaError> {
        let found = driver.device_count()?;
        if !(0..found).contains(&device) {
            return Err(CudaError::NoDevice {
                asked: device,
                found,
            });
        }
        // SAFETY: the answers go to locals.
        let device = driver.ask("cuDeviceGet", |answer| unsafe {
            (driver.symbols.device)(answer, device)
        })?;
        let handle = driver.ask("cuDevicePrimaryCtxRetain", |answer| {
            // SAFETY: as above.
            unsafe { (driver.symbols.context_retain)(answer, device) }
        })?;
        Ok(Arc::new(Self {
            driver: Arc::clone(driver),
            device,
            handle,
        }))
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Which GPU this is.
    pub fn device_facts(&self) -> Result<DeviceFacts, CudaError> {
        let driver = &self.driver;
        driver.refuse_fork()?;
        let mut name = [0u8; 256];
        // SAFETY: a buffer of the length given.
        let code =
            unsafe { (driver.symbols.device_name)(name.as_mut_ptr().cast(), 255, self.device) };
        driver.check("cuDeviceGetName", code)?;
        let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        let attribute = |which| {
            driver.ask("cuDeviceGetAttribute", |answer| {
                // SAFETY: the answer goes to a local.
                unsafe { (driver.symbols.device_attribute)(answer, which, self.device) }
            })
        };
        Ok(DeviceFacts {
            name: name.map(|name| name.into_owned()).unwrap_or_default(),
            uuid: driver.ask("cuDeviceGetUuid", |answer| {
                // SAFETY: the answer goes to a local.
                unsafe { (driver.symbols.device_uuid)(answer, self.device) }
            })?,
            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
            capability: attribute(75)? * 10 + attribute(76)?,
        })
    }

    /// Makes it this thread's context until the guard is dropped; returns what an earlier drop could not.
    pub fn enter(self: &Arc<Self>) -> Result<Current, CudaError> {
        self.driver.refuse_fork()?;
        match self.driver.take_failure() {
            Some(fault) => Err(fault),
            None => self.push(),
        }
    }

    fn push(self: &Arc<Self>) -> Result<Current, CudaError> {
        // SAFETY: the handle is retained as long as `self` is.
        let code = unsafe { (self.driver.symbols.context_push)(self.handle) };
        self.driver.check("cuCtxPushCurrent", code)?;
        Ok(Current {
            context: Arc::clone(self),
            _this_thread: PhantomData,
        })
    }

    /// Waits as a drop must; false in a forked child, and where waiting failed.
    pub(crate) fn at_last(
        self: &Arc<Self>,
        work: impl FnOnce(&Current) -> Result<(), CudaError>,
    ) -> bool {
        if self.driver.refuse_fork().is_err() {
            return false;
        }
        let outcome = self.push().and_then(|current| work(&current));
        let done = outcome.is_ok();
        self.driver.keep(outcome);
        done
    }

    /// What a drop does: nothing in a forked child, and its failure is for the next entry.
    fn release(self: &Arc<Self>, work: impl FnOnce(&Symbols) -> (&'static str, Code)) {
        if self.driver.refuse_fork().is_err() {
            return;
        }
        let outcome = self.push().and_then(|current| {
            let (call, code) = work(&current.context.driver.symbols);
            current.context.driver.check(call, code)
        });
        self.driver.keep(outcome);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.driver.refuse_fork().is_ok() {
            // SAFETY: retained once in `primary`; everything made in it holds it by an `Arc`, so nothing is left.
            let code = unsafe { (self.driver.symbols.context_release)(self.device) };
            self.driver
                .keep(self.driver.check("cuDevicePrimaryCtxRelease", code));
        }
    }
}

/// A stream of ours or of the engine's, to order work by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId(pub usize);

/// The context is current in this thread.
#[derive(Debug)]
pub struct Current {
    context: Arc<Context>,
    /// Which context is current is a thread's own matter.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        let driver = &self.context.driver;
        let mut popped = 0;
        // SAFETY: the answer goes to a local.
        let code = unsafe { (driver.symbols.context_pop)(&mut popped) };
        driver.keep(driver.check("cuCtxPopCurrent", code));
        debug_assert!(
            code != 0 || popped == self.context.handle,
            "another context was on top"
        );
    }
}

impl Current {
    /// What is current.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn driver(&self) -> &Driver {
        &self.context.driver
    }

    fn symbols(&self) -> &Symbols {
        &self.context.driver.symbols
    }

    /// A new stream that runs beside all others, the legacy default stream included.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let handle = self.driver().ask("cuStreamCreateWithPriority", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols().stream_create)(answer, NON_BLOCKING, 0) }
        })?;
        Ok(Stream {
            context: Arc::clone(&self.context),
            handle,
        })
    }

    /// A new event.
    pub fn event(&self) -> Result<Event, CudaError> {
        let handle = self.driver().ask("cuEventCreate", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols().event_create)(answer, WITHOUT_TIMING) }
        })?;
        Ok(Event {
            context: Arc::clone(&self.context),
            handle,
        })
    }

    /// Marks in `event` what `stream` has been given so far.
    pub fn record(&self, event: &Event, stream: StreamId) -> Result<(), CudaError> {
        // SAFETY: a live event; a foreign stream is one by the word of whoever gave its integer, and a wrong one
        // is refused by the driver.
        let code = unsafe { (self.symbols().event_record)(event.handle, stream.0) };
        self.driver().check("cuEventRecord", code)
    }

    /// Lets nothing given to `stream` from now on begin before what `event` has marked is done.
    pub fn wait(&self, stream: StreamId, event: &Event) -> Result<(), CudaError> {
        // SAFETY: as in `record`.
        let code = unsafe { (self.symbols().stream_wait)(stream.0, event.handle, 0) };
        self.driver().check("cuStreamWaitEvent", code)
    }

    /// Whether what `event` has marked is done; its failure is an error.
    pub fn is_done(&self, event: &Event) -> Result<bool, CudaError> {
        // SAFETY: a live event.
        match unsafe { (self.symbols().event_query)(event.handle) } {
            NOT_READY => Ok(false),
            code => self.driver().check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits here until what `event` has marked is done.
    pub fn synchronize(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: a live event.
        let code = unsafe { (self.symbols().event_synchronize)(event.handle) };
        self.driver().check("cuEventSynchronize", code)
    }

    /// Waits here until `stream` has nothing left to do.
    pub fn drain(&self, stream: StreamId) -> Result<(), CudaError> {
        // SAFETY: as in `record`.
        let code = unsafe { (self.symbols().stream_synchronize)(stream.0) };
        self.driver().check("cuStreamSynchronize", code)
    }

    /// Device memory of `len` bytes.
    pub fn device_memory(&self, len: usize) -> Result<DeviceMemory, CudaError> {
        let address = self.driver().ask("cuMemAlloc", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols().allocate)(answer, len) }
        })?;
        Ok(DeviceMemory {
            context: Arc::clone(&self.context),
            address,
            len,
        })
    }

    /// Page-locks host memory in slices of at most `slice_bytes`; whole or not at all.
    ///
    /// # Safety
    /// `len` bytes at `base`, both multiples of a page, must stay mapped as long as `keep_alive` lives.
    pub unsafe fn page_lock(
        &self,
        base: *mut u8,
        len: usize,
        slice_bytes: usize,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<PageLock, CudaError> {
        let mut lock = PageLock {
            context: Arc::clone(&self.context),
            slices: Vec::with_capacity(len.div_ceil(slice_bytes.max(1))),
            _keep_alive: keep_alive,
        };
        for at in (0..len).step_by(slice_bytes.max(1)) {
            let slice = base.wrapping_add(at).cast::<c_void>();
            let bytes = slice_bytes.min(len - at);
            // SAFETY: mapped memory by the caller's promise; `keep_alive` outlives the registration.
            let code = unsafe { (self.symbols().host_register)(slice, bytes, PORTABLE_AND_MAPPED) };
            // What was locked so far goes back as `lock` is dropped.
            self.driver().check("cuMemHostRegister", code)?;
            lock.slices.push(slice as usize);
            let seen_at: Address = self.driver().ask("cuMemHostGetDevicePointer", |answer| {
                // SAFETY: registered just now; the answer goes to a local.
                unsafe { (self.symbols().host_device_address)(answer, slice, 0) }
            })?;
            if seen_at != slice as Address {
                return Err(CudaError::HostAddress {
                    host: slice as u64,
                    device: seen_at,
                });
            }
        }
        Ok(lock)
    }

    /// Has `len` bytes copied, whichever of the two is on the device.
    ///
    /// # Safety
    /// Both ranges must be device memory or page-locked, and neither freed nor, but for work ordered by events,
    /// touched until the copy is done.
    pub unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.symbols().copy)(to, from, len, stream.0) };
        self.driver().check("cuMemcpyAsync", code)
    }

    /// Has many ranges copied by one call: `lens[i]` bytes from `from[i]` to `to[i]`.
    ///
    /// # Safety
    /// As for [`Current::copy`], for each of them; no two targets overlap. The three lists may go at once.
    pub unsafe fn copy_batch(
        &self,
        to: &[u64],
        from: &[u64],
        lens: &[usize],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        assert!(
            to.len() == from.len() && from.len() == lens.len(),
            "lists of one length"
        );
        let Some(copy_batch) = self.symbols().copy_batch else {
            return Err(CudaError::Unsupported {
                symbol: "cuMemcpyBatchAsync",
            });
        };
        if lens.is_empty() {
            return Ok(());
        }
        // Stream order for the sources: before the event that a store waits for, they are still being written.
        let attributes = CopyAttributes {
            source_order: SOURCE_IN_STREAM_ORDER,
            source_hint: [0; 2],
            target_hint: [0; 2],
            flags: 0,
        };
        let (first, mut failed) = (0usize, usize::MAX);
        // SAFETY: lists of `len` entries, one attribute for all from entry 0 on; the rest is the caller's promise.
        let code = unsafe {
            copy_batch(
                to.as_ptr(),
                from.as_ptr(),
                lens.as_ptr(),
                lens.len(),
                &attributes,
                &first,
                1,
                &mut failed,
                stream.0,
            )
        };
        self.driver().check("cuMemcpyBatchAsync", code)
    }

    /// Has `len` bytes at `address` set to `value`.
    ///
    /// # Safety
    /// As for [`Current::copy`].
    pub unsafe fn fill(
        &self,
        address: u64,
        value: u8,
        len: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.symbols().fill)(address, value, len, stream.0) };
        self.driver().check("cuMemsetD8Async", code)
    }

    /// The kernels of this build.
    pub fn kernels(&self) -> Result<Kernels, CudaError> {
        // SAFETY: what nvcc made of `csrc/`, whole.
        unsafe { self.kernels_of(kernels::image()?) }
    }

    /// The kernels of `image`.
    ///
    /// # Safety
    /// It must be a module of `csrc/`, in a form that the driver can find the end of.
    pub unsafe fn kernels_of(&self, image: &[u8]) -> Result<Kernels, CudaError> {
        let module = self.driver().ask("cuModuleLoadData", |answer| {
            // SAFETY: by the caller's promise; the driver copies what it needs.
            unsafe { (self.symbols().module_load)(answer, image.as_ptr().cast()) }
        })?;
        let mut kernels = Kernels {
            context: Arc::clone(&self.context),
            module,
            copies: Vec::with_capacity(CopyKernel::all().count()),
            shifts: Vec::with_capacity(ShiftKernel::all().count()),
        };
        let function = |name: String| {
            let name = CString::new(name).unwrap_or_default();
            self.driver().ask("cuModuleGetFunction", |answer| {
                // SAFETY: a live module and a name that ends in NUL.
                unsafe { (self.symbols().module_function)(answer, module, name.as_ptr()) }
            })
        };
        for kernel in CopyKernel::all() {
            kernels.copies.push(function(kernel.name())?);
        }
        for kernel in ShiftKernel::all() {
            kernels.shifts.push(function(kernel.name())?);
        }
        Ok(kernels)
    }

    /// Launches a copy kernel.
    ///
    /// # Safety
    /// All that `copy` points to, and all that its tables lead to, must be memory the device can reach, in bounds
    /// for every slot not skipped, and untouched, but for work ordered by events, until the launch is done.
    pub unsafe fn launch(
        &self,
        kernels: &Kernels,
        kernel: CopyKernel,
        shape: LaunchShape,
        copy: &PagedCopy,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        let function = kernels.copies[kernel.index()];
        // SAFETY: it takes one `PagedCopy`; the rest is the caller's promise.
        unsafe { self.launch_one(function, shape, ptr::from_ref(copy).cast(), stream) }
    }

    /// Launches a kernel over stored keys.
    ///
    /// # Safety
    /// All that `shift` points to must be device memory, in bounds, and untouched, but for work ordered by events,
    /// until the launch is done.
    pub unsafe fn launch_shift(
        &self,
        kernels: &Kernels,
        kernel: ShiftKernel,
        shape: LaunchShape,
        shift: &RopeShift,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        let function = kernels.shifts[kernel.index()];
        // SAFETY: it takes one `RopeShift`; the rest is the caller's promise.
        unsafe { self.launch_one(function, shape, ptr::from_ref(shift).cast(), stream) }
    }

    /// # Safety
    /// `parameter` must be what `function` takes, and all it leads to as the launching functions demand.
    unsafe fn launch_one(
        &self,
        function: Handle,
        shape: LaunchShape,
        parameter: *const c_void,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        let mut parameters = [parameter.cast_mut()];
        let ([x, y, z], [along, across, deep]) = (shape.grid, shape.block);
        // SAFETY: a function of a live module, whose parameter the driver copies before it returns; the rest is
        // the caller's promise.
        let code = unsafe {
            (self.symbols().launch)(
                function,
                x,
                y,
                z,
                along,
                across,
                deep,
                0,
                stream.0,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.driver().check("cuLaunchKernel", code)
    }
}

/// A stream of ours.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: StreamHandle,
}

impl Stream {
    /// To order work by.
    pub fn id(&self) -> StreamId {
        StreamId(self.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: ours alone; the driver lets what is under way come to its end.
        let destroy = |symbols: &Symbols| unsafe { (symbols.stream_destroy)(self.handle) };
        self.context
            .release(|symbols| ("cuStreamDestroy", destroy(symbols)));
    }
}

/// A mark in a stream's work.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: EventHandle,
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours alone; waits already handed over stay in force.
        let destroy = |symbols: &Symbols| unsafe { (symbols.event_destroy)(self.handle) };
        self.context
            .release(|symbols| ("cuEventDestroy", destroy(symbols)));
    }
}

/// Device memory of ours.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    address: Address,
    len: usize,
}

impl DeviceMemory {
    /// Where it begins, for the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: ours alone; the driver waits for all work before it gives memory back.
        let free = |symbols: &Symbols| unsafe { (symbols.free)(self.address) };
        self.context.release(|symbols| ("cuMemFree", free(symbols)));
    }
}

/// Host memory that the device reaches by itself, at the addresses the host uses.
pub struct PageLock {
    context: Arc<Context>,
    slices: Vec<usize>,
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

impl PageLock {
    /// Pieces it was registered in.
    pub fn num_slices(&self) -> usize {
        self.slices.len()
    }
}

impl fmt::Debug for PageLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageLock")
            .field("num_slices", &self.slices.len())
            .finish_non_exhaustive()
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        for &slice in &self.slices {
            // SAFETY: registered once, by us; the memory is still there, as `_keep_alive` is.
            let unlock =
                |symbols: &Symbols| unsafe { (symbols.host_unregister)(slice as *mut c_void) };
            self.context
                .release(|symbols| ("cuMemHostUnregister", unlock(symbols)));
        }
    }
}

/// The kernels, loaded into a context.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    module: Handle,
    copies: Vec<Handle>,
    shifts: Vec<Handle>,
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: ours alone; launches have come to their end by the promise made for each.
        let unload = |symbols: &Symbols| unsafe { (symbols.module_unload)(self.module) };
        self.context
            .release(|symbols| ("cuModuleUnload", unload(symbols)));
    }
}
