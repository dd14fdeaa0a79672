//! The functions of a CUDA driver that we call, typed, found one by one at run time.
//!
//! `cuGetProcAddress` answers the newest form of a function that is no newer than the release named, so each
//! signature below is that of its release for good, whatever later drivers add.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;

/// What every function answers; 0 is success.
pub(crate) type Code = c_int;
/// A `CUstream`; the engine's comes as an integer, and 0 is the legacy default stream.
pub(crate) type StreamHandle = usize;
/// A `CUevent`.
pub(crate) type EventHandle = usize;
/// A `CUcontext`, `CUmodule` or `CUfunction`.
pub(crate) type Handle = usize;
/// A `CUdeviceptr`.
pub(crate) type Address = u64;

/// `CUmemcpyAttributes`: how the sources of a batch may be read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyAttributes {
    pub(crate) source_order: c_int,
    pub(crate) source_hint: [c_int; 2],
    pub(crate) target_hint: [c_int; 2],
    pub(crate) flags: c_uint,
}
const _: () = assert!(size_of::<CopyAttributes>() == 24);

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read when the stream comes to them, not before.
pub(crate) const SOURCE_IN_STREAM_ORDER: c_int = 1;
/// `CUDA_ERROR_NOT_READY`: no failure.
pub(crate) const NOT_READY: Code = 600;
/// What a driver answers that cannot make code for this GPU of a module: an invalid image, no binary for the GPU,
/// invalid PTX, no compiler for PTX, PTX of a newer release, and compilation switched off.
pub(crate) const MODULE_REFUSED: [Code; 6] = [200, 209, 218, 221, 222, 223];
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`: stream 0 is the legacy default stream, which torch uses too.
pub(crate) const LEGACY_STREAM: u64 = 1;

/// `cuGetProcAddress_v2`, the one function that is looked up by name in the library.
pub(crate) type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Code;

macro_rules! symbols {
    (
        required { $($field:ident = $symbol:literal @ $release:literal ($($argument:ty),*);)+ }
        optional { $($optional:ident = $optional_symbol:literal @ $optional_release:literal ($($optional_argument:ty),*);)+ }
    ) => {
        /// The driver's functions; those that old drivers lack are `Option`s.
        #[derive(Debug)]
        pub(crate) struct Symbols {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Code,)+
            $(pub(crate) $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> Code>,)+
        }

        impl Symbols {
            /// Asks `find` for each function by name and release; `Err` names the first that is missing.
            ///
            /// # Safety
            /// What `find` answers must be functions of CUDA's signatures for these releases, there for as long as
            /// the value is used.
            pub(crate) unsafe fn resolve(
                find: impl Fn(&'static CStr, c_int) -> *mut c_void,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        let found = find($symbol, $release);
                        if found.is_null() {
                            return Err(name_of($symbol));
                        }
                        // SAFETY: not null, and of this signature by the caller's promise.
                        unsafe {
                            mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Code>(found)
                        }
                    },)+
                    $($optional: {
                        let found = find($optional_symbol, $optional_release);
                        // SAFETY: null is `None`; any other is of this signature by the caller's promise.
                        unsafe {
                            mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($optional_argument),*) -> Code>,
                            >(found)
                        }
                    },)+
                })
            }
        }
    };
}

fn name_of(symbol: &'static CStr) -> &'static str {
    symbol.to_str().unwrap_or("a function")
}

symbols! {
    required {
        init = c"cuInit" @ 2000 (c_uint);
        driver_version = c"cuDriverGetVersion" @ 2020 (*mut c_int);
        error_name = c"cuGetErrorName" @ 6000 (Code, *mut *const c_char);
        error_text = c"cuGetErrorString" @ 6000 (Code, *mut *const c_char);
        device_count = c"cuDeviceGetCount" @ 2000 (*mut c_int);
        device = c"cuDeviceGet" @ 2000 (*mut c_int, c_int);
        device_name = c"cuDeviceGetName" @ 2000 (*mut c_char, c_int, c_int);
        device_uuid = c"cuDeviceGetUuid" @ 11040 (*mut [u8; 16], c_int);
        device_attribute = c"cuDeviceGetAttribute" @ 2000 (*mut c_int, c_int, c_int);
        context_retain = c"cuDevicePrimaryCtxRetain" @ 7000 (*mut Handle, c_int);
        context_release = c"cuDevicePrimaryCtxRelease" @ 11000 (c_int);
        context_push = c"cuCtxPushCurrent" @ 4000 (Handle);
        context_pop = c"cuCtxPopCurrent" @ 4000 (*mut Handle);
        stream_create = c"cuStreamCreateWithPriority" @ 5050 (*mut StreamHandle, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy" @ 4000 (StreamHandle);
        stream_wait = c"cuStreamWaitEvent" @ 3020 (StreamHandle, EventHandle, c_uint);
        stream_synchronize = c"cuStreamSynchronize" @ 2000 (StreamHandle);
        event_create = c"cuEventCreate" @ 2000 (*mut EventHandle, c_uint);
        event_destroy = c"cuEventDestroy" @ 4000 (EventHandle);
        event_record = c"cuEventRecord" @ 2000 (EventHandle, StreamHandle);
        event_query = c"cuEventQuery" @ 2000 (EventHandle);
        event_elapsed = c"cuEventElapsedTime" @ 2000 (*mut f32, EventHandle, EventHandle);
        event_synchronize = c"cuEventSynchronize" @ 2000 (EventHandle);
        host_register = c"cuMemHostRegister" @ 6050 (*mut c_void, usize, c_uint);
        host_unregister = c"cuMemHostUnregister" @ 4000 (*mut c_void);
        host_device_address = c"cuMemHostGetDevicePointer" @ 3020 (*mut Address, *mut c_void, c_uint);
        allocate = c"cuMemAlloc" @ 3020 (*mut Address, usize);
        free = c"cuMemFree" @ 3020 (Address);
        copy = c"cuMemcpyAsync" @ 4000 (Address, Address, usize, StreamHandle);
        fill = c"cuMemsetD8Async" @ 3020 (Address, u8, usize, StreamHandle);
        module_load = c"cuModuleLoadData" @ 2000 (*mut Handle, *const c_void);
        module_unload = c"cuModuleUnload" @ 2000 (Handle);
        module_function = c"cuModuleGetFunction" @ 2000 (*mut Handle, Handle, *const c_char);
        launch = c"cuLaunchKernel" @ 4000 (
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, StreamHandle,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        // CUDA 13 dropped the index of the failed copy; asked for as of 12.8 the driver keeps it.
        copy_batch = c"cuMemcpyBatchAsync" @ 12080 (
            *const Address, *const Address, *const usize, usize, *const CopyAttributes, *const usize, usize,
            *mut usize, StreamHandle
        );
    }
}
