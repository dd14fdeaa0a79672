//! What the tiers hold, as it changes, for Python.

use lmcache_memory::events::{self, DEFAULT_CAPACITY, Text};
use lmcache_memory::local_cpu;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::NativeError;
use crate::gate::{Owned, caught, enter};
use crate::memory::LocalCpu;
use crate::token::chunk_hash;

/// Hears of the chunks that come and go: of L1's by itself, of other tiers' from those who keep them.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct EventSink(Owned<(events::EventSink, local_cpu::LocalCpu)>);

// A literal in the signature, so that Python sees it.
const _: () = assert!(DEFAULT_CAPACITY == 65536);

type Told<'py> = (
    bool,
    Bound<'py, PyString>,
    Bound<'py, PyString>,
    Bound<'py, PyBytes>,
    u64,
    u32,
);

/// Makes one string of neighbours that share a text.
#[derive(Default)]
struct Shared<'py>(Option<(Text, Bound<'py, PyString>)>);

impl<'py> Shared<'py> {
    fn string(&mut self, py: Python<'py>, text: &Text) -> Bound<'py, PyString> {
        if let Some((known, string)) = &self.0
            && Text::ptr_eq(known, text)
        {
            return string.clone();
        }
        let string = PyString::new(py, text);
        self.0 = Some((Text::clone(text), string.clone()));
        string
    }
}

#[pymethods]
impl EventSink {
    /// The sink of a store, which tells from now on. Up to `capacity` changes wait for a `drain`; a store has
    /// one sink, and the first call's capacity.
    #[new]
    #[pyo3(signature = (local_cpu, capacity = 65536))]
    fn new(local_cpu: &LocalCpu, capacity: usize) -> PyResult<Self> {
        let store = local_cpu.store()?;
        let sink = caught(|| Ok::<_, NativeError>(store.listen(capacity)))?;
        Ok(Self(Owned::new((sink, store.clone()))))
    }

    /// `(is_anew, [(is_stored, tier, namespace, hash, nbytes, num_tokens)])`, in the order of the changes.
    /// Anew means that what was told before is void: the events are all that is stored.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<(bool, Vec<Told<'py>>)> {
        let (_, store) = self.0.get()?;
        let drained = enter(py, || Ok::<_, NativeError>(store.drain_events()))?;
        let (mut tiers, mut namespaces) = (Shared::default(), Shared::default());
        let told = drained.events.iter().map(|event| {
            (
                event.is_stored,
                tiers.string(py, &event.tier),
                namespaces.string(py, &event.namespace),
                PyBytes::new(py, &event.hash.0),
                event.bytes,
                event.tokens,
            )
        });
        Ok((drained.is_anew, told.collect()))
    }

    /// A tier below L1 has a chunk from now on.
    fn stored(
        &self,
        tier: &str,
        namespace: &str,
        hash: &[u8],
        nbytes: u64,
        num_tokens: u32,
    ) -> PyResult<()> {
        let (sink, _) = self.0.get()?;
        sink.stored(
            tier,
            namespace,
            chunk_hash(hash, "hash")?,
            nbytes,
            num_tokens,
        );
        Ok(())
    }

    /// A tier below L1 has a chunk no more; nothing if it was never told of.
    fn removed(&self, tier: &str, namespace: &str, hash: &[u8]) -> PyResult<()> {
        let (sink, _) = self.0.get()?;
        sink.removed(tier, namespace, chunk_hash(hash, "hash")?);
        Ok(())
    }

    /// A tier below L1 has none of its chunks any more.
    fn cleared(&self, tier: &str) -> PyResult<()> {
        let (sink, _) = self.0.get()?;
        sink.cleared(tier);
        Ok(())
    }

    /// How often more happened between two drains than the sink holds.
    #[getter]
    fn times_lost(&self) -> PyResult<u64> {
        Ok(self.0.get()?.0.times_lost())
    }
}
