//! A server in memory, well or unwell, and chunks to put.
#![allow(dead_code, reason = "not every test file uses all")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_storage::backend::{Arrival, Chunk};
use lmcache_storage::remote::Landing;
use lmcache_storage::remote::client::{Answer, Client, Finding, Page, Refusal};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub(crate) const CHUNK_BYTES: usize = 4096;

pub(crate) fn pool(num_chunks: usize) -> LocalCpu {
    let bytes = (num_chunks * CHUNK_BYTES) as u64;
    LocalCpu::new(bytes, Duration::from_secs(1)).expect("a few pages")
}

pub(crate) fn chain(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
    ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
}

/// Each filled with the first byte of its hash.
pub(crate) fn chunks(hashes: &[ChunkHash]) -> Vec<Chunk> {
    let source = pool(hashes.len());
    let sizes = vec![CHUNK_BYTES; hashes.len()];
    let allocated = source.allocate(&sizes).expect("room for all");
    let fill = |(mut chunk, hash): (lmcache_memory::object::ChunkMut, &ChunkHash)| {
        chunk.bytes_mut().fill(hash.0[0]);
        Chunk {
            object: chunk.seal_unpublished(),
            form: None,
            num_tokens: 256,
        }
    };
    allocated.into_iter().zip(hashes).map(fill).collect()
}

pub(crate) fn filled(arrivals: Vec<Arrival>) -> Vec<u8> {
    let fill = |arrival: Arrival| {
        let object = arrival.chunk.seal_unpublished();
        assert_eq!(object.len(), CHUNK_BYTES);
        assert!(object.bytes().iter().all(|byte| *byte == object.bytes()[0]));
        object.bytes()[0]
    };
    arrivals.into_iter().map(fill).collect()
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let due = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < due, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// Answers nothing until it is woken.
    Mute,
    MutePuts,
    Full,
    Refusing(Refusal),
}

/// How long a get takes, told by its number and the name that it asks for.
struct Delay(Box<DelayOf>);
type DelayOf = dyn Fn(usize, &str) -> Duration + Send + Sync;

impl std::fmt::Debug for Delay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Delay")
    }
}

#[derive(Debug, Default)]
pub(crate) struct Store {
    values: Mutex<BTreeMap<String, Bytes>>,
    /// What begins of this name cannot be read.
    spoilt: Mutex<Option<String>>,
    mood: Mutex<Mood>,
    delay: Mutex<Option<Delay>>,
    awake: Notify,
    calls: AtomicUsize,
    puts: AtomicUsize,
    gets: AtomicUsize,
    gets_now: AtomicUsize,
    most_gets: AtomicUsize,
}

impl Store {
    pub(crate) fn set_mood(&self, mood: Mood) {
        *self.mood.lock() = mood;
    }

    pub(crate) fn wake(&self) {
        self.awake.notify_waiters();
    }

    pub(crate) fn delay_gets(
        &self,
        delay: impl Fn(usize, &str) -> Duration + Send + Sync + 'static,
    ) {
        self.gets.store(0, Ordering::Relaxed);
        *self.delay.lock() = Some(Delay(Box::new(delay)));
    }

    pub(crate) fn num_calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    pub(crate) fn num_puts(&self) -> usize {
        self.puts.load(Ordering::Relaxed)
    }

    pub(crate) fn most_gets_at_once(&self) -> usize {
        self.most_gets.load(Ordering::Relaxed)
    }

    pub(crate) fn value(&self, name: &str) -> Option<Bytes> {
        self.values.lock().get(name).cloned()
    }

    pub(crate) fn plant(&self, name: &str, value: Bytes) {
        self.values.lock().insert(name.to_owned(), value);
    }

    pub(crate) fn spoil(&self, name: &str) {
        *self.spoilt.lock() = Some(name.to_owned());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.lock().is_empty()
    }

    async fn react(&self, is_put: bool) -> Result<(), Refusal> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mood = self.mood.lock().clone();
        match mood {
            Mood::Mute => self.awake.notified().await,
            Mood::MutePuts if is_put => self.awake.notified().await,
            Mood::Refusing(refusal) => return Err(refusal),
            Mood::Full if is_put => return Err(Refusal::Full("no more".into())),
            _ => {}
        }
        Ok(())
    }
}

impl Client for Store {
    fn put<'a>(
        &'a self,
        name: &'a str,
        value: Vec<Bytes>,
        _ttl: Option<Duration>,
    ) -> Answer<'a, ()> {
        Box::pin(async move {
            self.puts.fetch_add(1, Ordering::Relaxed);
            self.react(true).await?;
            self.plant(name, Bytes::from(value.concat()));
            Ok(())
        })
    }

    fn prefix<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(async move {
            self.react(false).await?;
            let values = self.values.lock();
            let is_there = |name: &&String| values.contains_key(*name);
            Ok(names.iter().take_while(is_there).count())
        })
    }

    fn get<'a>(&'a self, name: &'a str, into: &'a mut Landing) -> Answer<'a, bool> {
        Box::pin(async move {
            let nth = self.gets.fetch_add(1, Ordering::Relaxed);
            let now = self.gets_now.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_gets.fetch_max(now, Ordering::Relaxed);
            let delay = self.delay.lock().as_ref().map(|delay| delay.0(nth, name));
            if let Some(delay) = delay {
                tokio::time::sleep(delay).await;
            }
            self.gets_now.fetch_sub(1, Ordering::Relaxed);
            self.react(false).await?;
            match self.value(name) {
                Some(value) => into.take(&value).await.map(|()| true),
                None => Ok(false),
            }
        })
    }

    fn begin<'a>(&'a self, name: &'a str, max_bytes: u64) -> Answer<'a, Option<Bytes>> {
        Box::pin(async move {
            self.react(false).await?;
            if self.spoilt.lock().as_deref() == Some(name) {
                return Err(Refusal::Server("no range of nothing".into()));
            }
            let value = self.value(name);
            Ok(value.map(|value| value.slice(..value.len().min(max_bytes as usize))))
        })
    }

    fn remove<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(async move {
            self.react(false).await?;
            let mut values = self.values.lock();
            let removed = names.iter().filter(|name| values.remove(*name).is_some());
            Ok(removed.count())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<String>) -> Answer<'a, Page> {
        Box::pin(async move {
            self.react(false).await?;
            let values = self.values.lock();
            let behind = values.range(cursor.unwrap_or_default()..);
            let mut found = behind.filter(|(name, _)| name.starts_with(prefix));
            let page = found.by_ref().take(2);
            let names = page.map(|(name, value)| (name.clone(), value.len() as u64));
            let names = names.collect();
            let cursor = found.next().map(|(name, _)| name.clone());
            Ok(Page { names, cursor })
        })
    }

    fn health<'a>(&'a self) -> Answer<'a, Vec<Finding>> {
        Box::pin(async move { self.react(false).await.map(|()| Vec::new()) })
    }
}
