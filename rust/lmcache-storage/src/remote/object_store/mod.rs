//! Object stores: one object a value. S3 and what speaks its protocol is tested; Google Cloud Storage and Azure are
//! reached through the same crate and are not.
//!
//! | verb | requests | round trips |
//! |-|-|-|
//! | put | `PUT` of the whole object: it is there whole or not at all | 1 |
//! | prefix | a `HEAD` for each name that is not known to be there | few: 4 at a time, then 16, then 64 |
//! | get | `GET` | 1 |
//! | remove | `DeleteObjects`; for one name behind a `HEAD`, which says whether it was there | 2; 1 for each 1000 |
//! | list | `ListObjectsV2`, 1000 names a page | 1 a page |
//!
//! A listing does not answer which part of a chain is there: names of one namespace lie side by side whatever their
//! chain, so it would read through all of them. That a `HEAD` or a `PUT` has succeeded is remembered for a while
//! ([`hints`]); that something is not there never is, so what others put is found at once.
//!
//! A request is tried at most three times within two seconds, where the server is busy or a connection breaks; the
//! tier's deadline is above all of it.

mod address;
mod examine;
mod hints;
mod refusals;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, future::join_all};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt, PutPayload};

use self::address::Address;
use self::hints::Hints;
use self::refusals::{is_absent, refusal};
use super::client::{Answer, Client, Finding, Page, Refusal};
use super::{Credentials, Landing, Server};

/// What a URL of an object store begins with.
pub const SCHEMES: [&str; 5] = ["s3", "s3a", "gs", "az", "azure"];

/// Questions that are first asked at a time, and how many more each time.
const FIRST_HEADS: usize = 4;
/// Questions under way at a time, at most: they are small.
const MAX_HEADS: usize = 64;
const PAGE_NAMES: usize = 1000;

/// The store that a URL names; see `docs/remote-s3.md` for its form.
///
/// # Errors
/// What is wrong with the URL or the environment, in words without credentials.
pub fn connect(url: &str, credentials: &Credentials) -> Result<Server, String> {
    let address = Address::parse(url)?;
    let key_prefix = address.key_prefix.clone();
    Ok(Server {
        client: Arc::new(Store::new(address, credentials)?),
        key_prefix,
    })
}

/// A store of the crate, with both of its faces.
trait Objects: ObjectStore + PaginatedListStore {}
impl<T: ObjectStore + PaginatedListStore> Objects for T {}

/// See the module documentation.
struct Store {
    objects: Arc<dyn Objects>,
    hints: Hints,
    address: Address,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("at", &self.address.shown)
            .finish()
    }
}

impl Store {
    fn new(address: Address, credentials: &Credentials) -> Result<Self, String> {
        // More than one provider may be compiled in, and then none is the default.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Self {
            objects: address.open(credentials)?,
            hints: Hints::default(),
            address,
        })
    }

    fn refuse(&self, error: &object_store::Error) -> Refusal {
        refusal(error, &self.address.shown)
    }

    fn path(&self, name: &str) -> Result<Path, Refusal> {
        let wrong = |_| Refusal::Server(format!("{name:?} cannot be the name of an object"));
        Path::parse(name).map_err(wrong)
    }

    /// What a request for one object has found; `None` if there is none.
    fn found<T>(
        &self,
        name: &str,
        outcome: Result<T, object_store::Error>,
    ) -> Result<Option<T>, Refusal> {
        match outcome {
            Ok(found) => Ok(Some(found)),
            Err(error) => {
                // Also where it could not be asked: what is remembered is of before the trouble.
                self.hints.drop(name);
                if is_absent(&error) {
                    return Ok(None);
                }
                Err(self.refuse(&error))
            }
        }
    }

    async fn exists(&self, name: &str) -> Result<bool, Refusal> {
        if self.hints.knows(name) {
            return Ok(true);
        }
        self.head(name).await
    }

    async fn head(&self, name: &str) -> Result<bool, Refusal> {
        let path = self.path(name)?;
        let found = self.found(name, self.objects.head(&path).await)?;
        if found.is_some() {
            self.hints.note(name);
        }
        Ok(found.is_some())
    }

    async fn count_existing(&self, names: &[String]) -> Result<usize, Refusal> {
        let (mut count, mut at_a_time) = (0, FIRST_HEADS);
        while count < names.len() {
            if self.hints.knows(&names[count]) {
                count += 1;
                continue;
            }
            let wave = &names[count..names.len().min(count + at_a_time)];
            for exists in join_all(wave.iter().map(|name| self.exists(name))).await {
                if !exists? {
                    return Ok(count);
                }
                count += 1;
            }
            at_a_time = MAX_HEADS.min(at_a_time * 4);
        }
        Ok(count)
    }

    async fn answer(&self, name: &str, options: GetOptions) -> Result<Option<Body>, Refusal> {
        let path = self.path(name)?;
        let outcome = self.objects.get_opts(&path, options).await;
        let found = self.found(name, outcome)?;
        Ok(found.map(Body::of))
    }

    async fn land(&self, name: &str, into: &mut Landing) -> Result<bool, Refusal> {
        let Some(mut body) = self.answer(name, GetOptions::default()).await? else {
            return Ok(false);
        };
        let landed = async {
            into.expect(body.due)?;
            while let Some(piece) = body.next().await? {
                if !into.push(&piece).await {
                    break;
                }
            }
            Ok(())
        };
        let landed = landed.await;
        self.learn(name, landed).map(|()| true)
    }

    /// Passes on what came of a read; the hint is as good as that.
    fn learn<T>(&self, name: &str, outcome: Result<T, Refusal>) -> Result<T, Refusal> {
        match &outcome {
            Ok(_) => self.hints.note(name),
            Err(_) => self.hints.drop(name),
        }
        outcome
    }

    async fn read_begin(&self, name: &str, max_bytes: u64) -> Result<Option<Bytes>, Refusal> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(0..max_bytes)),
            ..GetOptions::default()
        };
        let Some(mut body) = self.answer(name, options).await? else {
            return Ok(None);
        };
        let read = async {
            if body.due > max_bytes {
                return Err(Refusal::TooLarge);
            }
            let mut begin = Vec::with_capacity(body.due as usize);
            while let Some(piece) = body.next().await? {
                begin.extend_from_slice(&piece);
            }
            Ok(Some(begin.into()))
        };
        let read = read.await;
        self.learn(name, read)
    }

    async fn delete(&self, names: &[String]) -> Result<usize, Refusal> {
        names.iter().for_each(|name| self.hints.drop(name));
        if let [name] = names {
            // A store does not say whether what it removes was there.
            if !self.head(name).await? {
                return Ok(0);
            }
            self.hints.drop(name);
            let outcome = self.objects.delete(&self.path(name)?).await;
            return Ok(usize::from(self.found(name, outcome)?.is_some()));
        }
        let paths: Vec<_> = names.iter().map(|name| Path::parse(name).ok()).collect();
        let paths = stream::iter(paths.into_iter().flatten().map(Ok)).boxed();
        let mut removed = self.objects.delete_stream(paths);
        let mut count = 0;
        while let Some(outcome) = removed.next().await {
            match outcome {
                Ok(_) => count += 1,
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(self.refuse(&error)),
            }
        }
        Ok(count)
    }
}

/// The bytes of an answer, which are as many as it said.
struct Body {
    pieces: BoxStream<'static, object_store::Result<Bytes>>,
    came: u64,
    due: u64,
}

impl Body {
    fn of(answer: GetResult) -> Self {
        Self {
            came: 0,
            due: answer.range.end - answer.range.start,
            pieces: answer.into_stream(),
        }
    }

    /// The next piece; `None` behind the last.
    async fn next(&mut self) -> Result<Option<Bytes>, Refusal> {
        let (came, due) = (self.came, self.due);
        match self.pieces.next().await {
            Some(Ok(piece)) => {
                self.came += piece.len() as u64;
                if self.came > due {
                    let words = "an answer longer than it said".to_owned();
                    return Err(Refusal::Protocol(words));
                }
                Ok(Some(piece))
            }
            // To the crate it cannot be decoded: it ended.
            Some(Err(_)) => {
                let words = format!("an answer broke off after {came} of {due} bytes");
                Err(Refusal::Unreachable(words))
            }
            None if came < due => {
                let words = format!("an answer ended after {came} of {due} bytes");
                Err(Refusal::Unreachable(words))
            }
            None => Ok(None),
        }
    }
}

impl Client for Store {
    fn put<'a>(
        &'a self,
        name: &'a str,
        value: Vec<Bytes>,
        ttl: Option<Duration>,
    ) -> Answer<'a, ()> {
        Box::pin(async move {
            if ttl.is_some() {
                let words = "an object store ends no single object";
                return Err(Refusal::Denied(words.to_owned()));
            }
            let path = self.path(name)?;
            let outcome = self.objects.put(&path, PutPayload::from_iter(value)).await;
            match outcome {
                Ok(_) => {
                    self.hints.note(name);
                    Ok(())
                }
                Err(error) => Err(self.refuse(&error)),
            }
        })
    }

    fn prefix<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(self.count_existing(names))
    }

    fn get<'a>(&'a self, name: &'a str, into: &'a mut Landing) -> Answer<'a, bool> {
        Box::pin(self.land(name, into))
    }

    fn begin<'a>(&'a self, name: &'a str, max_bytes: u64) -> Answer<'a, Option<Bytes>> {
        Box::pin(self.read_begin(name, max_bytes))
    }

    fn remove<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(self.delete(names))
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<String>) -> Answer<'a, Page> {
        Box::pin(async move {
            let options = PaginatedListOptions {
                max_keys: Some(PAGE_NAMES),
                page_token: cursor,
                ..PaginatedListOptions::default()
            };
            let listed = self.objects.list_paginated(Some(prefix), options).await;
            let page = listed.map_err(|error| self.refuse(&error))?;
            let objects = page.result.objects.into_iter();
            Ok(Page {
                names: objects
                    .map(|object| (object.location.to_string(), object.size))
                    .collect(),
                cursor: page.page_token,
            })
        })
    }

    fn ends_values(&self) -> bool {
        false
    }

    fn health<'a>(&'a self) -> Answer<'a, Vec<Finding>> {
        Box::pin(self.examine())
    }
}
