//! The form in which a chunk lies in a tier below host memory: it says itself whose it is and what, and
//! whether it is whole.
//!
//! A header of whole pages, then the payload. All numbers are little-endian.
//!
//! ```text
//!  0  magic "LMCRSOBJ"
//!  8  u32 version            12  u32 bytes of the header, a multiple of 4096
//! 16  u64 bytes of the payload
//! 24  u64 CRC-64/NVME of header and payload, these eight bytes taken as zero
//! 32  u32 bytes of the key   36  u32 tokens, 0 if unknown     40  u32 positions, 0 or one a token
//! 44  u8 format              45  u8 bytes of the dtype        46  u16 zero
//! 48  u32 layers             52  u64 hidden                   60  u32 tokens of a block
//! 64  key, dtype, zeros up to a multiple of 8, positions as i64, zeros up to the end of the header
//! ```
//!
//! An object whose payload is packed ([`crate::compression`]) is one of version 2. Its header has 24 bytes more before the
//! key, and its sum is over the payload as it is stored:
//!
//! ```text
//! 64  u8 packing, 1             65  u8 planes: 1, 2, 4 or 8    66  six zeros
//! 72  u64 bytes of the payload as stored
//! 80  u64 CRC-64/NVME of the payload
//! 88  key, dtype, zeros up to a multiple of 8, positions as i64, zeros up to the end of the header
//! ```
//!
//! There is one way to write a header, and a reader takes no other. The checksum is a CRC of 64 bits: damage
//! within 64 neighbouring bits is always seen, any other goes unseen once in 2^64. It guards against a disk
//! and a wire, not against somebody who may write to them.

use std::fmt;

use crc_fast::{CrcAlgorithm, Digest};
use lmcache_core::hash::ChunkHash;
use lmcache_core::key::MAX_KEY_BYTES;

/// What every object begins with.
pub const MAGIC: [u8; 8] = *b"LMCRSOBJ";
/// The version of an object whose payload lies as it is.
pub const VERSION: u32 = 1;
/// The version of an object whose payload is packed.
pub const PACKED_VERSION: u32 = 2;
/// A header is so many bytes, or a multiple; a payload behind it is aligned for direct I/O.
pub const PAGE_BYTES: usize = 4096;

const FIXED_BYTES: usize = 64;
const PACKED_FIXED_BYTES: usize = 88;
/// Planes of bytes, each a frame of zstd; the one packing there is.
const BYTE_PLANES: u8 = 1;
const CHECKSUM_AT: usize = 24;
/// Far more tokens than any chunk has.
const MAX_TOKENS: u32 = 1 << 20;

/// Why an object is not used. Each is a miss, counted under its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Defect {
    /// It ends before it should.
    Truncated,
    /// It is none of ours.
    Magic,
    /// It was written by another version.
    Version,
    /// It is packed in a way that this version does not know.
    Packing,
    /// It is the chunk of another key.
    Foreign,
    /// Header or payload are not what was written.
    Checksum,
    /// It is longer than it should be.
    Length,
    /// Its header, or its packed payload, is what no writer writes.
    Malformed,
}

impl Defect {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Truncated,
        Self::Magic,
        Self::Version,
        Self::Packing,
        Self::Foreign,
        Self::Checksum,
        Self::Length,
        Self::Malformed,
    ];

    /// One word, for counters and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Magic => "magic",
            Self::Version => "version",
            Self::Packing => "packing",
            Self::Foreign => "foreign",
            Self::Checksum => "checksum",
            Self::Length => "length",
            Self::Malformed => "malformed",
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the bytes of a chunk are to be looked at; see `lmcache_core::layout` for the forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `[layers, tokens, 2, hidden]`.
    KvT2d,
    /// `[layers, tokens, hidden]`.
    KvMla,
    /// `[layers, blocks, hidden]`, engine blocks as they are.
    Opaque,
}

impl Format {
    const CODES: [(u8, Self, &'static str); 3] = [
        (1, Self::KvT2d, "KV_T2D"),
        (2, Self::KvMla, "KV_MLA_FMT"),
        (3, Self::Opaque, "OPAQUE"),
    ];

    /// Its name in Python.
    pub fn name(self) -> &'static str {
        Self::row(|row| row.1 == self).2
    }

    /// The format of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut rows = Self::CODES.into_iter();
        rows.find(|row| row.2 == name).map(|row| row.1)
    }

    fn row(mut is_it: impl FnMut(&(u8, Self, &'static str)) -> bool) -> (u8, Self, &'static str) {
        let mut rows = Self::CODES.into_iter();
        rows.find(|row| is_it(row)).expect("the table names all")
    }
}

/// The form of every chunk of one namespace: what makes a tensor of the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// Order of the axes.
    pub format: Format,
    /// Layers of the chunk.
    pub num_layers: u32,
    /// Elements of one token in one plane, or of one opaque block.
    pub hidden: u64,
    /// Tokens of an opaque block; 1 where tokens are addressable.
    pub block_tokens: u32,
    /// Element type by its name in torch, e.g. `bfloat16`.
    pub dtype: String,
}

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Text form of the chunk's whole key: namespace and hash.
    pub key: String,
    /// Bytes of the payload.
    pub payload_bytes: u64,
    /// Tokens of the chunk; 0 if nobody said.
    pub num_tokens: u32,
    /// How the payload is to be looked at, if somebody said.
    pub form: Option<Form>,
    /// Positions of the tokens in their prompt, if they are known; `num_tokens` of them.
    pub positions: Option<Box<[i64]>>,
}

/// How the payload of a packed object lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Planes that its bytes were split into: 1, 2, 4 or 8.
    pub planes: u8,
    /// Bytes of the payload as stored.
    pub packed_bytes: u64,
    /// CRC-64/NVME of the payload itself.
    pub payload_checksum: u64,
}

impl Packing {
    /// Whether bytes can be split so.
    pub fn has_planes(planes: usize) -> bool {
        matches!(planes, 1 | 2 | 4 | 8)
    }

    fn read(raw: &[u8]) -> Result<Self, Defect> {
        let planes = raw[65];
        if raw[64] != BYTE_PLANES || !Self::has_planes(planes.into()) {
            return Err(Defect::Packing);
        }
        if raw[66..72].iter().any(|byte| *byte != 0) {
            return Err(Defect::Malformed);
        }
        Ok(Self {
            planes,
            packed_bytes: u64_at(raw, 72),
            payload_checksum: u64_at(raw, 80),
        })
    }
}

/// The text form of a chunk's key.
pub fn key_text(namespace: &str, hash: ChunkHash) -> String {
    format!("{namespace}@hash={}", hash.to_hex())
}

/// The namespace in the text form of a chunk's key; `None` if the text is no key.
pub fn namespace_in(key: &str) -> Option<&str> {
    key.rsplit_once("@hash=").map(|(namespace, _)| namespace)
}

impl Description {
    /// Bytes of its header; `None` if it says more than a header holds.
    pub fn header_bytes(&self) -> Option<usize> {
        self.sizes(FIXED_BYTES).map(|sizes| sizes.header)
    }

    fn sizes(&self, fixed_bytes: usize) -> Option<Sizes> {
        let dtype = self.form.as_ref().map_or("", |form| &form.dtype);
        let num_positions = self
            .positions
            .as_ref()
            .map_or(0, |positions| positions.len());
        let whole_positions = num_positions == 0 || num_positions == self.num_tokens as usize;
        if self.key.len() > MAX_KEY_BYTES
            || dtype.len() > usize::from(u8::MAX)
            || self.num_tokens > MAX_TOKENS
            || self
                .positions
                .as_ref()
                .is_some_and(|positions| positions.is_empty())
            || !whole_positions
        {
            return None;
        }
        Some(Sizes::of(
            fixed_bytes,
            self.key.len(),
            dtype.len(),
            num_positions,
        ))
    }

    /// Seals a payload: its header, with the checksum over both. `None` if it says more than a header holds.
    ///
    /// # Panics
    /// If the payload is not `payload_bytes` long.
    pub fn seal(&self, payload: &[u8]) -> Option<Vec<u8>> {
        assert_eq!(payload.len() as u64, self.payload_bytes, "another payload");
        self.sealed(None, payload)
    }

    /// As [`Description::seal`], of a payload that was packed: `stored` is what it was packed to.
    ///
    /// # Panics
    /// If `stored` is not as long as the packing says, or there are no such planes.
    pub fn seal_packed(&self, packing: &Packing, stored: &[u8]) -> Option<Vec<u8>> {
        assert_eq!(stored.len() as u64, packing.packed_bytes, "another payload");
        assert!(Packing::has_planes(packing.planes.into()), "no such planes");
        self.sealed(Some(packing), stored)
    }

    fn sealed(&self, packing: Option<&Packing>, stored: &[u8]) -> Option<Vec<u8>> {
        let (version, fixed_bytes) = match packing {
            None => (VERSION, FIXED_BYTES),
            Some(_) => (PACKED_VERSION, PACKED_FIXED_BYTES),
        };
        let sizes = self.sizes(fixed_bytes)?;
        let mut header = vec![0; sizes.header];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        let num_positions = self
            .positions
            .as_ref()
            .map_or(0, |positions| positions.len());
        put(0, &MAGIC);
        put(8, &version.to_le_bytes());
        put(16, &self.payload_bytes.to_le_bytes());
        put(32, &(self.key.len() as u32).to_le_bytes());
        put(36, &self.num_tokens.to_le_bytes());
        put(40, &(num_positions as u32).to_le_bytes());
        if let Some(form) = &self.form {
            let code = Format::row(|row| row.1 == form.format).0;
            put(44, &[code, form.dtype.len() as u8]);
            put(48, &form.num_layers.to_le_bytes());
            put(52, &form.hidden.to_le_bytes());
            put(60, &form.block_tokens.to_le_bytes());
            put(fixed_bytes + self.key.len(), form.dtype.as_bytes());
        }
        if let Some(packing) = packing {
            put(64, &[BYTE_PLANES, packing.planes]);
            put(72, &packing.packed_bytes.to_le_bytes());
            put(80, &packing.payload_checksum.to_le_bytes());
        }
        put(fixed_bytes, self.key.as_bytes());
        for (i, position) in self.positions.iter().flatten().enumerate() {
            put(sizes.positions_at + 8 * i, &position.to_le_bytes());
        }
        put(12, &(sizes.header as u32).to_le_bytes());
        let checksum = checksum(&header, stored);
        header[CHECKSUM_AT..][..8].copy_from_slice(&checksum.to_le_bytes());
        Some(header)
    }
}

/// Where the parts of a header lie.
struct Sizes {
    positions_at: usize,
    header: usize,
}

impl Sizes {
    fn of(fixed_bytes: usize, key_bytes: usize, dtype_bytes: usize, num_positions: usize) -> Self {
        let positions_at = (fixed_bytes + key_bytes + dtype_bytes).next_multiple_of(8);
        let header = (positions_at + 8 * num_positions).next_multiple_of(PAGE_BYTES);
        Self {
            positions_at,
            header,
        }
    }
}

fn checksum(header: &[u8], payload: &[u8]) -> u64 {
    let mut digest = digest_of(header);
    digest.update(payload);
    digest.finalize()
}

/// The sum of a header, ready for its payload.
fn digest_of(header: &[u8]) -> Digest {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&header[..CHECKSUM_AT]);
    digest.update(&[0; 8]);
    digest.update(&header[CHECKSUM_AT + 8..]);
    digest
}

/// The sum that objects carry, of any bytes: for what lies beside them, and to measure.
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The header of an object whose payload is yet to be read.
#[derive(Debug)]
pub struct Header<'a> {
    raw: &'a [u8],
    /// What it says; true only once the payload has been held against it.
    pub description: Description,
    /// How its payload is packed; `None` if it lies as it is.
    pub packing: Option<Packing>,
}

impl<'a> Header<'a> {
    /// How many bytes the header has, told by its first page or more of it.
    pub fn bytes_of(first_page: &[u8]) -> Result<usize, Defect> {
        Fixed::read(first_page, VERSION).map(|fixed| fixed.sizes.header)
    }

    /// As [`Header::bytes_of`], whether its payload is packed or not.
    pub fn bytes_of_any(first_page: &[u8]) -> Result<usize, Defect> {
        match Self::bytes_of(first_page) {
            Err(Defect::Version) => {
                Fixed::read(first_page, PACKED_VERSION).map(|fixed| fixed.sizes.header)
            }
            read => read,
        }
    }

    /// Reads a header: `bytes` begin with it, and hold all of it. One of a packed payload is another version's.
    ///
    /// Nothing is checked yet but that it is in the one form a writer gives it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Defect> {
        Self::parse_version(bytes, VERSION)
    }

    /// As [`Header::parse`], of an object whose payload is packed, and no other.
    pub fn parse_packed(bytes: &'a [u8]) -> Result<Self, Defect> {
        Self::parse_version(bytes, PACKED_VERSION)
    }

    /// As [`Header::parse`], whether its payload is packed or not.
    pub fn parse_any(bytes: &'a [u8]) -> Result<Self, Defect> {
        match Self::parse(bytes) {
            Err(Defect::Version) => Self::parse_packed(bytes),
            parsed => parsed,
        }
    }

    fn parse_version(bytes: &'a [u8], version: u32) -> Result<Self, Defect> {
        let fixed = Fixed::read(bytes, version)?;
        let raw = bytes.get(..fixed.sizes.header).ok_or(Defect::Truncated)?;
        let text = |at: usize, len: usize| {
            let text = std::str::from_utf8(&raw[at..at + len]);
            text.map(str::to_owned).map_err(|_| Defect::Malformed)
        };
        let key = text(fixed.fixed_bytes, fixed.key_bytes)?;
        let dtype = text(fixed.fixed_bytes + fixed.key_bytes, fixed.dtype_bytes)?;
        let packing = (version == PACKED_VERSION).then(|| Packing::read(raw));
        let form = match raw[44] {
            0 if raw[45..FIXED_BYTES].iter().all(|byte| *byte == 0) => None,
            code => Some(Form {
                format: Format::CODES
                    .into_iter()
                    .find(|row| row.0 == code)
                    .ok_or(Defect::Malformed)?
                    .1,
                num_layers: u32_at(raw, 48),
                hidden: u64_at(raw, 52),
                block_tokens: u32_at(raw, 60),
                dtype,
            }),
        };
        let positions = (fixed.num_positions > 0).then(|| {
            let bytes = raw[fixed.sizes.positions_at..].chunks_exact(8);
            let position = |bytes: &[u8]| u64_at(bytes, 0).cast_signed();
            bytes.take(fixed.num_positions).map(position).collect()
        });
        let description = Description {
            key,
            payload_bytes: u64_at(raw, 16),
            num_tokens: fixed.num_tokens,
            form,
            positions,
        };
        Ok(Self {
            raw,
            description,
            packing: packing.transpose()?,
        })
    }

    /// Its size in bytes: where the payload begins.
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Never: a header has at least a page.
    pub fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }

    /// Whether it is this key's.
    pub fn require_key(&self, key: &str) -> Result<(), Defect> {
        if self.description.key == key {
            Ok(())
        } else {
            Err(Defect::Foreign)
        }
    }

    /// Bytes behind the header: of the payload, as it is stored.
    pub fn stored_bytes(&self) -> u64 {
        self.packing
            .map_or(self.description.payload_bytes, |packing| {
                packing.packed_bytes
            })
    }

    /// Holds a payload, as it is stored, against the header: from here on both are what was written.
    pub fn verify(&self, payload: &[u8]) -> Result<(), Defect> {
        let mut check = self.check();
        check.update(payload);
        check.finish()
    }

    /// As [`Header::verify`], of a payload that comes in pieces.
    pub fn check(&self) -> Check {
        Check {
            digest: digest_of(self.raw),
            due: u64_at(self.raw, CHECKSUM_AT),
            missing: i128::from(self.stored_bytes()),
        }
    }
}

/// A payload that is held against its header piece by piece, first to last.
#[derive(Debug)]
pub struct Check {
    digest: Digest,
    due: u64,
    missing: i128,
}

impl Check {
    /// Takes in the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.digest.update(piece);
        self.missing -= piece.len() as i128;
    }

    /// Whether what came is what was written.
    pub fn finish(self) -> Result<(), Defect> {
        match self.missing {
            1.. => Err(Defect::Truncated),
            ..0 => Err(Defect::Length),
            0 if self.digest.finalize() == self.due => Ok(()),
            0 => Err(Defect::Checksum),
        }
    }
}

/// Reads a whole object that is to be the chunk of `key`.
pub fn read<'a>(bytes: &'a [u8], key: &str) -> Result<(Description, &'a [u8]), Defect> {
    let header = Header::parse(bytes)?;
    header.require_key(key)?;
    let payload = &bytes[header.len()..];
    header.verify(payload)?;
    Ok((header.description, payload))
}

/// The part of a header that tells its size.
struct Fixed {
    fixed_bytes: usize,
    key_bytes: usize,
    dtype_bytes: usize,
    num_tokens: u32,
    num_positions: usize,
    sizes: Sizes,
}

impl Fixed {
    fn read(bytes: &[u8], version: u32) -> Result<Self, Defect> {
        if bytes.len() >= MAGIC.len() && bytes[..MAGIC.len()] != MAGIC {
            return Err(Defect::Magic);
        }
        if bytes.len() < FIXED_BYTES {
            return Err(Defect::Truncated);
        }
        if u32_at(bytes, 8) != version {
            return Err(Defect::Version);
        }
        let fixed_bytes = match version {
            PACKED_VERSION => PACKED_FIXED_BYTES,
            _ => FIXED_BYTES,
        };
        let (key_bytes, num_tokens, num_positions) = (
            u32_at(bytes, 32) as usize,
            u32_at(bytes, 36),
            u32_at(bytes, 40),
        );
        let dtype_bytes = usize::from(bytes[45]);
        let reserved = u16::from_le_bytes([bytes[46], bytes[47]]);
        let sane = key_bytes <= MAX_KEY_BYTES
            && num_tokens <= MAX_TOKENS
            && (num_positions == 0 || num_positions == num_tokens)
            && reserved == 0;
        if !sane {
            return Err(Defect::Malformed);
        }
        let num_positions = num_positions as usize;
        let sizes = Sizes::of(fixed_bytes, key_bytes, dtype_bytes, num_positions);
        if u32_at(bytes, 12) as usize != sizes.header {
            return Err(Defect::Malformed);
        }
        Ok(Self {
            fixed_bytes,
            key_bytes,
            dtype_bytes,
            num_tokens,
            num_positions,
            sizes,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(
        *bytes[at..]
            .first_chunk()
            .expect("the caller checked the size"),
    )
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(
        *bytes[at..]
            .first_chunk()
            .expect("the caller checked the size"),
    )
}
