//! What the tier on disk promises when the system fails it: at each operation in turn, by an error, a short
//! count, the end of the process, or the end of the machine.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on"
)]

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lmcache_storage::local_disk::LocalDisk;
use lmcache_storage::local_disk::files::SystemFiles;

mod disk;
use disk::faulty::{FaultyFiles, Plan, Step};
use disk::*;

const LEN: usize = 9_000;
/// A file of header and payload.
const FILE_BYTES: u64 = 4 * 4096;

fn scratch() -> tempfile::TempDir {
    // In memory where there is such a file system: these tests make and drop many thousands of files.
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    made.unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % limit.max(1) as u64) as usize
    }
}

fn open_on(files: &FaultyFiles, path: &Path) -> LocalDisk {
    let mut options = options(path);
    options.threads = 2;
    options.limit_bytes = 8 * (FILE_BYTES + 256);
    LocalDisk::open_on(Arc::new(files.clone()), options, pool()).expect("nothing fails yet")
}

/// Puts, reads, evicts, removes: every kind of operation.
fn work(disk: &LocalDisk, first: u32) {
    let memory = pool();
    for start in [first, first + 4] {
        let numbers = hashes(start..start + 4);
        disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, LEN));
        disk.flush(LONG);
        come_back(disk, &numbers, LEN);
    }
    disk.remove(NAMESPACE, hash(first + 5));
    let numbers = hashes(first + 8..first + 11);
    disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, LEN));
    disk.flush(LONG);
    assert_eq!(
        memory.audit().free_bytes,
        memory.audit().capacity_bytes,
        "memory is held"
    );
}

fn each_operation_fails(plan: Plan, times: usize) {
    let folder = scratch();
    let files = FaultyFiles::new();
    let disk = open_on(&files, folder.path());
    let mut rounds = 0;
    loop {
        let first = 100 * rounds;
        files.plan(rounds as usize, times, plan);
        work(&disk, first);
        let hit = files.was_hit();
        files.heal();
        let numbers = hashes(first + 20..first + 22);
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
        assert!(disk.flush(LONG));
        let came = come_back(&disk, &numbers, LEN);
        let faults: Vec<_> = disk.faults().counts().collect();
        assert_eq!(came, [true; 2], "after {plan:?} at {rounds}: {faults:?}");
        assert_eq!(disk.stats()["queued_bytes"], 0);
        let all = hashes(first..first + 11);
        come_back(&disk, &all, LEN);
        assert!(charged(folder.path()) <= 8 * (FILE_BYTES + 256));
        rounds += 1;
        if !hit {
            break;
        }
    }
    assert!(rounds > 60, "{rounds} operations");
    assert!(disk.close(LONG));
    let disk = LocalDisk::open(options(folder.path()), pool()).unwrap();
    assert_books_balance(&disk, folder.path());
}

#[test]
fn each_operation_may_meet_a_full_device() {
    each_operation_fails(Plan::Errno(rustix::io::Errno::NOSPC.raw_os_error()), 1);
}

#[test]
fn each_operation_may_meet_an_error_of_the_device() {
    each_operation_fails(Plan::Errno(rustix::io::Errno::IO.raw_os_error()), 1);
}

#[test]
fn each_operation_may_be_forbidden() {
    each_operation_fails(Plan::Errno(rustix::io::Errno::ACCESS.raw_os_error()), 1);
}

#[test]
fn each_operation_and_all_behind_it_may_fail() {
    each_operation_fails(
        Plan::Errno(rustix::io::Errno::IO.raw_os_error()),
        usize::MAX / 2,
    );
}

#[test]
fn short_reads_and_writes_change_nothing() {
    let folder = scratch();
    let files = FaultyFiles::new();
    let disk = open_on(&files, folder.path());
    files.plan(0, usize::MAX / 2, Plan::Short);
    let numbers = hashes(0..3);
    disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
    assert!(disk.flush(LONG));
    assert_eq!(come_back(&disk, &numbers, LEN), [true; 3]);
    assert!(files.was_hit());
    let big = hashes(50..51);
    let mut wide = options(folder.path());
    wide.limit_bytes = 16 << 20;
    let disk = LocalDisk::open_on(Arc::new(files), wide, pool()).unwrap();
    disk.put(NAMESPACE, &big, chunks(&pool(), &big, 300_001));
    assert!(disk.flush(LONG));
    assert_eq!(come_back(&disk, &big, 300_001), [true]);
}

#[test]
fn a_thousand_files_damaged_under_load_are_misses_and_never_wrong() {
    let folder = scratch();
    let disk = LocalDisk::open(options(folder.path()), pool()).unwrap();
    let numbers = hashes(0..12);
    let memory = pool();
    disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, LEN));
    assert!(disk.flush(LONG));
    let mut random = Random(3);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                come_back(&disk, &numbers, LEN);
            }
        });
        let found = || disk.faults().counts().map(|(_, count)| count).sum::<u64>();
        for round in 0..20_000 {
            if found() >= 1000 {
                break;
            }
            let number = numbers[random.below(12)];
            let path = disk.path_of(NAMESPACE, number);
            // The reader may have found the last damage and removed the file.
            if let Ok(mut bytes) = fs::read(&path)
                && bytes.len() > 1
            {
                let at = random.below(bytes.len());
                let damaged = match round % 5 {
                    0 => {
                        bytes[at] ^= 1 << random.below(8);
                        fs::write(&path, bytes)
                    }
                    1 => fs::write(&path, &bytes[..at]),
                    2 => fs::remove_file(&path),
                    3 => {
                        let end = bytes.len();
                        bytes.rotate_left(1 + random.below(end - 1));
                        fs::write(&path, bytes)
                    }
                    _ => fs::copy(disk.path_of(NAMESPACE, numbers[random.below(12)]), &path)
                        .map(|_| ()),
                };
                drop(damaged);
            }
            disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, LEN));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(disk.flush(LONG));
    let faults: HashMap<_, _> = disk.faults().counts().collect();
    assert!(faults.values().sum::<u64>() >= 1000, "{faults:?}");
    println!("{faults:?}");
    come_back(&disk, &numbers, LEN);
    disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, LEN));
    assert!(disk.flush(LONG));
    assert_eq!(come_back(&disk, &numbers, LEN), [true; 12]);
    assert_books_balance(&disk, folder.path());
    assert_eq!(memory.audit().free_bytes, memory.audit().capacity_bytes);
}

// --- the process ends -----------------------------------------------------------------------------

/// Runs in a process of its own what the parent writes to its input; nothing if that is empty.
#[test]
#[ignore = "the other side of tests that need several processes"]
fn child() {
    let mut told = String::new();
    std::io::stdin().read_to_string(&mut told).unwrap();
    let words: Vec<&str> = told.split_whitespace().collect();
    match words[..] {
        ["killed", path, at, how, first] => {
            let files = FaultyFiles::new();
            let plan = if how == "before" {
                Plan::KillBefore
            } else {
                Plan::KillAfter
            };
            files.plan(at.parse().unwrap(), 1, plan);
            let disk = open_on(&files, Path::new(path));
            work(&disk, first.parse().unwrap());
            disk.close(LONG);
        }
        ["same", path, count] => {
            let disk = LocalDisk::open(options(Path::new(path)), pool()).unwrap();
            let numbers = hashes(0..count.parse().unwrap());
            for part in numbers.chunks(10) {
                disk.put(NAMESPACE, part, chunks(&pool(), part, LEN));
                assert!(disk.flush(LONG));
                assert_eq!(come_back(&disk, part, LEN), vec![true; part.len()]);
            }
            let faults: Vec<_> = disk.faults().counts().collect();
            assert_eq!(faults, [], "faults among processes");
            disk.close(LONG);
        }
        ["writers", path, limit, millis, first] => {
            let mut narrow = options(Path::new(path));
            narrow.limit_bytes = limit.parse().unwrap();
            let disk = LocalDisk::open(narrow, pool()).unwrap();
            let until = Instant::now() + Duration::from_millis(millis.parse().unwrap());
            let first: u32 = first.parse().unwrap();
            std::thread::scope(|scope| {
                for writer in 0..2 {
                    let disk = &disk;
                    scope.spawn(move || {
                        let mut next = first + writer * 1_000_000;
                        let memory = pool();
                        while Instant::now() < until {
                            let numbers = hashes(next..next + 4);
                            next += 4;
                            disk.put(NAMESPACE, &numbers, chunks(&memory, &numbers, 150_000));
                            assert!(disk.flush(LONG));
                            come_back(disk, &numbers, 150_000);
                        }
                    });
                }
            });
            assert!(disk.stats()["put_chunks"] > 8);
            disk.close(LONG);
        }
        _ => assert!(words.is_empty(), "{words:?}"),
    }
}

fn spawn(told: &str) -> std::process::Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(told.as_bytes())
        .unwrap();
    child
}

fn kill_at(rounds: usize) {
    let folder = scratch();
    let path = folder.path();
    let mut random = Random(11);
    // Operations of the work: found by the first that lives through it.
    let mut num_operations = 600;
    let (mut killed, mut lived) = (0, 0);
    for round in 0..rounds {
        let first = 100 * round as u32;
        let at = random.below(num_operations + num_operations / 20);
        let how = ["before", "after"][random.below(2)];
        let ended = spawn(&format!("killed {} {at} {how} {first}", path.display()))
            .wait()
            .unwrap();
        if ended.success() {
            lived += 1;
            num_operations = num_operations.min(at);
        } else {
            assert_eq!(
                ended.code(),
                None,
                "killed at {at}, or a failure of its own"
            );
            killed += 1;
        }
        let disk = open_on(&FaultyFiles::new(), path);
        let before = come_back(&disk, &hashes(first..first + 11), LEN);
        assert_books_balance(&disk, path);
        let numbers = hashes(first + 20..first + 22);
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
        assert!(disk.flush(LONG));
        assert_eq!(
            come_back(&disk, &numbers, LEN),
            [true; 2],
            "after a kill {how} {at}: {before:?}"
        );
        assert!(charged(path) <= 8 * (FILE_BYTES + 256));
        assert_books_balance(&disk, path);
        let faults: Vec<_> = disk.faults().counts().collect();
        assert_eq!(faults, [], "after a kill {how} {at}");
        assert!(disk.close(LONG));
    }
    println!("{killed} killed, {lived} lived, {num_operations} operations");
    assert!(killed > rounds * 3 / 4, "{killed} of {rounds}");
}

#[test]
fn a_process_killed_at_any_operation_leaves_nothing_wrong() {
    kill_at(120);
}

#[test]
#[ignore = "soak: a minute"]
fn a_process_killed_at_a_thousand_operations_leaves_nothing_wrong() {
    kill_at(1500);
}

#[test]
fn a_share_of_a_dead_process_is_taken_back_by_one_that_lives() {
    let folder = scratch();
    let disk = open_on(&FaultyFiles::new(), folder.path());
    // Killed in the midst of writing: its room is reserved, its file half there.
    let mut seen = 0;
    for at in 85..135 {
        let ended = spawn(&format!("killed {} {at} after 0", folder.path().display()))
            .wait()
            .unwrap();
        seen += usize::from(!ended.success());
        let numbers = hashes(1000 + at * 10..1008 + at * 10);
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
        assert!(disk.flush(LONG));
        assert_eq!(come_back(&disk, &numbers[..7], LEN), [true; 7], "at {at}");
    }
    assert!(seen > 40, "{seen}");
    assert_eq!(
        disk.faults()
            .count(lmcache_storage::local_disk::faults::Fault::Full),
        0
    );
}

// --- the machine ends -----------------------------------------------------------------------------

/// What is on the disk after the power was cut somewhere in `trace`: of what was not synchronised, any part.
fn after_power_cut(trace: &[Step], random: &mut Random) -> HashMap<PathBuf, Vec<u8>> {
    let trace = &trace[..random.below(trace.len() + 1)];
    let loss = [0, 5, 20, 60][random.below(4)];
    let synced = |path: &Path, from: usize| {
        let of_path = |step: &Step| matches!(step, Step::Sync(each) if each == path);
        trace[from..].iter().any(of_path)
    };
    let mut files: HashMap<PathBuf, Vec<u8>> = HashMap::new();
    for (at, step) in trace.iter().enumerate() {
        // The names of files are never synchronised by us; their bytes may be.
        let lost = random.below(100) < loss;
        match step {
            Step::Create(path) if !lost || synced(path, at) => {
                files.entry(path.clone()).or_default();
            }
            Step::Rename(from, to) if !lost => {
                if let Some(bytes) = files.remove(from) {
                    files.insert(to.clone(), bytes);
                }
            }
            Step::Remove(path) if !lost => {
                files.remove(path);
            }
            Step::Write(path, offset, bytes) => {
                let Some(file) = files.get_mut(path) else {
                    continue;
                };
                let end = *offset as usize + bytes.len();
                let kept = synced(path, at);
                if lost && !kept && random.below(2) == 0 {
                    continue;
                }
                file.resize(file.len().max(end), 0);
                for (i, page) in bytes.chunks(4096).enumerate() {
                    // The size may be there before the bytes are, and a page may be anything.
                    let begin = *offset as usize + i * 4096;
                    if !lost || kept || random.below(2) == 0 {
                        file[begin..begin + page.len()].copy_from_slice(page);
                    } else if random.below(4) == 0 {
                        file[begin..begin + page.len()].fill(0xa5);
                    }
                }
                if lost && !kept && random.below(3) == 0 {
                    let short = random.below(file.len() + 1);
                    file.truncate(short);
                }
            }
            _ => {}
        }
    }
    files
}

fn power_cuts(states: usize) {
    let mut random = Random(5);
    let mut traces = Vec::new();
    for sync in [false, true] {
        let folder = scratch();
        let files = FaultyFiles::new();
        files.record();
        let mut options = options(folder.path());
        (options.sync, options.threads) = (sync, 2);
        options.limit_bytes = 8 * (FILE_BYTES + 256);
        let disk = LocalDisk::open_on(Arc::new(files.clone()), options, pool()).unwrap();
        work(&disk, 0);
        work(&disk, 40);
        assert!(disk.close(LONG));
        let trace = files.recorded();
        assert!(trace.len() > 100, "{}", trace.len());
        assert_eq!(trace.iter().any(|step| matches!(step, Step::Sync(_))), sync);
        traces.push((folder.path().to_owned(), trace));
    }
    let (mut found, mut refused) = (0, 0);
    for state in 0..states {
        let (recorded_in, trace) = &traces[state % 2];
        let folder = scratch();
        for (path, bytes) in after_power_cut(trace, &mut random) {
            let path = folder.path().join(path.strip_prefix(recorded_in).unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        let files = FaultyFiles::new();
        files.0.boot.store(2, Ordering::SeqCst);
        let disk = open_on(&files, folder.path());
        assert_books_balance(&disk, folder.path());
        let stored = disk.stats()["chunks"];
        let came = come_back(&disk, &hashes((0..11).chain(40..51)), LEN);
        let came = came.iter().filter(|came| **came).count() as u64;
        found += came;
        refused += stored - came;
        assert_books_balance(&disk, folder.path());
        let numbers = hashes(900..902);
        disk.put(NAMESPACE, &numbers, chunks(&pool(), &numbers, LEN));
        assert!(disk.flush(LONG));
        assert_eq!(come_back(&disk, &numbers, LEN), [true; 2]);
        assert!(charged(folder.path()) <= 8 * (FILE_BYTES + 256));
    }
    println!("{states} states: {found} chunks came back, {refused} were refused");
    assert!(
        found > states as u64 && refused > states as u64 / 25,
        "{found} {refused}"
    );
}

#[test]
fn a_machine_that_stops_anywhere_leaves_nothing_wrong() {
    power_cuts(400);
}

#[test]
#[ignore = "soak: a minute"]
fn a_machine_that_stops_in_ten_thousand_ways_leaves_nothing_wrong() {
    power_cuts(12_000);
}

// --- several processes ----------------------------------------------------------------------------

#[test]
fn four_processes_put_the_same_chunks_and_all_are_whole() {
    let folder = scratch();
    let count = 120;
    let told = format!("same {} {count}", folder.path().display());
    let mut children: Vec<_> = (0..4).map(|_| spawn(&told)).collect();
    let disk = LocalDisk::open(options(folder.path()), pool()).unwrap();
    let numbers = hashes(0..count);
    while children
        .iter_mut()
        .any(|child| child.try_wait().unwrap().is_none())
    {
        come_back(&disk, &numbers, LEN);
    }
    assert!(
        children
            .iter_mut()
            .all(|child| child.wait().unwrap().success())
    );
    assert_eq!(come_back(&disk, &numbers, LEN), vec![true; count as usize]);
    assert_books_balance(&disk, folder.path());
}

fn bytes_on_disk(path: &Path) -> u64 {
    let mut bytes = 0;
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        // What is gone by now counts nothing.
        let Ok(about) = entry.metadata() else {
            continue;
        };
        bytes += about.blocks() * 512;
        if about.is_dir() {
            bytes += bytes_on_disk(&entry.path());
        }
    }
    bytes
}

fn writers_keep_the_limit(millis: u64) {
    let folder = scratch();
    let (limit, chunk_bytes) = (6_000_000, 160_000);
    let children = (0..4).map(|child| {
        let first = 10_000_000 * child;
        spawn(&format!(
            "writers {} {limit} {millis} {first}",
            folder.path().display()
        ))
    });
    let mut children: Vec<_> = children.collect();
    let (mut most, mut looks) = (0, 0);
    while children
        .iter_mut()
        .any(|child| child.try_wait().unwrap().is_none())
    {
        // Under the folder's lock, or a file could be counted under both its names.
        let lock = fs::File::open(folder.path().join("lmcache_rs.v1/lock"));
        let Ok(lock) = lock else { continue };
        lock.lock().unwrap();
        most = most.max(bytes_on_disk(folder.path()));
        looks += 1;
        drop(lock);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(
        children
            .iter_mut()
            .all(|child| child.wait().unwrap().success())
    );
    println!("at most {most} bytes in {looks} looks");
    assert!(looks > 20, "{looks}");
    assert!(most > limit / 2, "{most}");
    assert!(most <= limit + chunk_bytes, "{most} bytes of {limit}");
    let mut narrow = options(folder.path());
    narrow.limit_bytes = limit;
    let disk = LocalDisk::open_on(Arc::new(SystemFiles), narrow, pool()).unwrap();
    assert_books_balance(&disk, folder.path());
}

#[test]
fn eight_writers_in_four_processes_keep_the_limit() {
    writers_keep_the_limit(2_000);
}

#[test]
#[ignore = "soak: a minute"]
fn eight_writers_in_four_processes_keep_the_limit_for_a_minute() {
    writers_keep_the_limit(60_000);
}
