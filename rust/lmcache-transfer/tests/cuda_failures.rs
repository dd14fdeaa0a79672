//! Everything that a driver can lack or refuse: it is named, what was made before it is given back, and what a drop
//! cannot return the next entry does.

mod common;

use std::any::Any;
use std::sync::Arc;

use common::fake::Fake;
use lmcache_transfer::cuda::driver::{Context, Driver};
use lmcache_transfer::cuda::error::CudaError;
use lmcache_transfer::cuda::handles::{DeviceMemory, StreamId};
use lmcache_transfer::cuda::kernels::{LaunchShape, RopeShift, ShiftKernel};

const OUT_OF_MEMORY: i32 = 2;
/// The engine's stream; an application that made none uses the legacy default one.
const ENGINE: StreamId = StreamId(0);

fn context(fake: &Fake) -> Arc<Context> {
    let driver = Driver::open_at(&fake.path).expect("the fake opens");
    Context::primary(&driver, 0).expect("it has a GPU")
}

fn call_of(fault: &CudaError) -> &'static str {
    match fault {
        CudaError::Call { call, .. } => call,
        other => panic!("a failed call expected, found: {other}"),
    }
}

fn bytes_of(memory: &DeviceMemory) -> Vec<u8> {
    // SAFETY: the fake's device memory is the host's; the caller has waited for what writes it.
    unsafe { std::slice::from_raw_parts(memory.address() as *const u8, memory.len()) }.to_vec()
}

/// All that a driver must have.
const REQUIRED: [&str; 34] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventSynchronize",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

#[test]
fn a_missing_function_is_named() {
    for symbol in REQUIRED {
        let fake = Fake::new();
        fake.hide(symbol);
        let fault = Driver::open_at(&fake.path).expect_err("incomplete");
        assert!(
            matches!(fault, CudaError::MissingSymbol { symbol: named, .. } if named == symbol),
            "{symbol}: {fault}"
        );
    }
}

#[test]
fn errors_carry_the_drivers_name_and_text() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    fake.fail("cuMemAlloc", 0, OUT_OF_MEMORY);
    let fault = current.device_memory(1 << 20).expect_err("planted");
    let told = fault.to_string();
    assert!(
        told.starts_with("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2), as planted"),
        "{told}"
    );
    fake.fail("cuMemAlloc", 0, 12_345);
    let told = current
        .device_memory(1 << 20)
        .expect_err("planted")
        .to_string();
    assert_eq!(told, "cuMemAlloc failed: unknown (12345), unknown");
    assert!(current.device_memory(1 << 20).is_ok());
}

/// Everything once: memory, streams, events, page-lock, kernels, copies, launches, facts.
fn everything(fake: &Fake) -> Result<(), CudaError> {
    let driver = Driver::open_at(&fake.path)?;
    driver.version()?;
    let context = Context::primary(&driver, 0)?;
    context.device_facts()?;
    let host = Arc::new(vec![7u8; 64]);
    let current = context.enter()?;
    let (stream, event) = (current.stream()?, current.event()?);
    let device = current.device_memory(64)?;
    // SAFETY: the vector is kept alive by the lock, and nobody writes to it.
    let lock = unsafe { current.page_lock(host.as_ptr().cast_mut(), 64, 16, host.clone()) }?;
    assert_eq!(lock.num_slices(), 4);
    // SAFETY: the fake takes any image.
    let kernels = unsafe { current.kernels_of(b"fake") }?;
    let (begin, end) = (current.timed_event()?, current.timed_event()?);
    current.record(&begin, stream.id())?;
    // SAFETY: inside both, which live until the event is done.
    unsafe {
        current.copy(device.address(), host.as_ptr() as u64, 16, stream.id())?;
        current.copy_batch(
            &[device.address() + 16, device.address() + 32],
            &[host.as_ptr() as u64 + 16; 2],
            &[16, 16],
            stream.id(),
        )?;
        current.fill(device.address() + 48, 7, 16, stream.id())?;
    }
    current.record(&event, stream.id())?;
    current.wait(ENGINE, &event)?;
    current.synchronize(&event)?;
    assert!(current.is_done(&event)?);
    current.drain(stream.id())?;
    assert_eq!(bytes_of(&device), [7; 64]);

    // Gaps at every place: a launch that zeroes them all.
    let gaps = current.device_memory(8 * 4)?;
    // SAFETY: the device's memory, and nothing else touches it.
    unsafe { current.fill(gaps.address(), 0xff, 8 * 4, stream.id()) }?;
    let shift = RopeShift {
        stored: gaps.address(),
        rows: device.address(),
        row_bytes: 16,
        token_stride: 16,
        num_tokens: 4,
        ..RopeShift::default()
    };
    let kernel = ShiftKernel::ZeroGaps(16);
    let shape = LaunchShape::of_shift(&shift, kernel).expect("something to do");
    // SAFETY: as above; both live until the stream is drained.
    unsafe { current.launch_shift(&kernels, kernel, shape, &shift, stream.id()) }?;
    current.record(&end, stream.id())?;
    current.drain(stream.id())?;
    assert_eq!(bytes_of(&device), [0; 64]);
    assert!(current.milliseconds(&begin, &end)? >= 0.0);
    Ok(())
}

#[test]
fn whatever_fails_everything_is_given_back() {
    let silent = [
        // Words for an error, and what a drop gives back: that returns nothing by itself.
        "cuGetErrorName",
        "cuGetErrorString",
        "cuCtxPopCurrent",
        "cuDevicePrimaryCtxRelease",
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuMemHostUnregister",
        "cuMemFree",
        "cuModuleUnload",
    ];
    let calls = REQUIRED.into_iter().chain(["cuMemcpyBatchAsync"]);
    let calls = calls.filter(|call| !silent.contains(call));
    for call in calls {
        for after in 0..3 {
            let fake = Fake::new();
            fake.fail(call, after, OUT_OF_MEMORY);
            let outcome = everything(&fake);
            if after == 0 {
                assert_eq!(call_of(&outcome.expect_err("planted")), call);
            }
            // A push that fails in a drop leaves what it was to give back; all else is given back.
            if call != "cuCtxPushCurrent" || after == 0 {
                assert_eq!((fake.live(), fake.depth()), (0, 0), "{call}, after {after}");
            }
        }
    }
    let fake = Fake::new();
    assert_eq!(everything(&fake), Ok(()));
    assert_eq!((fake.live(), fake.depth()), (0, 0));
}

#[test]
fn a_drops_failure_is_returned_by_the_next_entry() {
    let fake = Fake::new();
    let context = context(&fake);
    let current = context.enter().expect("enters");
    let events = [current.event().expect("one"), current.event().expect("two")];
    drop(current);
    fake.fail("cuEventDestroy", 0, 700);
    drop(events);
    assert_eq!(
        call_of(&context.enter().expect_err("kept")),
        "cuEventDestroy"
    );
    assert!(context.enter().is_ok());
    fake.fail("cuCtxPopCurrent", 0, 700);
    drop(context.enter());
    assert_eq!(
        call_of(&context.enter().expect_err("kept")),
        "cuCtxPopCurrent"
    );
}

/// The same for everything else that is given back, and of several failures the first.
#[test]
fn whatever_a_drop_gives_back_its_failure_is_told() {
    let fake = Fake::new();
    let context = context(&fake);
    let memory = Arc::new(vec![0u8; 64]);
    type Made = Box<dyn Any>;
    let make = |call: &str| -> Made {
        let current = context.enter().expect("enters");
        match call {
            "cuStreamDestroy" => Box::new(current.stream().expect("one")),
            "cuEventDestroy" => Box::new(current.timed_event().expect("one")),
            "cuMemFree" => Box::new(current.device_memory(64).expect("some")),
            // SAFETY: the fake takes any image.
            "cuModuleUnload" => Box::new(unsafe { current.kernels_of(b"fake") }.expect("some")),
            _ => {
                let base = memory.as_ptr().cast_mut();
                // SAFETY: the vector is kept alive by the lock, and nobody writes to it.
                Box::new(unsafe { current.page_lock(base, 64, 64, memory.clone()) }.expect("locks"))
            }
        }
    };
    let calls = [
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuMemFree",
        "cuModuleUnload",
        "cuMemHostUnregister",
    ];
    for call in calls {
        let (one, other) = (make(call), make("cuStreamDestroy"));
        fake.fail(call, 0, 700);
        drop(one);
        fake.fail("cuStreamDestroy", 0, 701);
        drop(other);
        let told = context.enter().expect_err("kept");
        assert!(
            matches!(&told, CudaError::Call { call: named, code: 700, .. } if *named == call),
            "{told}"
        );
        assert!(context.enter().is_ok(), "{call} is told once");
    }
    // What can no longer enter says so too.
    let event = make("cuEventDestroy");
    fake.fail("cuCtxPushCurrent", 0, 201);
    drop(event);
    assert_eq!(
        call_of(&context.enter().expect_err("kept")),
        "cuCtxPushCurrent"
    );
}
