//! What a remote tier asks of a server: the seam between the tier and each kind of store.
//!
//! A client knows one kind of server and nothing of chunks. It retries nothing but a connection that had gone
//! stale, and has no deadline: the tier drops a call that takes too long, and a client must survive that.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;

use super::landing::Landing;

/// A call that is under way.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send + 'a>>;

/// A store on the network, which keeps values under names.
///
/// # Contract
///
/// Calls come from several tasks at once, and a call may be dropped at any moment: whatever connection it used
/// is then not used again. Words of a [`Refusal`] and the `Debug` form hold no credentials.
pub trait Client: fmt::Debug + Send + Sync {
    /// Stores a value whole or not at all. What is there under the name may stay or be replaced. `ttl` counts
    /// from the write, and comes with it: no value is ever without its end.
    ///
    /// The value comes in pieces, which lie one behind the other.
    fn put<'a>(&'a self, name: &'a str, value: Vec<Bytes>, ttl: Option<Duration>)
    -> Answer<'a, ()>;

    /// How many of these names, from the first to the first gap, are there. One round trip where the server
    /// can.
    fn prefix<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize>;

    /// The value, into where it is to go, as far as that wants it; false if there is none. One too large for
    /// that is refused as [`Refusal::TooLarge`], and not read to its end.
    fn get<'a>(&'a self, name: &'a str, into: &'a mut Landing) -> Answer<'a, bool>;

    /// The first `max_bytes` of a value, or all of a shorter one; `None` if there is none.
    fn begin<'a>(&'a self, name: &'a str, max_bytes: u64) -> Answer<'a, Option<Bytes>>;

    /// Removes values; how many were there.
    fn remove<'a>(&'a self, names: &'a [String]) -> Answer<'a, usize>;

    /// One page of the names that begin with `prefix`, in no order; some may come twice. `cursor` is that of
    /// the page before.
    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<String>) -> Answer<'a, Page>;

    /// Whether it ends values by itself, as `ttl` of a put asks.
    fn ends_values(&self) -> bool {
        true
    }

    /// What there is to say of the server: whether it is reached and how fast, what it permits, how it treats
    /// what it keeps.
    fn health<'a>(&'a self) -> Answer<'a, Vec<Finding>>;
}

/// Some of the names that a server keeps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// Each with the bytes of its value.
    pub names: Vec<(String, u64)>,
    /// Where the next page begins; `None` behind the last.
    pub cursor: Option<String>,
}

/// One thing that was found out about a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in one word.
    pub what: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was found, and what to change if it is not.
    pub words: String,
}

/// Why a call came to nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// No connection, or one that broke.
    Unreachable(String),
    /// No answer in time.
    Timeout,
    /// The server knows us not, or does not let us.
    Denied(String),
    /// The server takes no more.
    Full(String),
    /// The value has more bytes than it may.
    TooLarge,
    /// The answer is none of the protocol: something else listens there.
    Protocol(String),
    /// Any other error that the server reports.
    Server(String),
}

impl Refusal {
    /// One word, for counters and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Timeout => "timeout",
            Self::Denied(_) => "denied",
            Self::Full(_) => "full",
            Self::TooLarge => "too_large",
            Self::Protocol(_) => "protocol",
            Self::Server(_) => "server",
        }
    }

    /// Whether the next call would most likely fare no better, whatever it asks.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(
            self,
            Self::Unreachable(_) | Self::Timeout | Self::Protocol(_)
        )
    }

    /// Whether the next put would most likely fare no better.
    pub(crate) fn stops_puts(&self) -> bool {
        matches!(self, Self::Denied(_) | Self::Full(_))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(words)
            | Self::Denied(words)
            | Self::Full(words)
            | Self::Protocol(words)
            | Self::Server(words) => write!(f, "{}: {words}", self.name()),
            Self::Timeout => f.write_str("timeout: no answer in time"),
            Self::TooLarge => f.write_str("too_large: the value has more bytes than it may"),
        }
    }
}

impl std::error::Error for Refusal {}
