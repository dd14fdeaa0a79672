//! The tier on a server, as Python sees it.

use std::collections::BTreeMap;
use std::time::Duration;

use lmcache_storage::remote::{self, Credentials, Options, RemoteTier, Serde};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::chunks::{Arrived, Given, arrived, given, seconds};
use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::LocalCpu;
use crate::token::{chunk_hash, packed_hashes};

/// Names with the bytes of their values, and the cursor of the next page.
type Page = (Vec<(String, u64)>, Option<String>);

/// Chunks on a server that a URL names.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct Remote(Owned<RemoteTier>);

#[pymethods]
impl Remote {
    /// A tier on the server at `url`; chunks are read into `pool`. What the URL lacks of credentials is looked for
    /// in `credentials`, variables by name. Connections are made as they are needed. An operation has failed after
    /// `deadline_s` seconds; a value ends `ttl_s` seconds after it was written. `serde` is how payloads lie in their
    /// values: `naive` or `lossless`.
    #[new]
    #[pyo3(signature = (
        url, pool, *, credentials = Credentials::new(), operations = 8, deadline_s = 5.0, ttl_s = None,
        max_queued_bytes = 1 << 30, max_value_bytes = remote::MAX_VALUE_BYTES, serde = "naive"
    ))]
    #[expect(clippy::too_many_arguments, reason = "settings by name")]
    fn new(
        py: Python<'_>,
        url: &str,
        pool: &LocalCpu,
        credentials: Credentials,
        operations: usize,
        deadline_s: f64,
        ttl_s: Option<f64>,
        max_queued_bytes: u64,
        max_value_bytes: u64,
        serde: &str,
    ) -> PyResult<Self> {
        let pool = pool.store()?.clone();
        let serde = Serde::from_name(serde).ok_or_else(|| {
            NativeError::Argument(format!("serde {serde:?} is neither naive nor lossless"))
        })?;
        let tier = enter(py, || {
            let server =
                remote::connect(url, operations, &credentials).map_err(NativeError::Argument)?;
            if ttl_s.is_some() && !server.client.ends_values() {
                return Err(NativeError::Argument(
                    "remote_ttl is set, and an object store ends no single object: leave it out, and give the \
                     bucket a lifecycle rule"
                        .to_owned(),
                ));
            }
            let options = Options {
                key_prefix: server.key_prefix,
                operations,
                // Beyond a day nobody waits, and the clock has an end.
                deadline: seconds(deadline_s).min(Duration::from_secs(86_400)),
                ttl: ttl_s.map(seconds),
                max_queued_bytes,
                max_value_bytes,
                serde,
            };
            RemoteTier::open(server.client, options, pool).map_err(|error| {
                NativeError::Disk(format!("no threads for a remote tier: {error}"))
            })
        })?;
        Ok(Self(Owned::new(tier)))
    }

    /// Takes sealed chunks in, as far as there is room; how many. Of each: its memory, its form and its tokens, if
    /// they are known.
    fn put(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        chunks: Vec<Given<'_>>,
    ) -> PyResult<usize> {
        let tier = self.0.get()?;
        let (hashes, given) = (packed_hashes(hashes)?, given(chunks)?);
        enter(py, || {
            Ok::<_, NativeError>(tier.put(namespace, &hashes, given))
        })
    }

    /// How many chunks of the chain are stored, up to the first gap.
    fn longest_prefix(&self, py: Python<'_>, namespace: &str, hashes: &[u8]) -> PyResult<usize> {
        let tier = self.0.get()?;
        enter(py, || {
            packed_hashes(hashes).map(|hashes| tier.contains_prefix(namespace, &hashes))
        })
    }

    /// Reads chunks up to the first gap, into memory of `pool` or, without one, of the tier's own; what came within
    /// `within_s` seconds. Of each: writable memory, its form and its tokens.
    #[pyo3(signature = (namespace, hashes, within_s, pool = None))]
    fn get(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        within_s: f64,
        pool: Option<&LocalCpu>,
    ) -> PyResult<Vec<Arrived>> {
        let tier = self.0.get()?;
        let pool = pool.map(LocalCpu::store).transpose()?;
        let arrivals = enter(py, || {
            let (hashes, within) = (packed_hashes(hashes)?, seconds(within_s));
            Ok::<_, NativeError>(match pool {
                None => tier.get(namespace, &hashes, within),
                Some(pool) => tier.get_into(pool, namespace, &hashes, within),
            })
        })?;
        Ok(arrived(arrivals))
    }

    /// Forgets a chunk; whether it was there.
    fn remove(&self, py: Python<'_>, namespace: &str, hash: &[u8]) -> PyResult<bool> {
        let tier = self.0.get()?;
        let hash = chunk_hash(hash, "hash")?;
        enter(py, || Ok::<_, NativeError>(tier.remove(namespace, hash)))
    }

    /// Removes every chunk, or those whose namespace begins with `prefix`; how many.
    #[pyo3(signature = (prefix = None))]
    fn clear(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<usize> {
        let tier = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(tier.clear(prefix)))
    }

    /// Removes every chunk whose namespace does not begin with `prefix`; how many.
    fn retain(&self, py: Python<'_>, prefix: &str) -> PyResult<usize> {
        let tier = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(tier.retain(prefix)))
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    fn flush(&self, py: Python<'_>, within_s: f64) -> PyResult<bool> {
        let tier = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(tier.flush(seconds(within_s))))
    }

    /// Ends the tier, pending puts done first; false if the time ran out. Idempotent.
    fn close(&self, py: Python<'_>, within_s: f64) -> PyResult<bool> {
        let tier = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(tier.close(seconds(within_s))))
    }

    /// The name under which a chunk is stored, or would be.
    fn name_of(&self, namespace: &str, hash: &[u8]) -> PyResult<String> {
        let tier = self.0.get()?;
        Ok(tier.name_of(namespace, chunk_hash(hash, "hash")?))
    }

    /// Counters by name.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let tier = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(tier.stats()))
    }

    /// What there is to log since the last call.
    fn take_lines(&self) -> PyResult<Vec<String>> {
        Ok(self.0.get()?.take_lines())
    }

    /// What there is to say of the server: of each what was looked at, whether it is as it should be, and words.
    fn health(&self, py: Python<'_>, within_s: f64) -> PyResult<Vec<(&'static str, bool, String)>> {
        let tier = self.0.get()?;
        let findings = enter(py, || Ok::<_, NativeError>(tier.health(seconds(within_s))))?;
        let each = findings.into_iter();
        Ok(each
            .map(|finding| (finding.what, finding.ok, finding.words))
            .collect())
    }

    /// One page of the names of chunks, each with the bytes of its value, and the cursor of the next page.
    #[pyo3(signature = (cursor = None, within_s = 5.0))]
    fn list_page(&self, py: Python<'_>, cursor: Option<String>, within_s: f64) -> PyResult<Page> {
        let tier = self.0.get()?;
        let page = enter(py, || {
            let listed = tier.list_page(cursor, seconds(within_s));
            listed.map_err(|refusal| NativeError::Disk(refusal.to_string()))
        })?;
        Ok((page.names, page.cursor))
    }

    /// The first `max_bytes` of what lies under a name, or all of a shorter one; None if nothing does.
    #[pyo3(signature = (name, max_bytes, within_s = 5.0))]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        name: String,
        max_bytes: u64,
        within_s: f64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let tier = self.0.get()?;
        let begin = enter(py, || {
            let begin = tier.begin(name, max_bytes, seconds(within_s));
            begin.map_err(|refusal| NativeError::Disk(refusal.to_string()))
        })?;
        Ok(begin.map(|begin| PyBytes::new(py, &begin)))
    }

    /// Removes what lies under names; how many were there.
    #[pyo3(signature = (names, within_s = 5.0))]
    fn remove_names(&self, py: Python<'_>, names: Vec<String>, within_s: f64) -> PyResult<usize> {
        let tier = self.0.get()?;
        enter(py, || {
            let removed = tier.remove_names(names, seconds(within_s));
            removed.map_err(|refusal| NativeError::Disk(refusal.to_string()))
        })
    }
}
