//! The lookup server and the messages its clients speak.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use lmcache_storage::lookup_server;
use lmcache_storage::wire;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::LocalCpu;
use crate::token::packed_hashes;

/// Answers lookups of another process from a store's index, on a thread of its own, without the interpreter.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LookupServer(Owned<lookup_server::LookupServer>);

#[pymethods]
impl LookupServer {
    /// Listens on a Unix socket at `path`, for clients whose ZMTP identity is `secret`, if that is given.
    /// `own_fields` are what the store's namespaces have in place of what clients ask for. Peers whose identity
    /// is `reader_secret`, if that is given, read the store's memory.
    #[new]
    #[pyo3(signature = (path, local_cpu, secret="", own_fields=BTreeMap::new(), reader_secret=""))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        local_cpu: &LocalCpu,
        secret: &str,
        own_fields: BTreeMap<String, String>,
        reader_secret: &str,
    ) -> PyResult<Self> {
        let store = Arc::new(local_cpu.store()?.clone());
        let index = Arc::new(lookup_server::RankIndex::new(store, own_fields));
        let server = enter(py, || {
            let (secret, reader_secret) = (secret.as_bytes(), reader_secret.as_bytes());
            lookup_server::LookupServer::start_shared(&path, index, secret, reader_secret)
                .map_err(|error| NativeError::Lookup(error.to_string()))
        })?;
        Ok(Self(Owned::new(server)))
    }

    /// Stops listening and removes the socket. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.0.get()?;
        enter(py, || {
            server.close();
            Ok::<_, NativeError>(())
        })
    }

    /// What has happened since the server started, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, count) in self.0.get()?.stats().entries() {
            stats.set_item(name, count)?;
        }
        Ok(stats)
    }
}

/// A lookup, as bytes for the wire.
#[pyfunction]
pub(crate) fn encode_lookup_request<'py>(
    py: Python<'py>,
    message_id: u64,
    lookup_id: &str,
    namespace: &str,
    hashes: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    packed_hashes(hashes)?;
    Ok(PyBytes::new(
        py,
        &wire::encode_lookup(message_id, lookup_id, namespace, hashes),
    ))
}

/// A release, as bytes for the wire.
#[pyfunction]
pub(crate) fn encode_release_request<'py>(
    py: Python<'py>,
    message_id: u64,
    lookup_id: &str,
) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &wire::encode_release(message_id, lookup_id))
}

/// A ping, as bytes for the wire.
#[pyfunction]
pub(crate) fn encode_ping_request(py: Python<'_>, message_id: u64) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &wire::encode_ping(message_id))
}

/// A request to forget every chunk, as bytes for the wire.
#[pyfunction]
pub(crate) fn encode_clear_request(py: Python<'_>, message_id: u64) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &wire::encode_clear(message_id))
}

/// `(message_id, status, hit_chunks, lease_ms)` of an answer.
#[pyfunction]
pub(crate) fn decode_lookup_answer(data: &[u8]) -> PyResult<(u64, u8, u32, u32)> {
    let answer =
        wire::decode_answer(data).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok((
        answer.message_id,
        answer.status.code(),
        answer.hit_chunks,
        answer.lease_ms,
    ))
}
