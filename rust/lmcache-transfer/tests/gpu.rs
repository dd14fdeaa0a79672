//! The executor on a GPU, for machines that have one; elsewhere it says that nothing was run.

mod common;

use std::time::{Duration, Instant};

use common::engine::{Engine, OPAQUE, TOKENS};
use common::round_trip::round_trip;
use lmcache_transfer::cuda::driver::Driver;
use lmcache_transfer::cuda::executor::CopyPath;
use lmcache_transfer::cuda::kernels::KERNEL_BUILD;

#[test]
fn a_gpu_stores_and_loads_as_the_plan_says() {
    let driver = match Driver::open() {
        Ok(driver) if driver.device_count().is_ok_and(|count| count > 0) => driver,
        Ok(driver) => return println!("gpu: {} shows no GPU, nothing was run", driver.path()),
        Err(fault) => return println!("gpu: nothing was run: {fault}"),
    };
    assert!(
        !KERNEL_BUILD.nvcc.is_empty(),
        "{}",
        KERNEL_BUILD.absent_because
    );
    for seed in 1..50 {
        for layout in [OPAQUE, TOKENS] {
            for path in CopyPath::ALL {
                let engine = Engine::on(&driver, layout, |current| current.kernels());
                round_trip(&engine, path, seed);
            }
        }
    }
    println!("gpu: every path and layout stored and loaded as the plan says");
}

#[test]
fn a_gpu_is_timed_within_the_time_given() {
    let driver = match Driver::open() {
        Ok(driver) if driver.device_count().is_ok_and(|count| count > 0) => driver,
        _ => return println!("gpu: nothing was timed"),
    };
    let engine = Engine::on(&driver, TOKENS, |current| current.kernels());
    let began = Instant::now();
    let learned = engine.executor.learn(None, Duration::from_secs(1));
    println!("gpu: {learned:?} after {:?}", began.elapsed());
    let Some(costs) = engine.executor.costs() else {
        return println!("gpu: a second was too short");
    };
    for (name, table) in [("store", &costs.store), ("load", &costs.load)] {
        for line in table.to_text().lines() {
            println!("gpu: {name} {line}");
        }
    }
}
