//! The CUDA side: kernels compiled into this crate, and a driver opened at run time.
//!
//! Nothing here is linked with CUDA and nothing happens at import: [`driver::Driver::open`] looks for
//! `libcuda.so.1` when it is asked to, and where there is none the host's copies go on as they are.
//!
//! Proven without a GPU: the kernels' sources run as loops on the host, and the driver layer runs over a library
//! that imitates the driver in host memory, with streams that are late on purpose.

pub mod costs;
pub mod current;
pub mod descriptors;
pub mod device;
pub mod driver;
pub mod error;
pub mod executor;
mod flights;
pub mod flow;
pub mod handles;
mod job;
pub mod kernels;
pub mod layer_copy;
mod measure;
mod moves;
pub mod planner;
pub mod planted;
mod staged;
pub mod staging;
mod symbols;
mod tables;
