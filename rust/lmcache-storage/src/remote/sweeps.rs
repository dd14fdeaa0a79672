//! What is to be forgotten is forgotten, even if the server is out of reach when that is asked: until it is done,
//! nothing is read. What a server that is reached does not let us forget stays, and is said to stay.

use std::collections::HashMap;
use std::sync::Arc;

use lmcache_core::key::begins_with;

use super::Shared;
use super::client::Refusal;
use super::name::digest_text;
use crate::object_form::{Header, PAGE_BYTES, namespace_in};

/// Which namespaces go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sweep {
    /// All.
    All,
    /// Those that begin with this.
    Clear(String),
    /// Those that do not.
    Retain(String),
}

impl Sweep {
    pub(super) fn takes(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Clear(prefix) => begins_with(namespace, prefix),
            Self::Retain(prefix) => !begins_with(namespace, prefix),
        }
    }
}

impl Shared {
    /// Does one sweep that is owed; how many chunks went. While the server is out of reach it stays owed, and is
    /// done when it is back. What the server refuses would be refused again: it is owed no more, for a tier that
    /// waited for it would never serve again.
    pub(super) async fn pay(self: &Arc<Self>, sweep: &Sweep) -> Option<usize> {
        let swept = self.sweep(sweep).await;
        self.learn("clear", &swept);
        if swept.as_ref().is_err_and(Refusal::is_outage) {
            self.probe();
            return None;
        }
        self.owed.lock().retain(|each| each != sweep);
        if let Err(refusal) = &swept {
            let found = format!("chunks stay, and are served: {refusal}");
            self.faults.note("clear", "not_cleared", &found);
        }
        Some(swept.unwrap_or(0))
    }

    async fn sweep(&self, sweep: &Sweep) -> Result<usize, Refusal> {
        let mut verdicts = HashMap::new();
        let (mut removed, mut cursor) = (0, None);
        loop {
            let page = self
                .ask(self.client.list(self.names.root(), cursor))
                .await?;
            let mut goes = Vec::new();
            for (name, _) in page.names {
                let Some(digest) = self.names.digest_in(&name).map(str::to_owned) else {
                    continue;
                };
                let verdict = match (sweep, verdicts.get(&digest)) {
                    (Sweep::All, _) => true,
                    (_, Some(verdict)) => *verdict,
                    _ => match self.namespace_of(&name, &digest).await {
                        Ok(Some(namespace)) => {
                            let verdict = sweep.takes(&namespace);
                            verdicts.insert(digest, verdict);
                            verdict
                        }
                        // Nobody could use it anyway.
                        Ok(None) => true,
                        Err(refusal) if refusal.is_outage() => return Err(refusal),
                        // What cannot be read is none of ours, and keeps no other from going.
                        Err(refusal) => {
                            let found = format!("{name} is left where it is: {refusal}");
                            self.faults.note("clear", refusal.name(), &found);
                            false
                        }
                    },
                };
                if verdict {
                    goes.push(name);
                }
            }
            if !goes.is_empty() {
                removed += self.ask(self.client.remove(&goes)).await?;
            }
            cursor = page.cursor;
            if cursor.is_none() {
                return Ok(removed);
            }
        }
    }

    /// The namespace of a chunk, as we have used it or its own header tells it.
    async fn namespace_of(&self, name: &str, digest: &str) -> Result<Option<Arc<str>>, Refusal> {
        if let Some(known) = self.namespaces.lock().get(digest) {
            return Ok(Some(Arc::clone(known)));
        }
        let mut wanted = PAGE_BYTES;
        loop {
            let begin = self.ask(self.client.begin(name, wanted as u64)).await?;
            let Some(begin) = begin else {
                return Ok(None);
            };
            match Header::bytes_of_any(&begin) {
                Ok(bytes) if bytes > wanted => wanted = bytes,
                Ok(_) => {
                    let header = Header::parse_any(&begin).ok();
                    let key = header.map(|header| header.description.key);
                    let namespace = key.as_deref().and_then(namespace_in);
                    let ours = namespace.filter(|namespace| digest_text(namespace) == digest);
                    return Ok(ours.map(Arc::from));
                }
                Err(_) => return Ok(None),
            }
        }
    }
}
