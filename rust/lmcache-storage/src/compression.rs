//! Lossless packing of a chunk's bytes, for tiers whose wire or store costs more than a core.
//!
//! Numbers of one tensor are of one size: their first bytes, with sign and exponent, are much alike, and their last
//! ones are noise. So the bytes are split into planes, the first bytes of all numbers, the second, and so on, and each
//! plane becomes one frame of zstd. A plane that does not get smaller is kept as it is, at the price of a copy.
//!
//! ```text
//! u64 bytes of each plane as stored, one after another; then the planes
//! ```
//!
//! A plane of `n` bytes that is stored in `n` is not packed. Whatever a packed object says, it is unpacked into as many
//! bytes as its reader lets it have.

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, Strategy};

use crate::object_form::{Defect, Description, Header, Packing, crc64};

const LEVEL: i32 = 1;
/// There is nothing in KV that comes twice but runs of one byte: zstd looks for matches at every so many bytes alone,
/// and codes the rest by how often each byte comes. What it then leaves is no larger, in a fraction of the time.
const SEARCH_EVERY: u32 = 256;
/// No packed payload has more, unpacked.
pub const MAX_PAYLOAD_BYTES: u64 = 512 << 20;

thread_local! {
    static PACKER: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static UNPACKER: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// A payload, packed.
#[derive(Debug)]
pub struct Packed {
    /// How; its header says so.
    pub packing: Packing,
    /// What is stored behind the header.
    pub stored: Vec<u8>,
}

/// Into how many planes numbers of a type by its name in torch are split; 1, so into none, if it is unknown.
pub fn planes_of(dtype: &str) -> usize {
    match dtype {
        "bfloat16" | "float16" | "half" | "int16" | "uint16" => 2,
        "float32" | "float" | "int32" | "uint32" => 4,
        "float64" | "double" | "int64" | "uint64" => 8,
        _ => 1,
    }
}

/// Packs a payload.
///
/// # Errors
/// If zstd has no memory.
///
/// # Panics
/// If `planes` is none of 1, 2, 4 and 8.
pub fn pack(payload: &[u8], planes: usize) -> io::Result<Packed> {
    assert!(Packing::has_planes(planes), "no such planes");
    let table_bytes = 8 * planes;
    let mut stored = vec![0; table_bytes];
    stored.reserve_exact(payload.len());
    let mut plane = Vec::new();
    for index in 0..planes {
        let plane = if planes == 1 {
            payload
        } else {
            take_plane(payload, planes, index, &mut plane);
            &plane
        };
        let begin = stored.len();
        // Room for less than it has now: what does not get smaller does not fit.
        stored.resize(begin + plane.len().saturating_sub(1), 0);
        let packed_bytes = compress(plane, &mut stored[begin..])?;
        stored.truncate(begin + packed_bytes.unwrap_or(0));
        if packed_bytes.is_none() {
            stored.extend_from_slice(plane);
        }
        let stored_bytes = (stored.len() - begin) as u64;
        stored[8 * index..][..8].copy_from_slice(&stored_bytes.to_le_bytes());
    }
    let packing = Packing {
        planes: planes as u8,
        packed_bytes: stored.len() as u64,
        payload_checksum: crc64(payload),
    };
    Ok(Packed { packing, stored })
}

/// Unpacks what [`pack`] made into `payload`, which is as long as what was packed.
///
/// # Errors
/// `Malformed` if it is not what any writer packs into so many bytes, `Checksum` if it is another payload.
pub fn unpack(packing: &Packing, stored: &[u8], payload: &mut [u8]) -> Result<(), Defect> {
    let planes = usize::from(packing.planes);
    if !Packing::has_planes(planes) || stored.len() as u64 != packing.packed_bytes {
        return Err(Defect::Malformed);
    }
    let (table, mut rest) = stored
        .split_at_checked(8 * planes)
        .ok_or(Defect::Malformed)?;
    let mut plane = Vec::new();
    for (index, stored_bytes) in table.as_chunks::<8>().0.iter().enumerate() {
        let stored_bytes = usize::try_from(u64::from_le_bytes(*stored_bytes))
            .ok()
            .filter(|bytes| *bytes <= rest.len())
            .ok_or(Defect::Malformed)?;
        let packed;
        (packed, rest) = rest.split_at(stored_bytes);
        let plane_bytes = plane_bytes(payload.len(), planes, index);
        if stored_bytes > plane_bytes {
            return Err(Defect::Malformed);
        }
        if stored_bytes == plane_bytes {
            give_plane(packed, payload, planes, index);
        } else if planes == 1 {
            decompress(packed, payload)?;
        } else {
            plane.resize(plane_bytes, 0);
            decompress(packed, &mut plane)?;
            give_plane(&plane, payload, planes, index);
        }
    }
    if !rest.is_empty() {
        return Err(Defect::Malformed);
    }
    if crc64(payload) != packing.payload_checksum {
        return Err(Defect::Checksum);
    }
    Ok(())
}

/// Packs a payload and seals it: the whole object. `None` if its description is larger than a header may be, or there
/// is no memory.
///
/// # Panics
/// If the payload is not as long as the description says.
pub fn seal(description: &Description, payload: &[u8]) -> Option<Vec<u8>> {
    assert_eq!(
        payload.len() as u64,
        description.payload_bytes,
        "another payload"
    );
    let dtype = description.form.as_ref().map_or("", |form| &form.dtype);
    let packed = pack(payload, planes_of(dtype)).ok()?;
    let mut object = description.seal_packed(&packed.packing, &packed.stored)?;
    object.extend_from_slice(&packed.stored);
    Some(object)
}

/// A packed object that is whole, of the right key, and of no more bytes than its reader wants; yet to be unpacked.
#[derive(Debug)]
pub struct Sealed<'a> {
    /// What its header says.
    pub description: Description,
    packing: Packing,
    stored: &'a [u8],
}

impl<'a> Sealed<'a> {
    /// Holds a whole object against its sum. Nothing is allocated yet that the object could make large.
    ///
    /// # Errors
    /// Why it is not used; `Length` if its payload has more than `max_payload_bytes`.
    pub fn open(object: &'a [u8], key: &str, max_payload_bytes: u64) -> Result<Self, Defect> {
        let header = Header::parse_packed(object)?;
        header.require_key(key)?;
        let stored = &object[header.len()..];
        header.verify(stored)?;
        if header.description.payload_bytes > max_payload_bytes {
            return Err(Defect::Length);
        }
        Ok(Self {
            packing: header.packing.ok_or(Defect::Version)?,
            description: header.description,
            stored,
        })
    }

    /// Unpacks it into `payload`, of as many bytes as the description says.
    ///
    /// # Errors
    /// As [`unpack`].
    pub fn unpack(&self, payload: &mut [u8]) -> Result<(), Defect> {
        if payload.len() as u64 != self.description.payload_bytes {
            return Err(Defect::Length);
        }
        unpack(&self.packing, self.stored, payload)
    }
}

/// Whether a payload, which its header has vouched for as it is stored, unpacks to what was put; one that is not packed
/// does.
///
/// # Errors
/// As [`unpack`]; `Length` if it has more bytes than any remote tier takes.
pub fn verify(header: &Header<'_>, stored: &[u8]) -> Result<(), Defect> {
    let Some(packing) = &header.packing else {
        return Ok(());
    };
    if header.description.payload_bytes > MAX_PAYLOAD_BYTES {
        return Err(Defect::Length);
    }
    let mut payload = vec![0; header.description.payload_bytes as usize];
    unpack(packing, stored, &mut payload)
}

/// Bytes of one plane of so many.
fn plane_bytes(payload_bytes: usize, planes: usize, index: usize) -> usize {
    payload_bytes / planes + usize::from(index < payload_bytes % planes)
}

fn take_plane(payload: &[u8], planes: usize, index: usize, plane: &mut Vec<u8>) {
    plane.clear();
    // By a constant, so that the compiler sees the stride.
    match planes {
        2 => plane.extend(
            payload
                .as_chunks::<2>()
                .0
                .iter()
                .map(|number| number[index]),
        ),
        4 => plane.extend(
            payload
                .as_chunks::<4>()
                .0
                .iter()
                .map(|number| number[index]),
        ),
        _ => plane.extend(
            payload
                .as_chunks::<8>()
                .0
                .iter()
                .map(|number| number[index]),
        ),
    }
    let tail = &payload[payload.len() - payload.len() % planes..];
    plane.extend(tail.get(index));
}

fn give_plane(plane: &[u8], payload: &mut [u8], planes: usize, index: usize) {
    fn give<const PLANES: usize>(plane: &[u8], payload: &mut [u8], index: usize) {
        for (number, byte) in payload.as_chunks_mut::<PLANES>().0.iter_mut().zip(plane) {
            number[index] = *byte;
        }
    }
    match planes {
        1 => return payload.copy_from_slice(plane),
        2 => give::<2>(plane, payload, index),
        4 => give::<4>(plane, payload, index),
        _ => give::<8>(plane, payload, index),
    }
    let whole = payload.len() / planes;
    if let Some(last) = plane.get(whole) {
        payload[whole * planes + index] = *last;
    }
}

fn new_packer() -> io::Result<Compressor<'static>> {
    let mut packer = Compressor::new(LEVEL)?;
    packer.set_parameter(CParameter::Strategy(Strategy::ZSTD_fast))?;
    packer.set_parameter(CParameter::TargetLength(SEARCH_EVERY))?;
    packer.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
    Ok(packer)
}

/// Bytes of the frame; `None` if it does not fit.
fn compress(plane: &[u8], room: &mut [u8]) -> io::Result<Option<usize>> {
    PACKER.with_borrow_mut(|packer| {
        let packer = match packer {
            Some(packer) => packer,
            none => none.insert(new_packer()?),
        };
        Ok(packer.compress_to_buffer(plane, room).ok())
    })
}

/// One or more frames that are exactly `plane`.
fn decompress(packed: &[u8], plane: &mut [u8]) -> Result<(), Defect> {
    UNPACKER.with_borrow_mut(|unpacker| {
        let unpacker = match unpacker {
            Some(unpacker) => unpacker,
            none => none.insert(Decompressor::new().map_err(|_| Defect::Malformed)?),
        };
        match unpacker.decompress_to_buffer(packed, plane) {
            Ok(bytes) if bytes == plane.len() => Ok(()),
            _ => Err(Defect::Malformed),
        }
    })
}
