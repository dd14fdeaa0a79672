//! What the doctor wants to know of a store.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use object_store::{ObjectStoreExt, PutPayload};

use super::super::client::{Client, Finding, Refusal};
use super::Store;
use super::refusals::is_absent;

impl Store {
    pub(super) async fn examine(&self) -> Result<Vec<Finding>, Refusal> {
        // Of no chunk, and of nobody else.
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = since.map_or(0, |since| since.as_nanos());
        let prefix = &self.address.key_prefix;
        let name = format!(
            "{prefix}lmcache_rs.probe/{number:x}-{:x}",
            std::process::id()
        );
        // A listing and no HEAD: only its answer tells a missing bucket and a missing right apart.
        self.list(&name, None).await?;
        let began = Instant::now();
        self.list(&name, None).await?;
        let took_ms = began.elapsed().as_secs_f64() * 1e3;
        let mut findings = vec![Finding {
            what: "reach",
            ok: true,
            words: format!("{} answers in {took_ms:.2} ms", self.address.shown),
        }];
        let (rights, is_versioned) = self.rights(&name).await;
        findings.push(rights);
        findings.push(if is_versioned {
            Finding {
                what: "memory",
                ok: false,
                words: "the bucket keeps old versions of what is removed or written again; suspend versioning, or \
                        give it a lifecycle rule for noncurrent versions"
                    .to_owned(),
            }
        } else {
            Finding {
                what: "memory",
                ok: true,
                words: "nothing leaves a bucket by itself: give it a lifecycle rule that expires old objects"
                    .to_owned(),
            }
        });
        Ok(findings)
    }

    async fn rights(&self, name: &str) -> (Finding, bool) {
        let value = Bytes::from_static(b"probe");
        let mut is_versioned = false;
        let tried = async {
            let path = self.path(name).map_err(|refusal| ("PutObject", refusal))?;
            let refused = |verb| move |error| (verb, self.refuse(&error));
            let put = self
                .objects
                .put(&path, PutPayload::from(value.clone()))
                .await;
            let put = put.map_err(refused("PutObject"))?;
            // "null" is the version of what a bucket without versions holds.
            is_versioned = put.version.is_some_and(|version| version != "null");
            match self.begin(name, 16).await {
                Ok(Some(found)) if found == value => {}
                Ok(_) => {
                    let words = "what was put was not what came back".to_owned();
                    return Err(("GetObject", Refusal::Server(words)));
                }
                Err(refusal) => return Err(("GetObject", refusal)),
            }
            self.head(name)
                .await
                .map_err(|refusal| ("HeadObject", refusal))?;
            let deleted = self.objects.delete(&path).await;
            deleted.map_err(refused("DeleteObject"))?;
            self.hints.drop(name);
            // Without the right to list, what is not there is denied and not missing.
            match self.objects.head(&path).await {
                Err(error) if !is_absent(&error) => Err(("ListBucket", self.refuse(&error))),
                _ => Ok(()),
            }
        };
        let (ok, words) = match tried.await {
            Ok(()) => (true, "it stores, reads, lists and removes".to_owned()),
            Err((right, refusal)) => (
                false,
                format!(
                    "{right} came to nothing ({refusal}); permit s3:GetObject, PutObject, DeleteObject and ListBucket"
                ),
            ),
        };
        let finding = Finding {
            what: "rights",
            ok,
            words,
        };
        (finding, is_versioned)
    }
}
