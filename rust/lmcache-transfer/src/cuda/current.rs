//! What can be asked of a driver while a context is current: streams, events, memory, copies, launches.

use std::any::Any;
use std::ffi::{CString, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use crate::cuda::driver::{Context, Driver};
use crate::cuda::error::CudaError;
use crate::cuda::handles::{DeviceMemory, Event, Kernels, PageLock, Stream, StreamId};
use crate::cuda::kernels::{
    self, CopyKernel, KERNEL_BUILD, LaunchShape, PagedCopy, RopeShift, ShiftKernel,
};
use crate::cuda::symbols::{
    Address, CopyAttributes, Handle, MODULE_REFUSED, NOT_READY, SOURCE_IN_STREAM_ORDER, Symbols,
};

/// Bytes registered in one call: some drivers fail, and all stall, on half a terabyte at once.
pub const PAGE_LOCK_SLICE_BYTES: usize = 64 << 30;

const NON_BLOCKING: c_uint = 1;
const WITHOUT_TIMING: c_uint = 2;
/// Known to every context, and mapped for kernels.
const PORTABLE_AND_MAPPED: c_uint = 3;

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
    /// Once it has been pushed.
    pub(super) fn of(context: Arc<Context>) -> Self {
        Self {
            context,
            _this_thread: PhantomData,
        }
    }

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
        self.event_of(WITHOUT_TIMING)
    }

    /// A new event that notes the time.
    pub fn timed_event(&self) -> Result<Event, CudaError> {
        self.event_of(0)
    }

    fn event_of(&self, flags: c_uint) -> Result<Event, CudaError> {
        let handle = self.driver().ask("cuEventCreate", |answer| {
            // SAFETY: the answer goes to a local.
            unsafe { (self.symbols().event_create)(answer, flags) }
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

    /// Milliseconds from one mark to another, both of timed events and done.
    pub fn milliseconds(&self, from: &Event, to: &Event) -> Result<f32, CudaError> {
        self.driver().ask("cuEventElapsedTime", |answer| {
            // SAFETY: live events; the answer goes to a local.
            unsafe { (self.symbols().event_elapsed)(answer, from.handle, to.handle) }
        })
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

    /// The kernels of this build; a driver that is too old for them is [`CudaError::KernelsRefused`].
    pub fn kernels(&self) -> Result<Kernels, CudaError> {
        // SAFETY: what nvcc made of `csrc/`, whole.
        unsafe { self.kernels_of(kernels::image()?) }
    }

    /// The kernels of `image`.
    ///
    /// # Safety
    /// It must be a module of `csrc/`, in a form that the driver can find the end of.
    pub unsafe fn kernels_of(&self, image: &[u8]) -> Result<Kernels, CudaError> {
        let loaded = self.driver().ask("cuModuleLoadData", |answer| {
            // SAFETY: by the caller's promise; the driver copies what it needs.
            unsafe { (self.symbols().module_load)(answer, image.as_ptr().cast()) }
        });
        let mut kernels = Kernels {
            context: Arc::clone(&self.context),
            module: loaded.map_err(|fault| self.refusal(fault))?,
            copies: Vec::with_capacity(CopyKernel::all().count()),
            shifts: Vec::with_capacity(ShiftKernel::all().count()),
        };
        for kernel in CopyKernel::all() {
            let function = self.function(&kernels, kernel.name())?;
            kernels.copies.push(function);
        }
        for kernel in ShiftKernel::all() {
            let function = self.function(&kernels, kernel.name())?;
            kernels.shifts.push(function);
        }
        Ok(kernels)
    }

    fn function(&self, kernels: &Kernels, name: String) -> Result<Handle, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        let found = self.driver().ask("cuModuleGetFunction", |answer| {
            // SAFETY: a live module and a name that ends in NUL.
            unsafe { (self.symbols().module_function)(answer, kernels.module, name.as_ptr()) }
        });
        // A driver that loads lazily looks at the code only now.
        found.map_err(|fault| self.refusal(fault))
    }

    /// A fault of loading that an older driver explains, told as that.
    fn refusal(&self, fault: CudaError) -> CudaError {
        let CudaError::Call { code, ref name, .. } = fault else {
            return fault;
        };
        if !MODULE_REFUSED.contains(&code) {
            return fault;
        }
        let Ok(version) = self.driver().version() else {
            return fault;
        };
        let release = KERNEL_BUILD.nvcc.rsplit_once('.');
        CudaError::KernelsRefused {
            path: self.driver().path().to_owned(),
            found: format!("{}.{}", version / 1000, version % 1000 / 10),
            needed: release.map_or("13.0", |(release, _)| release).to_owned(),
            reason: name.clone(),
        }
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
