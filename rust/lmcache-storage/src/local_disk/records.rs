//! What lies beside the chunks of a folder: one page of account, and the catalogue. Pure: bytes to values.

use lmcache_core::hash::ChunkHash;
use sha2::{Digest as _, Sha256};

use crate::object_form::{PAGE_BYTES, crc64};

/// Names a chunk in a folder: its hash, and a digest of its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    /// Chain hash.
    pub hash: ChunkHash,
    /// First half of the SHA-256 of the namespace's text form.
    pub namespace: [u8; 16],
}

impl Name {
    /// The file's name.
    pub fn to_text(self) -> String {
        format!("{}.{}", self.hash.to_hex(), hex(&self.namespace))
    }

    /// The name of a chunk.
    pub fn of(namespace: &str, hash: ChunkHash) -> Self {
        let namespace = namespace_digest(namespace);
        Self { hash, namespace }
    }

    /// Reads a file's name.
    pub fn parse(text: &str) -> Option<Self> {
        let (hash, namespace) = text.split_once('.')?;
        let padded = ChunkHash::from_hex(&format!("{namespace}{namespace}"))?;
        let name = Self {
            hash: ChunkHash::from_hex(hash)?,
            namespace: *padded.0.first_chunk()?,
        };
        (name.to_text() == text).then_some(name)
    }
}

/// First half of the SHA-256 of a namespace's text form.
pub(crate) fn namespace_digest(namespace: &str) -> [u8; 16] {
    let digest: [u8; 32] = Sha256::digest(namespace).into();
    *digest.first_chunk().expect("16 of 32 bytes")
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What happened to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Put,
    Removed,
}

/// One step of a folder's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) event: Event,
    pub(crate) name: Name,
    /// Size of the chunk's file.
    pub(crate) bytes: u64,
    /// Which put of many chunks it came with, and its place there.
    pub(crate) batch: u32,
    pub(crate) position: u16,
}

pub(crate) const RECORD_BYTES: usize = 68;

impl Record {
    pub(crate) fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..32].copy_from_slice(&self.name.hash.0);
        bytes[32..48].copy_from_slice(&self.name.namespace);
        // Sizes are whole pages: the low bits are free.
        let event = match self.event {
            Event::Put => 1,
            Event::Removed => 2,
        };
        bytes[48..56].copy_from_slice(&(self.bytes | event).to_le_bytes());
        bytes[56..60].copy_from_slice(&self.batch.to_le_bytes());
        bytes[60..62].copy_from_slice(&self.position.to_le_bytes());
        let check = crc64(&bytes[..62]) as u32;
        bytes[64..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; RECORD_BYTES] = bytes.first_chunk()?;
        let said = u64::from_le_bytes(*bytes[48..].first_chunk()?);
        let record = Self {
            event: match said & 0xfff {
                1 => Event::Put,
                2 => Event::Removed,
                _ => return None,
            },
            name: Name {
                hash: ChunkHash(*bytes.first_chunk()?),
                namespace: *bytes[32..].first_chunk()?,
            },
            bytes: said & !0xfff,
            batch: u32::from_le_bytes(*bytes[56..].first_chunk()?),
            position: u16::from_le_bytes(*bytes[60..].first_chunk()?),
        };
        (record.to_bytes() == *bytes).then_some(record)
    }
}

/// What the folder is charged for a chunk's file: its pages, and a share of the folders that name it.
pub(crate) fn charge(file_bytes: u64) -> u64 {
    file_bytes.next_multiple_of(PAGE_BYTES as u64) + 256
}

/// A process that uses the folder, and what it has reserved for files it is writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) owner: u64,
    pub(crate) reserved: u64,
}

/// The folder's account: read and written as one page, under the folder's lock.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Account {
    /// When the machine was started that wrote it.
    pub(crate) boot: u64,
    /// Which catalogue is the true one, and how many records it has.
    pub(crate) generation: u64,
    pub(crate) num_records: u64,
    /// Charges of all chunks' files and of strange ones.
    pub(crate) used: u64,
    /// How often the folder was cleared.
    pub(crate) clears: u64,
    /// A step begun: whoever finds it ends it.
    pub(crate) intent: Intent,
    pub(crate) shares: Vec<Share>,
}

/// What its owner was about to do to the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Intent {
    #[default]
    None,
    /// A file gets its name, or loses it.
    One(Record),
    /// Many lose theirs: only a walk through the folder tells which have.
    Many,
}

const ACCOUNT_MAGIC: [u8; 8] = *b"LMRSACC1";
const SHARES_AT: usize = 160;
pub(crate) const MAX_SHARES: usize = (PAGE_BYTES - 8 - SHARES_AT) / 16;

impl Account {
    pub(crate) fn reserved(&self) -> u64 {
        self.shares.iter().map(|share| share.reserved).sum()
    }

    pub(crate) fn share(&mut self, owner: u64) -> Option<&mut Share> {
        self.shares.iter_mut().find(|share| share.owner == owner)
    }

    pub(crate) fn to_page(&self) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        page[..8].copy_from_slice(&ACCOUNT_MAGIC);
        let numbers = [
            self.boot,
            self.generation,
            self.num_records,
            self.used,
            self.clears,
            self.shares.len() as u64,
        ];
        for (i, number) in numbers.into_iter().enumerate() {
            page[8 + 8 * i..][..8].copy_from_slice(&number.to_le_bytes());
        }
        match self.intent {
            Intent::None => {}
            Intent::One(record) => {
                page[64] = 1;
                page[72..72 + RECORD_BYTES].copy_from_slice(&record.to_bytes());
            }
            Intent::Many => page[64] = 2,
        }
        for (i, share) in self.shares.iter().enumerate() {
            let at = SHARES_AT + 16 * i;
            page[at..at + 8].copy_from_slice(&share.owner.to_le_bytes());
            page[at + 8..at + 16].copy_from_slice(&share.reserved.to_le_bytes());
        }
        let check = crc64(&page[..PAGE_BYTES - 8]);
        page[PAGE_BYTES - 8..].copy_from_slice(&check.to_le_bytes());
        page
    }

    pub(crate) fn read(page: &[u8]) -> Option<Self> {
        let number = |at: usize| {
            page.get(at..at + 8)?
                .first_chunk()
                .copied()
                .map(u64::from_le_bytes)
        };
        if page.len() != PAGE_BYTES
            || page[..8] != ACCOUNT_MAGIC
            || number(PAGE_BYTES - 8)? != crc64(&page[..PAGE_BYTES - 8])
        {
            return None;
        }
        let num_shares = usize::try_from(number(48)?)
            .ok()
            .filter(|count| *count <= MAX_SHARES)?;
        let mut shares = Vec::with_capacity(num_shares);
        for at in (0..num_shares).map(|i| SHARES_AT + 16 * i) {
            shares.push(Share {
                owner: number(at)?,
                reserved: number(at + 8)?,
            });
        }
        Some(Self {
            boot: number(8)?,
            generation: number(16)?,
            num_records: number(24)?,
            used: number(32)?,
            clears: number(40)?,
            intent: match page[64] {
                0 => Intent::None,
                1 => Intent::One(Record::read(&page[72..])?),
                2 => Intent::Many,
                _ => return None,
            },
            shares,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn record()(hash in any::<[u8; 32]>(), namespace in any::<[u8; 16]>(), put in any::<bool>(),
            pages in 0..1u64 << 40, batch in any::<u32>(), position in any::<u16>()) -> Record {
            let event = if put { Event::Put } else { Event::Removed };
            Record { event, name: Name { hash: ChunkHash(hash), namespace }, bytes: pages << 12, batch, position }
        }
    }

    proptest! {
        #[test]
        fn records_and_names_come_back(record in record()) {
            prop_assert_eq!(Record::read(&record.to_bytes()), Some(record));
            prop_assert_eq!(Name::parse(&record.name.to_text()), Some(record.name));
        }

        #[test]
        fn a_damaged_record_is_none(record in record(), at in 0..RECORD_BYTES * 8) {
            let mut bytes = record.to_bytes();
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert_eq!(Record::read(&bytes), None);
        }

        #[test]
        fn an_account_comes_back_and_a_damaged_one_does_not(
            numbers in any::<[u64; 5]>(), record in prop::option::of(record()),
            shares in prop::collection::vec(any::<(u64, u64)>(), 0..MAX_SHARES + 1), at in 0..PAGE_BYTES * 8,
        ) {
            let [boot, generation, num_records, used, clears] = numbers;
            let intent = record.map_or(Intent::Many, Intent::One);
            let shares = shares.into_iter().map(|(owner, reserved)| Share { owner, reserved }).collect();
            let account = Account { boot, generation, num_records, used, clears, intent, shares };
            let mut page = account.to_page();
            prop_assert_eq!(Account::read(&page), Some(account));
            page[at / 8] ^= 1 << (at % 8);
            prop_assert_eq!(Account::read(&page), None);
        }
    }

    #[test]
    fn strange_file_names_are_none_of_ours() {
        let name = "a".repeat(64) + "." + &"b".repeat(32);
        assert!(Name::parse(&name).is_some());
        for strange in [
            "",
            ".",
            "x",
            &name.to_uppercase(),
            &name[1..],
            &(name.clone() + "b"),
        ] {
            assert_eq!(Name::parse(strange), None, "{strange}");
        }
    }
}
