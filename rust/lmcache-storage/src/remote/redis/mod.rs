//! Redis and Valkey: one key a value, with its end set by the write that makes it.
//!
//! | verb | command | round trips |
//! |-|-|-|
//! | put | `SET`, with `PX` where there is a TTL | 1 |
//! | prefix | a pipeline of `EXISTS` | 1; in a cluster 1 for each node, all at once |
//! | get | `GETRANGE`, which never sends more than is asked for | 1 |
//! | remove | `UNLINK` | 1 |
//! | list | `SCAN` and a pipeline of `STRLEN` | 2 a page |
//!
//! Large values go over connections that nothing else uses meanwhile, so that a question is not answered behind
//! one; past the driver where the socket is plain. A connection whose call was dropped is closed.

mod address;
mod cluster;
mod refusals;
mod single;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use redis::{Cmd, Pipeline, RedisWrite as _, Value};

use self::address::{Address, Servers};
use self::cluster::Cluster;
use self::refusals::unexpected;
use self::single::Single;
use self::wire::{Destination, Reply};
use super::client::{Answer, Client, Finding, Page, Refusal};
use super::name::ROOT;
use super::{Credentials, Landing, Server};

/// What a URL of a Redis or Valkey server begins with.
pub const SCHEMES: [&str; 15] = [
    "redis",
    "rediss",
    "unix",
    "redis+unix",
    "redis-cluster",
    "rediss-cluster",
    "redis-sentinel",
    "rediss-sentinel",
    "valkey",
    "valkeys",
    "valkey+unix",
    "valkey-cluster",
    "valkeys-cluster",
    "valkey-sentinel",
    "valkeys-sentinel",
];

/// The server that a URL names; see `docs/remote.md` for its form.
///
/// # Errors
/// What is wrong with the URL or with a certificate file that it names, in words without its credentials.
pub fn connect(url: &str, operations: usize, credentials: &Credentials) -> Result<Server, String> {
    let address = Address::parse(url, |name| credentials.get(name).cloned())?;
    let key_prefix = address.key_prefix.clone();
    Ok(Server {
        client: Arc::new(Redis::new(address, operations)?),
        key_prefix,
    })
}

/// A connection to one server, or to all of a cluster.
enum Link {
    Single(Single),
    Cluster(Cluster),
}

/// See the module documentation.
struct Redis {
    /// The URL without credentials.
    shown: String,
    /// What all names begin with.
    root: String,
    link: Link,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("at", &self.shown).finish()
    }
}

impl Redis {
    fn new(address: Address, operations: usize) -> Result<Self, String> {
        // More than one provider may be compiled in, and then none is the default.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let shown = address.shown.clone();
        let root = format!("{}{ROOT}", address.key_prefix);
        let link = match address.servers {
            Servers::Cluster(nodes) => Link::Cluster(Cluster::new(nodes, address.certificates)?),
            servers => Link::Single(Single::new(servers, address.certificates, operations)?),
        };
        Ok(Self { shown, root, link })
    }

    async fn command(&self, cmd: &Cmd) -> Result<Value, Refusal> {
        match &self.link {
            Link::Single(single) => single.command(cmd).await,
            Link::Cluster(cluster) => cluster.command(cmd, is_heavy(cmd)).await,
        }
    }

    /// Several commands, each about one key; their answers in order.
    async fn commands(&self, cmds: Vec<Cmd>) -> Result<Vec<Value>, Refusal> {
        match &self.link {
            Link::Single(single) => {
                let mut pipeline = Pipeline::with_capacity(cmds.len());
                for cmd in cmds {
                    pipeline.add_command(cmd);
                }
                single.pipeline(&pipeline).await
            }
            Link::Cluster(cluster) => cluster.commands(cmds).await,
        }
    }

    async fn count_existing(&self, names: &[String]) -> Result<usize, Refusal> {
        let exists = |name: &String| {
            let mut cmd = redis::cmd("EXISTS");
            cmd.arg(name);
            cmd
        };
        let answers = self.commands(names.iter().map(exists).collect()).await?;
        let mut count = 0;
        for answer in answers {
            match answer {
                Value::Int(0) => break,
                Value::Int(_) => count += 1,
                other => return Err(unexpected("EXISTS", &other)),
            }
        }
        Ok(count)
    }

    /// The first bytes of a value, past the driver; how many there are, as no value of ours is empty. `None` where
    /// only the driver gets there.
    async fn heavy_range(
        &self,
        name: &str,
        bytes: u64,
        into: Destination<'_>,
    ) -> Result<Option<usize>, Refusal> {
        let Link::Single(single) = &self.link else {
            return Ok(None);
        };
        let end = bytes.saturating_sub(1).to_string();
        let words = ["GETRANGE", name, "0", &end];
        let command = words.map(|word| vec![Bytes::copy_from_slice(word.as_bytes())]);
        match single.heavy(&command, into).await.transpose()? {
            Some(Reply::Bulk(len)) => Ok(Some(len.unwrap_or(0))),
            Some(Reply::Word(_)) => Err(Refusal::Protocol("GETRANGE is answered by a word".into())),
            None => Ok(None),
        }
    }

    /// The first bytes of a value, over the driver.
    async fn light_range(&self, name: &str, bytes: u64) -> Result<Option<Bytes>, Refusal> {
        let mut cmd = redis::cmd("GETRANGE");
        cmd.arg(name).arg(0).arg(bytes.saturating_sub(1));
        match self.command(&cmd).await? {
            Value::BulkString(bytes) if bytes.is_empty() => Ok(None),
            Value::BulkString(bytes) => Ok(Some(Bytes::from(bytes))),
            Value::Nil => Ok(None),
            other => Err(unexpected("GETRANGE", &other)),
        }
    }
}

/// Whether a command carries or brings a large value.
fn is_heavy(cmd: &Cmd) -> bool {
    let verb = cmd.args_iter().next();
    matches!(verb, Some(redis::Arg::Simple(b"SET" | b"GETRANGE")))
}

impl Client for Redis {
    fn put<'a>(
        &'a self,
        name: &'a str,
        value: Vec<Bytes>,
        ttl: Option<Duration>,
    ) -> Answer<'a, ()> {
        Box::pin(async move {
            let ttl = ttl.map(|ttl| (ttl.as_millis().max(1) as u64).to_string());
            if let Link::Single(single) = &self.link {
                let word = |word: &str| vec![Bytes::copy_from_slice(word.as_bytes())];
                let mut command = vec![word("SET"), word(name), value.clone()];
                if let Some(ttl) = &ttl {
                    command.extend([word("PX"), word(ttl)]);
                }
                match single
                    .heavy(&command, Destination::Nothing)
                    .await
                    .transpose()?
                {
                    Some(Reply::Word(done)) if done == "OK" => return Ok(()),
                    Some(_) => return Err(Refusal::Protocol("SET is not answered by OK".into())),
                    None => {}
                }
            }
            let len: usize = value.iter().map(Bytes::len).sum();
            let mut cmd = redis::cmd("SET");
            cmd.reserve_space_for_args([name.len(), len, 2, 20]);
            cmd.arg(name);
            {
                use std::io::Write as _;
                let mut writer = cmd.writer_for_next_arg();
                for piece in &value {
                    writer.write_all(piece).expect("memory takes all");
                }
            }
            // Copied: the chunk's memory is free from here on.
            drop(value);
            if let Some(ttl) = ttl {
                cmd.arg("PX").arg(ttl);
            }
            match self.command(&cmd).await? {
                Value::Okay => Ok(()),
                other => Err(unexpected("SET", &other)),
            }
        })
    }

    fn prefix<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(self.count_existing(names))
    }

    fn get<'a>(&'a self, name: &'a str, into: &'a mut Landing) -> Answer<'a, bool> {
        Box::pin(async move {
            // One more than is taken tells that it is too large.
            let bytes = into.max_bytes().saturating_add(1);
            if let Some(len) = self
                .heavy_range(name, bytes, Destination::Landing(into))
                .await?
            {
                return Ok(len > 0);
            }
            match self.light_range(name, bytes).await? {
                Some(value) => into.take(&value).await.map(|()| true),
                None => Ok(false),
            }
        })
    }

    fn begin<'a>(&'a self, name: &'a str, max_bytes: u64) -> Answer<'a, Option<Bytes>> {
        Box::pin(async move {
            let mut begin = Vec::new();
            let into = Destination::Memory(&mut begin, max_bytes);
            match self.heavy_range(name, max_bytes, into).await? {
                Some(0) => Ok(None),
                Some(_) => Ok(Some(begin.into())),
                None => self.light_range(name, max_bytes).await,
            }
        })
    }

    fn remove<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize> {
        Box::pin(async move {
            let unlink = |name: &String| {
                let mut cmd = redis::cmd("UNLINK");
                cmd.arg(name);
                cmd
            };
            let mut count = 0;
            for answer in self.commands(names.iter().map(unlink).collect()).await? {
                match answer {
                    Value::Int(removed) => count += usize::from(removed > 0),
                    other => return Err(unexpected("UNLINK", &other)),
                }
            }
            Ok(count)
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<String>) -> Answer<'a, Page> {
        Box::pin(async move {
            let (names, cursor) = match &self.link {
                Link::Single(single) => {
                    let at = cursor.as_deref().unwrap_or("0");
                    let found = single.command(&scan(prefix, at)).await?;
                    let (at, names) = scanned(found)?;
                    (names, (at != "0").then_some(at))
                }
                Link::Cluster(cluster) => cluster.scan(prefix, cursor).await?,
            };
            let strlen = |name: &String| {
                let mut cmd = redis::cmd("STRLEN");
                cmd.arg(name);
                cmd
            };
            let sizes = if names.is_empty() {
                Vec::new()
            } else {
                self.commands(names.iter().map(strlen).collect()).await?
            };
            let sized = names.into_iter().zip(sizes);
            let names = sized.map(|(name, size)| match size {
                Value::Int(bytes) => (name, bytes.cast_unsigned()),
                _ => (name, 0),
            });
            Ok(Page {
                names: names.collect(),
                cursor,
            })
        })
    }

    fn health<'a>(&'a self) -> Answer<'a, Vec<Finding>> {
        Box::pin(self.examine())
    }
}

/// One page of a node's keys that begin with `prefix`.
fn scan(prefix: &str, cursor: &str) -> Cmd {
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for letter in prefix.chars() {
        if "*?[]\\^".contains(letter) {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern.push('*');
    let mut cmd = redis::cmd("SCAN");
    cmd.arg(cursor).arg("MATCH").arg(pattern);
    // What is no string is not ours, and has no length to ask for.
    cmd.arg("COUNT").arg(1000).arg("TYPE").arg("string");
    cmd
}

/// The next cursor and the keys of a page.
fn scanned(found: Value) -> Result<(String, Vec<String>), Refusal> {
    let kind = unexpected("SCAN", &found);
    let Value::Array(parts) = found else {
        return Err(kind);
    };
    let Ok([Value::BulkString(cursor), Value::Array(keys)]) = <[Value; 2]>::try_from(parts) else {
        return Err(kind);
    };
    // A key that is no text is not ours.
    let text = |key: Value| match key {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        _ => None,
    };
    let cursor = String::from_utf8(cursor).map_err(|_| kind)?;
    Ok((cursor, keys.into_iter().filter_map(text).collect()))
}

impl Redis {
    async fn examine(&self) -> Result<Vec<Finding>, Refusal> {
        let mut findings = Vec::new();
        // The first opens the connection.
        let name = [format!("{}probe", self.root)];
        self.count_existing(&name).await?;
        let began = Instant::now();
        self.count_existing(&name).await?;
        findings.push(Finding {
            what: "reach",
            ok: true,
            words: format!(
                "{} answers in {:.2} ms",
                self.shown,
                began.elapsed().as_secs_f64() * 1e3
            ),
        });
        findings.push(self.rights().await);
        match self.info().await {
            Ok(info) => findings.extend(judge_memory(&info)),
            Err(refusal) => findings.push(Finding {
                what: "memory",
                ok: true,
                words: format!("INFO is not permitted, so nothing is known ({refusal})"),
            }),
        }
        Ok(findings)
    }

    async fn rights(&self) -> Finding {
        let name = format!("{}probe.{}", self.root, std::process::id());
        let tried = async {
            let ttl = Some(Duration::from_secs(10));
            self.put(&name, vec![Bytes::from_static(b"probe")], ttl)
                .await
                .map_err(|refusal| ("SET", refusal))?;
            self.begin(&name, 16)
                .await
                .map_err(|refusal| ("GETRANGE", refusal))?;
            self.list(&name, None)
                .await
                .map_err(|refusal| ("SCAN and STRLEN", refusal))?;
            self.remove(std::slice::from_ref(&name))
                .await
                .map_err(|refusal| ("UNLINK", refusal))
        };
        let (ok, words) = match tried.await {
            Ok(_) => (true, "it stores, reads, lists and removes".to_owned()),
            Err((command, refusal)) => (
                false,
                format!(
                    "{command} is refused ({refusal}); permit SET, GETRANGE, EXISTS, UNLINK, SCAN and STRLEN{} for keys \
                     that begin with {:?}",
                    match &self.link {
                        Link::Single(single) => single.rights(),
                        Link::Cluster(_) => ", PING and CLUSTER SLOTS",
                    },
                    self.root
                ),
            ),
        };
        Finding {
            what: "rights",
            ok,
            words,
        }
    }

    async fn info(&self) -> Result<String, Refusal> {
        let mut cmd = redis::cmd("INFO");
        cmd.arg("memory");
        let found = match &self.link {
            Link::Single(single) => single.command(&cmd).await?,
            Link::Cluster(cluster) => cluster.of_any(&cmd).await?,
        };
        match found {
            Value::BulkString(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Value::VerbatimString { text, .. } => Ok(text),
            other => Err(unexpected("INFO", &other)),
        }
    }
}

fn judge_memory(info: &str) -> Option<Finding> {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    let most: u64 = field("maxmemory")?.trim().parse().ok()?;
    let policy = field("maxmemory_policy")?.trim();
    let (ok, words) = if most == 0 {
        (
            false,
            "maxmemory is not set: the server grows until its machine has no memory; set maxmemory, and \
             maxmemory-policy allkeys-lru"
                .to_owned(),
        )
    } else if policy == "noeviction" {
        (
            false,
            format!(
                "maxmemory is {most} bytes and maxmemory-policy noeviction: once full it takes no more; set it to allkeys-lru"
            ),
        )
    } else {
        (
            true,
            format!("maxmemory is {most} bytes, maxmemory-policy {policy}"),
        )
    };
    Some(Finding {
        what: "memory",
        ok,
        words,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_pattern() {
        let packed = scan("a*[b]?\\", "0").get_packed_command();
        let packed = String::from_utf8(packed).expect("text");
        assert!(packed.contains("a\\*\\[b\\]\\?\\\\*\r\n"), "{packed}");
    }

    #[test]
    fn a_server_without_a_limit_is_spoken_of() {
        let judged = |most: &str, policy: &str| {
            let info = format!("# Memory\r\nmaxmemory:{most}\r\nmaxmemory_policy:{policy}\r\n");
            judge_memory(&info).expect("both fields are there")
        };
        assert!(judged("1024", "allkeys-lru").ok);
        assert!(judged("0", "noeviction").words.contains("set maxmemory"));
        assert!(judged("1024", "noeviction").words.contains("allkeys-lru"));
        assert_eq!(judge_memory("# Memory"), None);
    }
}
