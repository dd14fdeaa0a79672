//! What the tier on disk promises while nothing is wrong, and what it makes of files that are.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::Policy;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_storage::backend::Backend;
use lmcache_storage::local_disk::{Chunk, LocalDisk};
use lmcache_storage::object_form::{Form, Format};

mod disk;
use disk::*;

fn pool() -> LocalCpu {
    LocalCpu::new(16 * MIB, LONG).expect("memory")
}

const LEN: usize = 10_000;

fn open(path: &Path) -> LocalDisk {
    LocalDisk::open(options(path), pool()).expect("a folder of our own")
}

#[test]
fn what_is_put_comes_back_after_a_restart_too() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool();
    let numbers = hashes(0..6);
    let sizes = [0, 1, 4095, 4096, 200_000, (1 << 20) + 7];
    let form = Form {
        format: Format::KvT2d,
        num_layers: 2,
        hidden: 3,
        block_tokens: 1,
        dtype: "float32".into(),
    };
    let put = |size: &usize, at: usize| {
        let mut made = pool.allocate(&[*size]).unwrap().pop().unwrap();
        made.bytes_mut()
            .copy_from_slice(&payload(numbers[at], *size));
        made.set_positions(Box::new([7, 8, at as i64]));
        Chunk {
            object: made.seal_unpublished(),
            form: Some(form.clone()),
            num_tokens: 3,
        }
    };
    let chunks = sizes
        .iter()
        .enumerate()
        .map(|(at, size)| put(size, at))
        .collect();
    let first = open(folder.path());
    assert_eq!(first.put(NAMESPACE, &numbers, chunks), 6);
    assert!(first.flush(LONG));
    let check = |disk: &LocalDisk| {
        assert_eq!(disk.contains_prefix(NAMESPACE, &numbers), 6);
        let arrivals = disk.get(NAMESPACE, &numbers, LONG);
        assert_eq!(arrivals.len(), 6);
        for (at, mut arrival) in arrivals.into_iter().enumerate() {
            assert_eq!(arrival.chunk.positions(), Some(&[7, 8, at as i64][..]));
            assert_eq!(arrival.description.form.as_ref(), Some(&form));
            assert_eq!(arrival.description.num_tokens, 3);
            assert!(arrival.chunk.bytes_mut() == payload(numbers[at], sizes[at]));
        }
        assert_books_balance(disk, folder.path());
    };
    check(&first);
    assert!(first.close(LONG));
    let second = open(folder.path());
    check(&second);
    assert_eq!(second.stats()["put_chunks"], 0);
}

#[test]
fn another_process_sees_what_is_put_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (open(folder.path()), open(folder.path()));
    let numbers = hashes(0..4);
    a.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(a.flush(LONG));
    assert_eq!(b.contains_prefix(NAMESPACE, &numbers), 4);
    assert_eq!(come_back(&b, &numbers, LEN), [true; 4]);
    assert!(b.remove(NAMESPACE, numbers[1]));
    assert!(!b.remove(NAMESPACE, numbers[1]));
    assert_eq!(a.get(NAMESPACE, &numbers, LONG).len(), 1);
    b.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(b.flush(LONG));
    assert_eq!(b.stats()["put_chunks"], 1);
    assert_eq!(a.contains_prefix(NAMESPACE, &numbers), 4);
    assert_books_balance(&b, folder.path());
}

#[test]
fn the_limit_holds_and_a_chain_leaves_from_its_tail() {
    let folder = tempfile::tempdir().unwrap();
    let mut small = options(folder.path());
    // Sixteen files of four pages.
    small.limit_bytes = 16 * (4 * 4096 + 256);
    small.threads = 2;
    let disk = LocalDisk::open(small.clone(), pool()).unwrap();
    for chain in 0..4 {
        let numbers = hashes(chain * 10..chain * 10 + 6);
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
        assert!(disk.flush(LONG));
        assert!(charged(folder.path()) <= small.limit_bytes);
    }
    // 24 were put, 16 fit: the first chain is gone, the second has its head.
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(0..6)), 0);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(10..16)), 4);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(20..26)), 6);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(30..36)), 6);
    assert_eq!(disk.stats()["evicted_chunks"], 8);
    assert_books_balance(&disk, folder.path());
    drop(disk);
    // A smaller limit, after a restart: what was found counts, and the oldest leaves from its tail.
    small.limit_bytes = 8 * (4 * 4096 + 256);
    let disk = LocalDisk::open(small.clone(), pool()).unwrap();
    let one = hashes(40..41);
    disk.put(NAMESPACE, &one, chunks(&pool(), &one, LEN));
    assert!(disk.flush(LONG));
    assert!(charged(folder.path()) <= small.limit_bytes);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(10..16)), 0);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(20..26)), 1);
    assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(30..36)), 6);
    assert_books_balance(&disk, folder.path());
}

#[test]
fn what_was_used_is_kept_over_a_restart_too_and_by_other_processes() {
    for (by_other, removes) in [(false, false), (false, true), (true, false)] {
        let folder = tempfile::tempdir().unwrap();
        let disk = open(folder.path());
        for chain in 0..4 {
            let numbers = hashes(chain * 10..chain * 10 + 6);
            disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
            assert!(disk.flush(LONG));
        }
        if removes {
            assert!(disk.remove(NAMESPACE, hash(15)));
        }
        // The first chain but for its tail, then half of the third; whoever looks uses.
        assert_eq!(disk.contains_prefix(NAMESPACE, &hashes(0..5)), 5);
        let used = disk.get(NAMESPACE, &hashes(20..23), LONG).len();
        assert_eq!(used, 3);
        let before = disk.stats()["used_bytes"];
        let other = by_other.then(|| open(folder.path()));
        assert!(disk.close(LONG));
        let mut small = options(folder.path());
        small.limit_bytes = 9 * (4 * 4096 + 256);
        let disk = match other {
            // It follows the catalogue, and tells of what it has seen used by nobody but itself.
            Some(other) => {
                assert_eq!(other.contains_prefix(NAMESPACE, &hashes(15..16)), 1);
                assert!(other.close(LONG));
                LocalDisk::open(small, pool()).unwrap()
            }
            None => LocalDisk::open(small, pool()).unwrap(),
        };
        assert_eq!(disk.stats()["used_bytes"], before);
        let one = hashes(40..41);
        disk.put(NAMESPACE, &one, chunks(&pool(), &one, LEN));
        assert!(disk.flush(LONG));
        // Eight of the 24 and the new one are left: those that were used, the latest last, from their tails on.
        let left: Vec<u32> = (0..40)
            .filter(|number| disk.contains_prefix(NAMESPACE, &hashes(*number..number + 1)) == 1)
            .collect();
        let kept = if by_other {
            vec![0, 1, 2, 3, 15, 20, 21, 22]
        } else {
            vec![0, 1, 2, 3, 4, 20, 21, 22]
        };
        assert_eq!(left, kept, "by another {by_other}, with removals {removes}");
        assert_books_balance(&disk, folder.path());
    }
}

#[test]
fn uses_that_are_told_again_and_again_leave_the_catalogue_small() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = hashes(0..50);
    let disk = open(folder.path());
    disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, 100));
    assert!(disk.close(LONG));
    for _ in 0..100 {
        let mut options = options(folder.path());
        // Some hundred records of what is gone may stay.
        options.limit_bytes = 50 * (2 * 4096 + 256);
        let disk = LocalDisk::open(options, pool()).unwrap();
        assert_eq!(disk.contains_prefix(NAMESPACE, &numbers), 50);
        assert!(disk.close(LONG));
    }
    let root = fs::read_dir(folder.path().join("lmcache_rs.v1")).unwrap();
    let sizes = root
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().contains("catalogue"));
    let sizes: Vec<u64> = sizes.map(|entry| entry.metadata().unwrap().len()).collect();
    assert_eq!(sizes.len(), 1);
    assert!(sizes[0] <= (50 + 12 + 64 + 50) * 68, "{sizes:?}");
    let disk = open(folder.path());
    assert_eq!(come_back(&disk, &numbers, 100), [true; 50]);
    assert_books_balance(&disk, folder.path());
}

#[test]
fn a_chunk_larger_than_the_limit_is_not_stored_and_evicts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut small = options(folder.path());
    small.limit_bytes = 40_000;
    let disk = LocalDisk::open(small, pool()).unwrap();
    let numbers = hashes(0..2);
    disk.put(
        NAMESPACE,
        &numbers[..1],
        chunks(&pool(), &numbers[..1], LEN),
    );
    disk.put(
        NAMESPACE,
        &numbers[1..],
        chunks(&pool(), &numbers[1..], 100_000),
    );
    assert!(disk.flush(LONG));
    assert_eq!(come_back(&disk, &numbers[..1], LEN), [true]);
    assert_eq!(disk.stats()["faults_full"], 1);
    assert_eq!(disk.contains_prefix(NAMESPACE, &numbers[1..]), 0);
}

#[test]
fn chunks_are_spread_over_several_paths() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut both = options(folders[0].path());
    both.paths.push(folders[1].path().into());
    both.policy = Policy::S3Fifo;
    let disk = LocalDisk::open(both.clone(), pool()).unwrap();
    let numbers = hashes(0..40);
    assert_eq!(
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN)),
        40
    );
    assert!(disk.flush(LONG));
    let counts = folders
        .each_ref()
        .map(|folder| chunk_files(folder.path()).len());
    assert!(counts.iter().all(|count| *count > 5), "{counts:?}");
    assert_eq!(disk.get(NAMESPACE, &numbers, LONG).len(), 40);
    drop(disk);
    // One disk is gone: what it held is a miss, the rest is there.
    fs::remove_dir_all(folders[1].path()).unwrap();
    let disk = LocalDisk::open(both, pool()).unwrap();
    let found = come_back(&disk, &numbers, LEN)
        .into_iter()
        .filter(|came| *came)
        .count();
    assert_eq!(found, counts[0]);
}

#[test]
fn files_are_this_users_alone() {
    let folder = tempfile::tempdir().unwrap();
    let disk = open(folder.path());
    let numbers = hashes(0..3);
    disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(disk.flush(LONG));
    let mut seen = 0;
    let mut left = vec![folder.path().join("lmcache_rs.v1")];
    while let Some(path) = left.pop() {
        let about = fs::metadata(&path).unwrap();
        let mode = about.permissions().mode() & 0o777;
        if about.is_dir() {
            assert_eq!(mode, 0o700, "{}", path.display());
            left.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        } else {
            assert_eq!(mode, 0o600, "{}", path.display());
            seen += 1;
        }
    }
    assert!(seen >= 3 + 4, "{seen}");
}

#[test]
fn on_close_the_folder_is_kept_or_removed_by_the_last_user() {
    let folder = tempfile::tempdir().unwrap();
    let mut deleting = options(folder.path());
    deleting.delete_on_close = true;
    let (a, b) = (
        LocalDisk::open(deleting.clone(), pool()).unwrap(),
        LocalDisk::open(deleting, pool()).unwrap(),
    );
    let numbers = hashes(0..3);
    a.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(a.close(LONG));
    assert!(a.close(LONG));
    assert_eq!(a.contains_prefix(NAMESPACE, &numbers), 0);
    assert_eq!(come_back(&b, &numbers, LEN), [true; 3]);
    assert!(b.close(LONG));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn clear_empties_a_prefix_for_every_process_and_puts_under_way_do_not_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (open(folder.path()), open(folder.path()));
    let numbers = hashes(0..3);
    for tenant in ["a", "ab", "b"] {
        let namespace = format!("{NAMESPACE}@tag.t=s:{tenant}");
        a.put(&namespace, &numbers, chunks(&pool(), &numbers, LEN));
    }
    assert!(a.flush(LONG));
    let of = |disk: &LocalDisk, tenant: &str| {
        disk.contains_prefix(&format!("{NAMESPACE}@tag.t=s:{tenant}"), &numbers)
    };
    assert_eq!(b.clear(Some(&format!("{NAMESPACE}@tag.t=s:a"))), 3);
    assert_eq!([of(&b, "a"), of(&b, "ab"), of(&b, "b")], [0, 3, 3]);
    assert_eq!([of(&a, "ab"), of(&a, "b")], [3, 3]);
    assert!(
        a.get(&format!("{NAMESPACE}@tag.t=s:a"), &numbers, LONG)
            .is_empty()
    );
    assert_eq!(b.retain(&format!("{NAMESPACE}@tag.t=s:b")), 3);
    let many = hashes(100..200);
    a.put(NAMESPACE, &many, chunks(&pool(), &many, LEN));
    let removed = a.clear(None) as u64;
    assert!(a.flush(LONG));
    assert!(removed >= 3);
    assert_eq!(chunk_files(folder.path()).len(), 0);
    assert_books_balance(&a, folder.path());
}

fn set_len(file: &Path, change: i64) {
    let opened = fs::File::options().write(true).open(file).unwrap();
    let len = opened.metadata().unwrap().len();
    opened.set_len(len.saturating_add_signed(change)).unwrap();
}

fn bytes(file: &Path) -> usize {
    fs::metadata(file).unwrap().len() as usize
}

#[test]
fn damaged_files_are_misses_by_reason_and_the_next_put_heals() {
    // One that is read at once, one in a few pieces, and one in pieces that are summed up each.
    for len in [LEN, 300_001, (9 << 20) + 5] {
        damage_and_heal(len);
    }
}

fn damage_and_heal(len: usize) {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 12] = [
        ("faults_gone", |file| fs::remove_file(file).unwrap()),
        ("faults_truncated", |file| set_len(file, -4096)),
        ("faults_truncated", |file| set_len(file, -8192)),
        ("faults_truncated", |file| {
            set_len(file, 4096 - bytes(file) as i64)
        }),
        ("faults_truncated", |file| fs::write(file, "").unwrap()),
        ("faults_length", |file| set_len(file, 4096)),
        ("faults_length", |file| set_len(file, 1 << 20)),
        ("faults_magic", |file| {
            fs::write(file, vec![7; bytes(file)]).unwrap()
        }),
        ("faults_checksum", |file| flip(file, 5000)),
        ("faults_checksum", |file| flip(file, bytes(file) - 4096)),
        // In the padding.
        ("faults_checksum", |file| flip(file, bytes(file) - 1)),
        ("faults_version", |file| flip(file, 8)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let pool = LocalCpu::new(48 * MIB, LONG).unwrap();
    let disk = LocalDisk::open(options(folder.path()), pool.clone()).unwrap();
    let numbers = hashes(0..2);
    for (at, (reason, damage)) in damages.into_iter().enumerate() {
        disk.put(NAMESPACE, &numbers, chunks(&pool, &numbers, len));
        assert!(disk.flush(LONG));
        let before = disk.stats().get(reason).copied().unwrap_or(0);
        damage(&disk.path_of(NAMESPACE, numbers[0]));
        let what = format!("{at}: {reason} of {len} bytes");
        assert_eq!(come_back(&disk, &numbers, len), [false, true], "{what}");
        assert_eq!(disk.stats()[reason], before + 1, "{what}");
        assert_eq!(disk.contains_prefix(NAMESPACE, &numbers[..1]), 0, "{what}");
        assert_books_balance(&disk, folder.path());
    }
    // Another chunk's file under this one's name.
    disk.put(NAMESPACE, &numbers, chunks(&pool, &numbers, len));
    assert!(disk.flush(LONG));
    fs::copy(
        disk.path_of(NAMESPACE, numbers[1]),
        disk.path_of(NAMESPACE, numbers[0]),
    )
    .unwrap();
    assert_eq!(come_back(&disk, &numbers, len), [false, true]);
    assert_eq!(disk.stats()["faults_foreign"], 1);
    assert_eq!(pool.audit().free_bytes, pool.audit().capacity_bytes);
}

#[test]
fn headers_of_several_pages_come_back_with_any_payload() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool();
    let disk = open(folder.path());
    let numbers = hashes(0..4);
    let positions: Box<[i64]> = (0..2000).map(|at| at * 3 - 7).collect();
    for (hash, len) in numbers.iter().zip([0, 5, 130_000, 3_000_001]) {
        let mut made = pool.allocate(&[len]).unwrap().pop().unwrap();
        made.bytes_mut().copy_from_slice(&payload(*hash, len));
        made.set_positions(positions.clone());
        let chunk = Chunk {
            object: made.seal_unpublished(),
            form: None,
            num_tokens: 2000,
        };
        assert_eq!(disk.put(NAMESPACE, &[*hash], vec![chunk]), 1);
        assert!(disk.flush(LONG));
        let mut came = disk.get(NAMESPACE, &[*hash], LONG).pop().unwrap();
        assert_eq!(came.chunk.positions(), Some(&positions[..]));
        assert!(came.chunk.bytes_mut() == payload(*hash, len), "{len} bytes");
    }
    assert_eq!(pool.audit().free_bytes, pool.audit().capacity_bytes);
}

fn flip(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 0x10;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_folder_that_vanishes_is_misses_and_comes_back_with_the_next_puts() {
    let folder = tempfile::tempdir().unwrap();
    let disk = open(folder.path());
    let pool = pool();
    let numbers = hashes(0..8);
    disk.put(NAMESPACE, &numbers, chunks(&pool, &numbers, LEN));
    assert!(disk.flush(LONG));
    fs::remove_dir_all(folder.path().join("lmcache_rs.v1")).unwrap();
    assert_eq!(come_back(&disk, &numbers, LEN), [false; 8]);
    for _ in 0..2 {
        disk.put(NAMESPACE, &numbers, chunks(&pool, &numbers, LEN));
        assert!(disk.flush(LONG));
    }
    assert_eq!(come_back(&disk, &numbers, LEN), [true; 8]);
    assert_books_balance(&disk, folder.path());
    assert_eq!(pool.audit().free_bytes, pool.audit().capacity_bytes);
}

#[test]
fn account_and_catalogue_are_written_anew_when_they_do_not_read_right() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = hashes(0..5);
    let disk = open(folder.path());
    disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(disk.close(LONG));
    let root = folder.path().join("lmcache_rs.v1");
    let catalogue = || {
        let mut files = fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        files
            .find(|path| path.to_string_lossy().contains("catalogue-"))
            .unwrap()
    };
    let damages: [&dyn Fn(); 5] = [
        &|| fs::write(root.join("account"), "").unwrap(),
        &|| flip(&root.join("account"), 33),
        &|| fs::remove_file(catalogue()).unwrap(),
        &|| flip(&catalogue(), 100),
        &|| fs::write(root.join("00").join("not of ours"), vec![0; 5000]).unwrap(),
    ];
    for damage in damages {
        damage();
        let disk = open(folder.path());
        assert_eq!(come_back(&disk, &numbers, LEN), [true; 5]);
        assert_eq!(disk.stats()["chunks"], 5);
    }
    // A strange file counts towards the limit from the next walk on, and is left alone.
    fs::write(root.join("account"), "").unwrap();
    let disk = open(folder.path());
    assert_eq!(disk.stats()["used_bytes"], charged(folder.path()));
    assert!(root.join("00").join("not of ours").exists());
}

#[test]
fn a_read_has_an_answer_by_its_deadline_and_gives_its_memory_back() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool();
    let disk = LocalDisk::open(options(folder.path()), pool.clone()).unwrap();
    let numbers = hashes(0..200);
    disk.put(NAMESPACE, &numbers, chunks(&pool, &numbers, LEN));
    assert!(disk.flush(LONG));
    let early = disk.get(NAMESPACE, &numbers, Duration::ZERO).len();
    assert!(early <= 200);
    assert_eq!(disk.get(NAMESPACE, &numbers, LONG).len(), 200);
    assert!(disk.close(LONG));
    assert_eq!(pool.audit().free_bytes, pool.audit().capacity_bytes);
}

#[test]
fn memory_for_what_is_read_may_run_out() {
    // Five times the memory is too little for five, with the pages that they take.
    for len in [100_000, 200_000] {
        let folder = tempfile::tempdir().unwrap();
        let numbers = hashes(0..20);
        let disk = open(folder.path());
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, len));
        assert!(disk.close(LONG));
        let tiny = LocalCpu::new(5 * len as u64, LONG).unwrap();
        let disk = LocalDisk::open(options(folder.path()), tiny.clone()).unwrap();
        for _ in 0..200 {
            // What comes is the prefix that fits, whichever of them were read first.
            assert_eq!(disk.get(NAMESPACE, &numbers, LONG).len(), 4);
        }
        assert_eq!(disk.stats()["faults_no_memory"], 200);
        assert_eq!(disk.contains_prefix(NAMESPACE, &numbers), 20);
        assert_eq!(come_back(&disk, &numbers[19..], len), [true]);
        assert_eq!(tiny.audit().free_bytes, tiny.audit().capacity_bytes);
    }
}

#[test]
fn a_header_of_several_pages_takes_no_earlier_chunks_room() {
    let len = 200_000;
    let folder = tempfile::tempdir().unwrap();
    let numbers = hashes(0..20);
    let disk = open(folder.path());
    let roomy = pool();
    for hash in &numbers {
        let mut made = roomy.allocate(&[len]).unwrap().pop().unwrap();
        made.bytes_mut().copy_from_slice(&payload(*hash, len));
        made.set_positions((0..2000).collect());
        let chunk = Chunk {
            object: made.seal_unpublished(),
            form: None,
            num_tokens: 2000,
        };
        assert_eq!(disk.put(NAMESPACE, &[*hash], vec![chunk]), 1);
    }
    assert!(disk.close(LONG));
    let tiny = LocalCpu::new(5 * len as u64, LONG).unwrap();
    let disk = LocalDisk::open(options(folder.path()), tiny.clone()).unwrap();
    for _ in 0..200 {
        assert_eq!(disk.get(NAMESPACE, &numbers, LONG).len(), 4);
    }
    assert_eq!(tiny.audit().free_bytes, tiny.audit().capacity_bytes);
}

#[test]
fn puts_beyond_the_queue_are_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let mut narrow = options(folder.path());
    narrow.max_queued_bytes = 3 * LEN as u64;
    let disk = LocalDisk::open(narrow, pool()).unwrap();
    let numbers = hashes(0..400);
    let taken = disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!((1..400).contains(&taken), "{taken}");
    assert!(disk.flush(LONG));
    assert_eq!(disk.stats()["dropped_chunks"] as usize, 400 - taken);
    assert_eq!(disk.contains_prefix(NAMESPACE, &numbers), taken);
    assert_eq!(disk.stats()["queued_bytes"], 0);
}

/// Chunks that the pool has under their names, as a store in host memory leaves them.
fn published(pool: &LocalCpu, numbers: &[ChunkHash]) -> Vec<Chunk> {
    for hash in numbers {
        let mut made = pool.allocate(&[LEN]).unwrap().pop().unwrap();
        made.bytes_mut().copy_from_slice(&payload(*hash, LEN));
        assert!(pool.put(NAMESPACE, *hash, made).unwrap());
    }
    let objects = pool.get(NAMESPACE, numbers);
    assert_eq!(objects.len(), numbers.len());
    let chunk = |object| Chunk {
        object,
        form: None,
        num_tokens: 0,
    };
    objects.into_iter().map(chunk).collect()
}

/// The folder's lock, held as another process would: no put is done before it is dropped.
fn stand_still(path: &Path) -> fs::File {
    let lock = fs::File::open(path.join("lmcache_rs.v1/lock")).unwrap();
    lock.lock().unwrap();
    lock
}

#[test]
fn puts_beyond_the_queue_wait_by_name_and_hold_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool();
    let mut narrow = options(folder.path());
    narrow.max_queued_bytes = 3 * LEN as u64;
    let disk = LocalDisk::open(narrow, pool.clone()).unwrap();
    let numbers = hashes(0..400);
    let still = stand_still(folder.path());
    assert_eq!(
        disk.put(NAMESPACE, &numbers, published(&pool, &numbers)),
        400
    );
    // Those under way hold what they write: two of four threads at most write.
    let leased = pool.audit().leased_bytes / (LEN as u64).next_multiple_of(4096);
    assert!(leased <= 3 + 2, "{leased} chunks are held");
    assert!(disk.stats()["waiting_chunks"] >= 395);
    assert_eq!(disk.stats()["named_chunks"], 397);
    // What is put already is not put twice, and what is removed meanwhile is not put at all.
    assert_eq!(disk.put(NAMESPACE, &numbers[200..], Vec::new()), 0);
    assert!(!disk.flush(Duration::ZERO));
    for hash in &numbers[390..395] {
        assert!(pool.remove(NAMESPACE, *hash));
    }
    drop(still);
    assert!(disk.flush(LONG));
    let came = come_back(&disk, &numbers, LEN);
    let wanted: Vec<bool> = (0..400).map(|at| !(390..395).contains(&at)).collect();
    assert_eq!(came, wanted);
    assert_eq!(disk.stats()["dropped_chunks"], 5);
    let waiting = ["waiting_chunks", "queued_chunks", "queued_bytes"];
    assert_eq!(waiting.map(|name| disk.stats()[name]), [0; 3]);
    assert_books_balance(&disk, folder.path());
}

#[test]
fn puts_that_wait_by_name_end_with_a_clear_and_with_the_tier() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool();
    let mut narrow = options(folder.path());
    narrow.max_queued_bytes = 1;
    let disk = LocalDisk::open(narrow, pool.clone()).unwrap();
    let numbers = hashes(0..100);
    let still = stand_still(folder.path());
    disk.put(NAMESPACE, &numbers, published(&pool, &numbers));
    let clearing = disk.clone();
    let cleared = std::thread::spawn(move || clearing.clear(None));
    drop(still);
    cleared.join().unwrap();
    assert!(disk.flush(LONG));
    assert_eq!(chunk_files(folder.path()).len(), 0);
    // Closed before they have their turn: dropped, and nothing is held.
    let still = stand_still(folder.path());
    let again = hashes(100..200);
    disk.put(NAMESPACE, &again, published(&pool, &again));
    assert!(!disk.close(Duration::ZERO));
    assert_eq!(disk.stats()["waiting_chunks"], 0);
    drop(still);
    drop(disk);
    pool.clear();
    let due = std::time::Instant::now() + LONG;
    while pool.audit().free_bytes < pool.audit().capacity_bytes {
        assert!(std::time::Instant::now() < due, "memory is held");
        std::thread::yield_now();
    }
}

#[test]
fn what_was_removed_while_it_waited_can_be_put_again_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let disk = open(folder.path());
    let numbers = hashes(0..4);
    let put = || disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    let still = stand_still(folder.path());
    assert_eq!(put(), 4);
    for hash in &numbers {
        assert!(disk.remove(NAMESPACE, *hash));
    }
    // The first puts are still on their way; none of them is stored, and each of the second is.
    assert_eq!(put(), 4);
    // Those are pending, so a third finds nothing to do, whenever the first end.
    assert_eq!(put(), 0);
    drop(still);
    assert!(disk.flush(LONG));
    assert_eq!(come_back(&disk, &numbers, LEN), [true; 4]);
    assert_eq!(disk.stats()["put_chunks"], 4);
    assert_eq!(put(), 0);
    assert_books_balance(&disk, folder.path());
}

#[test]
fn it_is_a_backend_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let disk = open(folder.path());
    let tier: &dyn Backend = &disk;
    let numbers = hashes([1, 2, 4]);
    let objects: Vec<_> = chunks(&pool(), &numbers, LEN)
        .into_iter()
        .map(|chunk| chunk.object)
        .collect();
    tier.submit_put(NAMESPACE, &numbers, &objects);
    assert!(disk.flush(LONG));
    let asked = hashes([1, 2, 3, 4]);
    assert_eq!(tier.contains_prefix(NAMESPACE, &asked), 2);
    let came = tier.get_blocking(NAMESPACE, &asked);
    assert_eq!(came.len(), 2);
    assert!(came[1].bytes() == payload(asked[1], LEN));
    assert!(tier.contains(NAMESPACE, asked[3]));
    assert!(!tier.contains("other", asked[0]));
    assert!(tier.remove(NAMESPACE, asked[0]));
    assert!(!tier.remove(NAMESPACE, asked[0]));
    assert!(tier.get_blocking(NAMESPACE, &asked).is_empty());
}
