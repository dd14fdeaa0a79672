//! The fake CUDA driver of `tests/fake_cuda/`: each one is a library, and a driver, of its own.

use std::ffi::{CString, c_char, c_int, c_long, c_uint};
use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

use super::{compile, root, scratch};

/// What a test holds a fake driver by; `fake_cuda.h` says what each function does.
pub(crate) struct Fake {
    pub(crate) path: PathBuf,
    library: Library,
}

impl Fake {
    pub(crate) fn new() -> Self {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let built = BUILT.get_or_init(|| build("libcuda.so.1", &[]));
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = built.with_file_name(format!("{}-{number}.so", process::id()));
        fs::copy(built, &path).expect("scratch space");
        // SAFETY: built just now from this repository; it starts nothing by itself.
        let library = unsafe { Library::new(&path) }.expect("it loads");
        Self { path, library }
    }

    fn call<T>(&self, name: &str) -> T
    where
        T: Copy,
    {
        // SAFETY: `fake_cuda.h` declares the function as the caller types it.
        *unsafe { self.library.get::<T>(name) }.expect("it is exported")
    }

    pub(crate) fn hide(&self, symbol: &str) {
        let symbol = CString::new(symbol).expect("a name");
        // SAFETY: as declared; the name lives through the call.
        unsafe {
            self.call::<unsafe extern "C" fn(*const c_char)>("fake_cuda_hide")(symbol.as_ptr())
        }
    }

    pub(crate) fn fail(&self, call: &str, after: c_int, code: c_int) {
        let call = CString::new(call).expect("a name");
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        // SAFETY: as declared; the name lives through the call.
        unsafe { self.call::<Fail>("fake_cuda_fail")(call.as_ptr(), after, code) }
    }

    pub(crate) fn break_down(&self, code: c_int) {
        // SAFETY: as declared.
        unsafe { self.call::<unsafe extern "C" fn(c_int)>("fake_cuda_break")(code) }
    }

    pub(crate) fn be_late(&self, most_us: c_uint, seed: u64) {
        type BeLate = unsafe extern "C" fn(c_uint, u64);
        // SAFETY: as declared.
        unsafe { self.call::<BeLate>("fake_cuda_be_late")(most_us, seed) }
    }

    pub(crate) fn hold(&self, stream: usize, held: bool) {
        type Hold = unsafe extern "C" fn(usize, c_int);
        // SAFETY: as declared.
        unsafe { self.call::<Hold>("fake_cuda_hold")(stream, c_int::from(held)) }
    }

    pub(crate) fn limit_registration(&self, len: usize) {
        type Limit = unsafe extern "C" fn(usize);
        // SAFETY: as declared.
        unsafe { self.call::<Limit>("fake_cuda_limit_registration")(len) }
    }

    pub(crate) fn price(&self, way: &str, fixed: f64, a_piece: f64, a_byte: f64) {
        let way = CString::new(way).expect("a name");
        type Price = unsafe extern "C" fn(*const c_char, f64, f64, f64);
        // SAFETY: as declared; the name lives through the call.
        unsafe { self.call::<Price>("fake_cuda_price")(way.as_ptr(), fixed, a_piece, a_byte) }
    }

    pub(crate) fn map_elsewhere(&self, distance: usize) {
        type MapElsewhere = unsafe extern "C" fn(usize);
        // SAFETY: as declared.
        unsafe { self.call::<MapElsewhere>("fake_cuda_map_elsewhere")(distance) }
    }

    pub(crate) fn calls(&self, call: &str) -> c_long {
        let call = CString::new(call).expect("a name");
        type Calls = unsafe extern "C" fn(*const c_char) -> c_long;
        // SAFETY: as declared; the name lives through the call.
        unsafe { self.call::<Calls>("fake_cuda_calls")(call.as_ptr()) }
    }

    pub(crate) fn live(&self) -> c_long {
        // SAFETY: as declared.
        unsafe { self.call::<unsafe extern "C" fn() -> c_long>("fake_cuda_live")() }
    }

    pub(crate) fn depth(&self) -> c_long {
        // SAFETY: as declared.
        unsafe { self.call::<unsafe extern "C" fn() -> c_long>("fake_cuda_depth")() }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // It stays loaded; only the name goes.
        let _ = fs::remove_file(&self.path);
    }
}

/// Compiles the fake driver.
pub(crate) fn build(name: &str, flags: &[&str]) -> PathBuf {
    let sources = [
        root().join("tests/fake_cuda/libcuda.cpp"),
        root().join("csrc/emulation/emulate.cpp"),
    ];
    let folder = scratch("fake_cuda");
    let shared = ["-O1", "-g1", "-fPIC", "-shared", "-fvisibility=hidden"];
    compile(&sources, &folder.join(name), &[&shared, flags].concat())
}
