//! The extension module `lmcache_rs._native`: a list of exports. It marshals and decides nothing.

mod background;
mod chunks;
mod device;
mod device_layers;
mod device_step;
mod device_transfer;
mod errors;
mod events;
mod gate;
mod key;
mod layer_copy;
mod layerwise;
mod local_disk;
mod lookup_client;
mod lookup_reader;
mod memory;
mod remote;
mod rope;
mod storage;
mod token;
mod transfer;

/// The native half of lmcache_rs.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::background::{Transfer, TransferQueue};
    #[pymodule_export]
    use crate::device::{CudaCache, CudaDevice};
    #[pymodule_export]
    use crate::device_layers::{CudaLayerBuffer, CudaLayerCopy, CudaRopeShift};
    #[pymodule_export]
    use crate::device_step::CudaLayerwiseStep;
    #[pymodule_export]
    use crate::device_transfer::{CudaTransfer, begin_cuda_load, begin_cuda_store};
    #[pymodule_export]
    use crate::errors::CudaError;
    #[pymodule_export]
    use crate::events::EventSink;
    #[pymodule_export]
    use crate::key::{encode_key, namespace_begins_with, namespace_with_fields, parse_key};
    #[pymodule_export]
    use crate::layer_copy::{LayerBuffer, LayerCopy};
    #[pymodule_export]
    use crate::layerwise::{Copier, LayerwiseStep};
    #[pymodule_export]
    use crate::local_disk::{LocalDisk, checksum, inspect_object, pack_object};
    #[pymodule_export]
    use crate::lookup_client::LookupConnections;
    #[pymodule_export]
    use crate::lookup_reader::{RegionReader, begin_shared_load};
    #[pymodule_export]
    use crate::memory::{LocalCpu, MemoryObj};
    #[pymodule_export]
    use crate::remote::Remote;
    #[pymodule_export]
    use crate::rope::RopeShift;
    #[pymodule_export]
    use crate::storage::{
        LookupServer, decode_lookup_answer, encode_clear_request, encode_lookup_request,
        encode_ping_request, encode_release_request,
    };
    #[pymodule_export]
    use crate::token::{
        Chain, chunk_aligned, encode_extra_keys, hashed_bytes, leading_false, sha256_cbor,
    };
    #[pymodule_export]
    use crate::transfer::{PagedCache, copy_seconds, gather, load, scatter, store};

    /// What this build is: version, profile, whether debug assertions are on.
    #[pymodule_export]
    use crate::gate::build_info;
}
