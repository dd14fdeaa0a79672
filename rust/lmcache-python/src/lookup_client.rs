//! The scheduler half's connections to the lookup servers of all ranks.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lmcache_storage::lookup_client::{Connections, Event, Peer};
use lmcache_storage::wire;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::gate::{Owned, caught, enter};
use crate::token::packed_hashes;

/// What came from one rank: message id, status, chunks, milliseconds; nothing if its connection has ended.
type Told = (usize, Option<(u64, u8, u32, u32)>);

/// Connections to the lookup servers of all ranks, used by one thread. Nothing waits but `receive`.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LookupConnections(Owned<Mutex<Connections>>);

impl LookupConnections {
    /// Short enough to keep the interpreter meanwhile.
    fn at_once<T>(&self, work: impl FnOnce(&mut Connections) -> T) -> PyResult<T> {
        let connections = self.0.get()?;
        let done = caught(|| {
            let mut connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
            Ok::<_, NativeError>(work(&mut connections))
        });
        Ok(done?)
    }
}

#[pymethods]
impl LookupConnections {
    /// One connection for each `(path, secret)`, in the order of the ranks; none is made yet.
    #[new]
    fn new(peers: Vec<(PathBuf, String)>) -> Self {
        let peer = |(path, secret): (PathBuf, String)| Peer {
            path,
            secret: secret.into_bytes(),
        };
        let connections = Connections::new(peers.into_iter().map(peer).collect());
        Self(Owned::new(Mutex::new(connections)))
    }

    /// Makes the connections that are missing; whether every rank has one then.
    fn connect(&self) -> PyResult<bool> {
        self.at_once(Connections::connect)
    }

    /// Asks these ranks, or all, or none of them: false if one cannot be asked.
    #[pyo3(signature = (message_id, lookup_id, namespace, hashes, ranks=None))]
    fn ask(
        &self,
        message_id: u64,
        lookup_id: &str,
        namespace: &str,
        hashes: &[u8],
        ranks: Option<Vec<usize>>,
    ) -> PyResult<bool> {
        packed_hashes(hashes)?;
        let message = wire::encode_lookup(message_id, lookup_id, namespace, hashes);
        if message.len() > wire::MAX_MESSAGE_BYTES {
            return Err(PyValueError::new_err(format!(
                "a lookup of {} chunks takes {} bytes, a server reads {}; ask for fewer",
                hashes.len() / 32,
                message.len(),
                wire::MAX_MESSAGE_BYTES
            )));
        }
        self.at_once(|connections| {
            let ranks = ranks.unwrap_or_else(|| (0..connections.num_ranks()).collect());
            connections.send(&message, &ranks)
        })
    }

    /// Tells every rank that can be told that the lease is not needed any more; those that cannot.
    fn release(&self, message_id: u64, lookup_id: &str) -> PyResult<Vec<usize>> {
        let message = wire::encode_release(message_id, lookup_id);
        self.at_once(|connections| connections.post(&message))
    }

    /// Asks every rank that can be asked to forget every chunk; those that cannot.
    fn clear(&self, message_id: u64) -> PyResult<Vec<usize>> {
        let message = wire::encode_clear(message_id);
        self.at_once(|connections| connections.post(&message))
    }

    /// What has come; waits for at most `wait_us` microseconds if that is nothing.
    fn receive(&self, py: Python<'_>, wait_us: u64) -> PyResult<Vec<Told>> {
        let receive = |connections: &mut Connections| {
            let events = connections.receive(Duration::from_micros(wait_us));
            events.into_iter().map(told).collect()
        };
        if wait_us == 0 {
            return self.at_once(receive);
        }
        let connections = self.0.get()?;
        enter(py, || {
            let mut connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
            Ok::<_, NativeError>(receive(&mut connections))
        })
    }

    /// Ends all connections. Idempotent.
    fn close(&self) -> PyResult<()> {
        self.at_once(Connections::close)
    }
}

fn told((rank, event): (usize, Event)) -> Told {
    match event {
        Event::Answer(answer) => {
            let status = answer.status.code();
            let told = (
                answer.message_id,
                status,
                answer.hit_chunks,
                answer.lease_ms,
            );
            (rank, Some(told))
        }
        Event::Malformed => (rank, Some((0, wire::Status::Malformed.code(), 0, 0))),
        Event::Lost => (rank, None),
    }
}
