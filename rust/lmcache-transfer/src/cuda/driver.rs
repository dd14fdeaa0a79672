//! A CUDA driver opened at run time, and the contexts of its devices.
//!
//! Every call is made through [`Current`], which has made the device's primary context (the one torch uses)
//! current for this thread and puts back what was there before. A handle's drop cannot return an error, so the
//! driver's words are kept and the next entry returns them. In a forked child entering is refused and drops do
//! nothing: the handles are the parent's.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::process;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::Library;

use crate::cuda::current::Current;
use crate::cuda::error::CudaError;
use crate::cuda::symbols::{Code, GetProcAddress, Handle, LEGACY_STREAM, Symbols};

/// Names another library than `libcuda.so.1`.
pub const LIBRARY_SWITCH: &str = "LMCACHE_RS_LIBCUDA";

const GET_PROC_ADDRESS: &str = "cuGetProcAddress_v2";

/// An opened driver.
pub struct Driver {
    pub(super) symbols: Symbols,
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

    pub(super) fn refuse_fork(&self) -> Result<(), CudaError> {
        match process::id() {
            pid if pid == self.pid => Ok(()),
            used_in => Err(CudaError::Forked {
                made_in: self.pid,
                used_in,
            }),
        }
    }

    pub(super) fn ask<T: Default>(
        &self,
        call: &'static str,
        question: impl FnOnce(*mut T) -> Code,
    ) -> Result<T, CudaError> {
        let mut answer = T::default();
        self.check(call, question(&mut answer))?;
        Ok(answer)
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
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
    pub(super) fn keep(&self, outcome: Result<(), CudaError>) {
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
    pub(super) driver: Arc<Driver>,
    pub(super) device: c_int,
    pub(super) handle: Handle,
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

    pub(super) fn push(self: &Arc<Self>) -> Result<Current, CudaError> {
        // SAFETY: the handle is retained as long as `self` is.
        let code = unsafe { (self.driver.symbols.context_push)(self.handle) };
        self.driver.check("cuCtxPushCurrent", code)?;
        Ok(Current::of(Arc::clone(self)))
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
    pub(super) fn release(self: &Arc<Self>, work: impl FnOnce(&Symbols) -> (&'static str, Code)) {
        if self.driver.refuse_fork().is_err() {
            return;
        }
        let outcome = self.push().and_then(|current| {
            let (call, code) = work(&current.context().driver.symbols);
            current.context().driver.check(call, code)
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
