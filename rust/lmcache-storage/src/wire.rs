//! The messages of the lookup protocol: msgpack arrays, each in one ZMTP frame.
//!
//! ```text
//! request  [version, message_id, kind, lookup_id, namespace, hashes]
//! answer   [version, message_id, status, hit_chunks, lease_ms]
//! places   [version, message_id, places]
//! ```
//!
//! The array lengths are exact; whatever changes them changes [`VERSION`]. The first two fields keep their
//! place in every version, so that a message of a foreign version can be refused by its id.

use lmcache_core::hash::ChunkHash;
use lmcache_memory::object::Place;
use rmp::decode::{Bytes, read_array_len, read_bin_len, read_int, read_str_len};
use rmp::encode::{write_array_len, write_bin, write_bin_len, write_str, write_uint};
use thiserror::Error;

/// The protocol's version. There is one; others are refused.
pub const VERSION: u64 = 1;

/// The largest message that is accepted, in bytes: 65,536 hashes and room for long ids.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// The longest id of a lookup that is accepted, in bytes: it is kept as long as its lease.
pub const MAX_LOOKUP_ID_BYTES: usize = 512;

/// The longest namespace that is accepted, in bytes: the longest there is.
pub const MAX_NAMESPACE_BYTES: usize = lmcache_core::key::MAX_NAMESPACE_BYTES;

const REQUEST_FIELDS: u32 = 6;
const ANSWER_FIELDS: u32 = 5;
const PLACES_FIELDS: u32 = 3;

/// Offset and length of a chunk, 64 bits each.
const PLACE_BYTES: usize = 16;

const LOOKUP: u64 = 1;
const RELEASE: u64 = 2;
const PING: u64 = 3;
const CLEAR: u64 = 4;
const LOCATE: u64 = 5;
const DONE: u64 = 6;
const MAP: u64 = 7;

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    /// How long is the stored prefix? It is leased under `lookup_id`, in place of what that id held before.
    Lookup {
        /// Comes back in the answer.
        message_id: u64,
        /// Names the lease.
        lookup_id: &'a str,
        /// Everything but the tokens that decides a chunk's bytes.
        namespace: &'a str,
        /// The prompt's chain, from its first chunk on.
        hashes: Vec<ChunkHash>,
    },
    /// The lease is not needed any more. Has no answer.
    Release {
        /// Unique among the client's messages.
        message_id: u64,
        /// Names the lease.
        lookup_id: &'a str,
    },
    /// Is anybody there?
    Ping {
        /// Comes back in the answer.
        message_id: u64,
    },
    /// Forget every chunk. Answered when it is done.
    Clear {
        /// Comes back in the answer.
        message_id: u64,
    },
    /// Where are these chunks? They are held until they are done with. Answered by places.
    Locate {
        /// Comes back in the answer.
        message_id: u64,
        /// Names the lease that is shared, and the hold.
        lookup_id: &'a str,
        /// Everything but the tokens that decides a chunk's bytes.
        namespace: &'a str,
        /// A part of the prompt's chain.
        hashes: Vec<ChunkHash>,
    },
    /// What was located is read. The answer has the number of chunks that were held.
    Done {
        /// Comes back in the answer.
        message_id: u64,
        /// Names the hold.
        lookup_id: &'a str,
    },
    /// Asks for the descriptor of the pool's memory, which comes with the answer.
    Map {
        /// Comes back in the answer.
        message_id: u64,
    },
}

impl Request<'_> {
    /// The id the client gave the message.
    pub fn message_id(&self) -> u64 {
        match self {
            Self::Lookup { message_id, .. }
            | Self::Release { message_id, .. }
            | Self::Ping { message_id }
            | Self::Clear { message_id }
            | Self::Locate { message_id, .. }
            | Self::Done { message_id, .. }
            | Self::Map { message_id } => *message_id,
        }
    }
}

/// How a message fared. The code of a status never changes its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Answered.
    Ok = 0,
    /// Not a message of this protocol.
    Malformed = 1,
    /// A message of another version; the answer's own version is the server's.
    ForeignVersion = 2,
    /// No request of this version has that kind.
    UnknownKind = 3,
    /// The id is not above those the connection has sent before.
    Replayed = 4,
    /// The index could not answer.
    Failed = 5,
}

impl Status {
    /// The number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }

    fn from_code(code: u64) -> Option<Self> {
        const ALL: [Status; 6] = [
            Status::Ok,
            Status::Malformed,
            Status::ForeignVersion,
            Status::UnknownKind,
            Status::Replayed,
            Status::Failed,
        ];
        ALL.into_iter()
            .find(|status| u64::from(status.code()) == code)
    }
}

/// What the server says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The id of the message it answers; 0 if that could not be read.
    pub message_id: u64,
    /// How the message fared. Unless it is `Ok`, the numbers below are 0.
    pub status: Status,
    /// Chunks of the longest stored prefix.
    pub hit_chunks: u32,
    /// How long the lease behind the answer holds, in milliseconds from the moment it was given; 0 when
    /// nothing is leased.
    pub lease_ms: u32,
}

/// Why a request is refused, as far as it could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The id of the message; 0 if that could not be read.
    pub message_id: u64,
    /// The reason.
    pub status: Status,
}

/// Why an answer cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not an answer of this protocol.
    #[error(
        "lookup answer of {num_bytes} bytes is malformed; is something else listening on the socket?"
    )]
    Malformed {
        /// Size of what came.
        num_bytes: usize,
    },
    /// The server speaks another version.
    #[error(
        "lookup answer has version {found}, this process speaks {VERSION}; run one lmcache_rs release in all processes"
    )]
    ForeignVersion {
        /// Version of the answer.
        found: u64,
    },
}

/// A lookup request. `packed_hashes` holds 32 bytes a chunk.
///
/// What is larger than [`MAX_MESSAGE_BYTES`] is written all the same, and refused by the server.
pub fn encode_lookup(
    message_id: u64,
    lookup_id: &str,
    namespace: &str,
    packed_hashes: &[u8],
) -> Vec<u8> {
    encode_request(message_id, LOOKUP, lookup_id, namespace, packed_hashes)
}

/// A release request.
pub fn encode_release(message_id: u64, lookup_id: &str) -> Vec<u8> {
    encode_request(message_id, RELEASE, lookup_id, "", &[])
}

/// A ping request.
pub fn encode_ping(message_id: u64) -> Vec<u8> {
    encode_request(message_id, PING, "", "", &[])
}

/// A request to forget every chunk.
pub fn encode_clear(message_id: u64) -> Vec<u8> {
    encode_request(message_id, CLEAR, "", "", &[])
}

/// A request for the places of chunks.
pub fn encode_locate(
    message_id: u64,
    lookup_id: &str,
    namespace: &str,
    packed_hashes: &[u8],
) -> Vec<u8> {
    encode_request(message_id, LOCATE, lookup_id, namespace, packed_hashes)
}

/// Says that what was located is read.
pub fn encode_done(message_id: u64, lookup_id: &str) -> Vec<u8> {
    encode_request(message_id, DONE, lookup_id, "", &[])
}

/// A request for the pool's memory.
pub fn encode_map(message_id: u64) -> Vec<u8> {
    encode_request(message_id, MAP, "", "", &[])
}

fn encode_request(
    message_id: u64,
    kind: u64,
    lookup_id: &str,
    namespace: &str,
    packed_hashes: &[u8],
) -> Vec<u8> {
    let len = lookup_id.len() + namespace.len() + packed_hashes.len();
    let mut out = Vec::with_capacity(len + 32);
    put_header(&mut out, REQUEST_FIELDS, message_id);
    put_uint(&mut out, kind);
    write_str(&mut out, lookup_id).expect(WRITABLE);
    write_str(&mut out, namespace).expect(WRITABLE);
    write_bin(&mut out, packed_hashes).expect(WRITABLE);
    out
}

/// An answer, as the server sends it.
pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let mut out = Vec::with_capacity(24);
    put_header(&mut out, ANSWER_FIELDS, answer.message_id);
    put_uint(&mut out, u64::from(answer.status.code()));
    put_uint(&mut out, u64::from(answer.hit_chunks));
    put_uint(&mut out, u64::from(answer.lease_ms));
    out
}

/// The answer to a request for places.
pub fn encode_places(message_id: u64, places: impl ExactSizeIterator<Item = Place>) -> Vec<u8> {
    let len = places.len() * PLACE_BYTES;
    let mut out = Vec::with_capacity(len + 24);
    put_header(&mut out, PLACES_FIELDS, message_id);
    let len = u32::try_from(len).expect("a message holds fewer than 2^28 hashes");
    write_bin_len(&mut out, len).expect(WRITABLE);
    for Place { offset, len } in places {
        out.extend(offset.to_be_bytes());
        out.extend(len.to_be_bytes());
    }
    out
}

/// Reads the answer to a request for places: the id of the request, and what it asked for.
pub fn decode_places(message: &[u8]) -> Result<(u64, Vec<Place>), WireError> {
    let malformed = WireError::Malformed {
        num_bytes: message.len(),
    };
    let mut reader = Reader(message);
    let (num_fields, version, message_id) = reader.header().ok_or(malformed.clone())?;
    if version != VERSION {
        return Err(WireError::ForeignVersion { found: version });
    }
    let packed = reader.binary().filter(|_| reader.is_at_end());
    let packed = packed
        .filter(|packed| num_fields == PLACES_FIELDS && packed.len().is_multiple_of(PLACE_BYTES));
    let (numbers, _) = packed.ok_or(malformed)?.as_chunks::<8>();
    let places = numbers.chunks_exact(2).map(|pair| Place {
        offset: u64::from_be_bytes(pair[0]),
        len: u64::from_be_bytes(pair[1]),
    });
    Ok((message_id, places.collect()))
}

/// Reads an answer.
pub fn decode_answer(message: &[u8]) -> Result<Answer, WireError> {
    let malformed = WireError::Malformed {
        num_bytes: message.len(),
    };
    let mut reader = Reader(message);
    let (num_fields, version, message_id) = reader.header().ok_or(malformed.clone())?;
    if version != VERSION {
        return Err(WireError::ForeignVersion { found: version });
    }
    let mut body = || {
        let answer = Answer {
            message_id,
            status: Status::from_code(reader.uint()?)?,
            hit_chunks: reader.uint()?.try_into().ok()?,
            lease_ms: reader.uint()?.try_into().ok()?,
        };
        reader.is_at_end().then_some(answer)
    };
    (num_fields == ANSWER_FIELDS)
        .then(&mut body)
        .flatten()
        .ok_or(malformed)
}

/// Reads a request; one that cannot be served is refused by its id.
pub fn decode_request(message: &[u8]) -> Result<Request<'_>, Refusal> {
    let mut reader = Reader(message);
    let Some((num_fields, version, message_id)) = reader.header() else {
        return Err(Refusal {
            message_id: 0,
            status: Status::Malformed,
        });
    };
    let refuse = |status| Refusal { message_id, status };
    if version != VERSION {
        return Err(refuse(Status::ForeignVersion));
    }
    let malformed = refuse(Status::Malformed);
    if num_fields != REQUEST_FIELDS {
        return Err(malformed);
    }
    let kind = reader.uint().ok_or(malformed)?;
    if !(LOOKUP..=MAP).contains(&kind) {
        return Err(refuse(Status::UnknownKind));
    }
    let (lookup_id, namespace, packed) = reader.body().ok_or(malformed)?;
    if lookup_id.len() > MAX_LOOKUP_ID_BYTES || namespace.len() > MAX_NAMESPACE_BYTES {
        return Err(malformed);
    }
    let unused = |is_empty: bool| is_empty.then_some(()).ok_or(malformed);
    Ok(match kind {
        LOOKUP | LOCATE => {
            let hashes = ChunkHash::from_packed(packed).ok_or(malformed)?;
            match kind {
                LOOKUP => Request::Lookup {
                    message_id,
                    lookup_id,
                    namespace,
                    hashes,
                },
                _ => Request::Locate {
                    message_id,
                    lookup_id,
                    namespace,
                    hashes,
                },
            }
        }
        RELEASE | DONE => {
            unused(namespace.is_empty() && packed.is_empty())?;
            match kind {
                RELEASE => Request::Release {
                    message_id,
                    lookup_id,
                },
                _ => Request::Done {
                    message_id,
                    lookup_id,
                },
            }
        }
        _ => {
            unused(lookup_id.is_empty() && namespace.is_empty() && packed.is_empty())?;
            match kind {
                CLEAR => Request::Clear { message_id },
                MAP => Request::Map { message_id },
                _ => Request::Ping { message_id },
            }
        }
    })
}

const WRITABLE: &str = "a Vec takes every byte";

fn put_header(out: &mut Vec<u8>, num_fields: u32, message_id: u64) {
    write_array_len(out, num_fields).expect(WRITABLE);
    put_uint(out, VERSION);
    put_uint(out, message_id);
}

fn put_uint(out: &mut Vec<u8>, value: u64) {
    write_uint(out, value).expect(WRITABLE);
}

/// What is left of a message. Nothing is allocated by a length that the message merely states.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn read<T, E>(&mut self, read: impl FnOnce(&mut Bytes<'a>) -> Result<T, E>) -> Option<T> {
        let mut bytes = Bytes::new(self.0);
        let value = read(&mut bytes).ok()?;
        self.0 = bytes.remaining_slice();
        Some(value)
    }

    /// Number of fields, version, message id.
    fn header(&mut self) -> Option<(u32, u64, u64)> {
        Some((self.read(read_array_len)?, self.uint()?, self.uint()?))
    }

    /// Lookup id, namespace and packed hashes, with nothing after them.
    fn body(&mut self) -> Option<(&'a str, &'a str, &'a [u8])> {
        let body = (self.text()?, self.text()?, self.binary()?);
        self.is_at_end().then_some(body)
    }

    fn uint(&mut self) -> Option<u64> {
        self.read(read_int)
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.read(read_str_len)?;
        str::from_utf8(self.split(len)?).ok()
    }

    fn binary(&mut self) -> Option<&'a [u8]> {
        let len = self.read(read_bin_len)?;
        self.split(len)
    }

    fn split(&mut self, len: u32) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len as usize)?;
        self.0 = tail;
        Some(head)
    }

    fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests;
