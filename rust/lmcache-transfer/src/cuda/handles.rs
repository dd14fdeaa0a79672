//! What we hold of a driver, each given back as it is dropped: streams, events, memory, kernels.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::cuda::driver::Context;
use crate::cuda::symbols::{Address, EventHandle, Handle, StreamHandle, Symbols};

/// A stream of ours or of the engine's, to order work by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId(pub usize);

/// A stream of ours.
#[derive(Debug)]
pub struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) handle: StreamHandle,
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
    pub(super) context: Arc<Context>,
    pub(super) handle: EventHandle,
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
    pub(super) context: Arc<Context>,
    pub(super) address: Address,
    pub(super) len: usize,
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
    pub(super) context: Arc<Context>,
    pub(super) slices: Vec<usize>,
    pub(super) _keep_alive: Arc<dyn Any + Send + Sync>,
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
    pub(super) context: Arc<Context>,
    pub(super) module: Handle,
    pub(super) copies: Vec<Handle>,
    pub(super) shifts: Vec<Handle>,
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: ours alone; launches have come to their end by the promise made for each.
        let unload = |symbols: &Symbols| unsafe { (symbols.module_unload)(self.module) };
        self.context
            .release(|symbols| ("cuModuleUnload", unload(symbols)));
    }
}
