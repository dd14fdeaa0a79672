//! The only code that moves KV bytes.
//!
//! [`copy_job::CopyJob`] pairs chunks with their plans and is stepped a layer at a time; [`host`] does the
//! copies in host memory, [`cuda`] those of a GPU. [`layerwise`] is the walk of a request's chunks into the store
//! and out of it, [`flow`] the same in one call, [`pipeline`] lets loads run ahead of the layers that an engine
//! computes, and [`background`] takes whole transfers over. [`shared_load`] is the way out of another process's store. [`layer_copy`] moves one layer of memory that the caller
//! brings, and [`rope`] turns keys to other positions.

pub mod background;
pub mod copy_job;
pub mod cuda;
pub mod error;
pub mod flow;
pub mod host;
pub mod layer_copy;
pub mod layerwise;
pub mod pipeline;
pub mod rope;
pub mod shared_load;
