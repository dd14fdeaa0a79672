//! Loads out of another rank's pool.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lmcache_memory::mapped::Keeper;
use lmcache_storage::lookup_client::Peer;
use lmcache_storage::lookup_reader;
use lmcache_transfer::shared_load::SharedLoad;
use pyo3::prelude::*;

use crate::background::{Transfer, TransferQueue};
use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::transfer::{PagedCache, Place};

/// Reads the pool of another process, whose lookup server holds what is read.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct RegionReader(Owned<Arc<lookup_reader::RegionReader>>);

#[pymethods]
impl RegionReader {
    /// Connects to the server at `path`, which knows readers by `secret`, and maps its pool. A question is given
    /// up after `deadline_ms`.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, secret: &str, deadline_ms: u64) -> PyResult<Self> {
        let peer = Peer {
            path,
            secret: secret.as_bytes().into(),
        };
        let reader = enter(py, || {
            lookup_reader::RegionReader::connect(peer, Duration::from_millis(deadline_ms))
                .map_err(|error| NativeError::Lookup(error.to_string()))
        })?;
        Ok(Self(Owned::new(Arc::new(reader))))
    }

    /// Bytes of the pool.
    #[getter]
    fn capacity_bytes(&self) -> PyResult<u64> {
        Ok(self.0.get()?.capacity_bytes())
    }

    /// Ends the connection, and with it what is held. A later load makes it anew. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let reader = self.0.get()?;
        enter(py, || {
            reader.close();
            Ok::<_, NativeError>(())
        })
    }
}

/// As `TransferQueue.begin_load`, out of another process's pool. Nobody is asked before the copy begins.
#[pyfunction]
#[pyo3(signature = (queue, reader, paged, lookup_id, namespace, hashes, *, chunk_size, num_tokens, blocks, skip=0))]
#[expect(clippy::too_many_arguments, reason = "one batched call a request")]
pub(crate) fn begin_shared_load(
    py: Python<'_>,
    queue: &TransferQueue,
    reader: &RegionReader,
    paged: &PagedCache,
    lookup_id: &str,
    namespace: &str,
    hashes: &[u8],
    chunk_size: usize,
    num_tokens: usize,
    blocks: Vec<u32>,
    skip: usize,
) -> PyResult<Transfer> {
    let (queue, paged) = (queue.queue()?, paged.cache()?);
    let keeper: Arc<dyn Keeper> = Arc::<lookup_reader::RegionReader>::clone(reader.0.get()?);
    let place = Place::read(py, Some(blocks), None)?;
    let transfer = place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
        let load = SharedLoad::begin(keeper, paged, lookup_id, chunks, skip)?;
        Ok::<_, NativeError>(queue.begin(load))
    })?;
    Ok(transfer.into())
}
