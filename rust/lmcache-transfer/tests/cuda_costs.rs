//! What each way costs, learnt over a fake driver whose clock follows prices: the cheapest way is taken, costs are
//! remembered for one GPU and driver, and whatever is wrong with what was remembered, they are measured anew.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::Random;
use common::engine::{CHUNK, ENGINE, Engine, LAYERS, TOKENS, at};
use common::fake::Fake;
use common::round_trip::{layer_bytes, slots};
use common::scratch;
use lmcache_transfer::cuda::costs::{Costs, Identity, Learned};
use lmcache_transfer::cuda::driver::Driver;
use lmcache_transfer::cuda::executor::{CopyPath, DeviceJob, Executor};
use lmcache_transfer::cuda::kernels::Direction;

const LIMIT: Duration = Duration::from_secs(600);
const SAVED: Learned = Learned::Measured { unsaved: None };

/// What work takes: a fixed time and the longer of its pieces' and its bytes' time, in nanoseconds.
#[derive(Clone, Copy)]
struct Price(f64, f64, f64);

impl Price {
    fn of(self, pieces: usize, bytes: usize) -> f64 {
        self.0 + (pieces as f64 * self.1).max(bytes as f64 * self.2)
    }
}

/// Copies alone and batched, and kernels over the link and in device memory.
struct Prices {
    single: Price,
    batch: Price,
    direct: Price,
    device: Price,
}

/// A link that kernels use well, and one that they are slow on.
const FAST: Prices = Prices {
    single: Price(2_000.0, 0.0, 0.02),
    batch: Price(5_000.0, 500.0, 0.02),
    direct: Price(6_000.0, 2.0, 0.022),
    device: Price(6_000.0, 2.0, 0.001),
};
const SLOW: Prices = Prices {
    direct: Price(6_000.0, 2.0, 0.4),
    ..FAST
};

impl Prices {
    fn tell(&self, fake: &Fake) {
        let all = [
            ("single", self.single),
            ("batch", self.batch),
            ("direct", self.direct),
            ("device", self.device),
        ];
        for (way, Price(fixed, a_piece, a_byte)) in all {
            fake.price(way, fixed, a_piece, a_byte);
        }
    }

    fn of(&self, path: CopyPath, runs: usize, run_bytes: usize) -> f64 {
        let bytes = runs * run_bytes;
        match path {
            CopyPath::Engine => self.batch.of(runs, bytes),
            CopyPath::Single => runs as f64 * self.single.of(1, run_bytes),
            CopyPath::Kernel => self.direct.of(runs, bytes),
            CopyPath::Staged => self.device.of(runs, bytes) + self.single.of(1, bytes),
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = scratch("costs").join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}

fn learn(fake: &Fake, folder: Option<&Path>) -> (Engine, Learned) {
    let engine = Engine::new(fake, TOKENS);
    let learned = engine.executor.learn(folder, LIMIT).expect("nothing fails");
    (engine, learned)
}

fn only_file(folder: &Path) -> PathBuf {
    let mut files = fs::read_dir(folder)
        .expect("made")
        .map(|file| file.expect("one").path());
    let file = files.next().expect("one file");
    assert_eq!(files.next(), None);
    file
}

#[test]
fn the_cheapest_way_is_taken_whatever_the_link() {
    for (prices, expected) in [(&FAST, CopyPath::Kernel), (&SLOW, CopyPath::Staged)] {
        let fake = Fake::new();
        prices.tell(&fake);
        let (engine, learned) = learn(&fake, None);
        assert_eq!(learned, SAVED);
        let random = &mut Random::new(9);
        let mut taken = Vec::new();
        for _ in 0..5_000 {
            let (runs, run_bytes) = (1 << random.below(13), 128 << random.below(14));
            let (runs, run_bytes) = (
                runs + random.below(runs),
                run_bytes + random.below(run_bytes),
            );
            for direction in [Direction::Gather, Direction::Scatter] {
                let chosen = engine.executor.choose(direction, runs, runs * run_bytes);
                let cost = |path| prices.of(path, runs, run_bytes);
                let best = CopyPath::ALL.map(cost).into_iter().fold(f64::MAX, f64::min);
                assert!(
                    cost(chosen) <= 1.05 * best,
                    "{chosen:?} for {runs} runs of {run_bytes}: {} of the best",
                    cost(chosen) / best
                );
                if !taken.contains(&chosen) {
                    taken.push(chosen);
                }
            }
        }
        assert!(taken.contains(&expected) && taken.len() > 2, "{taken:?}");
        assert_eq!(
            engine
                .executor
                .choose(Direction::Scatter, 4096, 4096 * 1024),
            expected
        );
    }
}

/// A job takes the way when it begins, and keeps it.
#[test]
fn a_planned_job_goes_the_way_that_was_learnt() {
    let slots = slots(&mut Random::new(4));
    let fake = Fake::new();
    // Launches cost nothing and the engines next to everything.
    fake.price("single", 9e6, 0.0, 0.0);
    fake.price("batch", 9e6, 0.0, 0.0);
    fake.price("direct", 10.0, 0.0, 0.0);
    let engine = Engine::new(&fake, TOKENS);
    let planned = |first| {
        let chunks = engine.reserve(first, &[LAYERS * layer_bytes(&TOKENS, CHUNK)]);
        let parts = chunks
            .into_iter()
            .map(|chunk| (chunk, at(&slots[..CHUNK], 0)));
        // SAFETY: the pool is locked, and the engine does nothing meanwhile.
        unsafe { DeviceJob::planned(&engine.executor, &engine.cache, ENGINE, parts) }
            .expect("begins")
    };
    let before = planned(0);
    assert_eq!(before.path(), CopyPath::unmeasured(32, 256));
    assert_eq!(before.path(), CopyPath::Engine);
    engine.executor.learn(None, LIMIT).expect("nothing fails");
    let after = planned(1);
    assert_eq!(
        (before.path(), after.path()),
        (CopyPath::Engine, CopyPath::Kernel)
    );
}

#[test]
fn costs_are_remembered_for_one_gpu_and_one_driver() {
    let folder = folder("remembered").join("made/on/the/way");
    let fake = Fake::new();
    FAST.tell(&fake);
    let (engine, learned) = learn(&fake, Some(&folder));
    assert_eq!(learned, SAVED);
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode(&folder), mode(&only_file(&folder))), (0o700, 0o600));

    let again = Fake::new();
    let (same, learned) = learn(&again, Some(&folder));
    assert_eq!(learned, Learned::Remembered);
    assert_eq!(again.calls("cuEventElapsedTime"), 0);
    let costs = |engine: &Engine| engine.executor.costs().cloned().expect("learnt");
    for (runs, run_bytes) in [(1, 256), (77, 3_000), (4096, 64 << 10)] {
        for direction in [Direction::Gather, Direction::Scatter] {
            for path in CopyPath::ALL {
                let cost = |of: &Engine| {
                    costs(of)
                        .table(direction)
                        .nanoseconds(path, runs, run_bytes)
                };
                let (one, other) = (cost(&engine).expect("timed"), cost(&same).expect("timed"));
                assert!((one / other - 1.0).abs() < 1e-3, "{one} and {other}");
            }
        }
    }
    // Learnt is learnt.
    assert_eq!(same.executor.learn(None, LIMIT), Ok(Learned::Remembered));

    // An older driver, which has no batched copies, and one that gets no kernels: costs of their own.
    let older = Fake::new();
    older.hide("cuMemcpyBatchAsync");
    assert_eq!(learn(&older, Some(&folder)).1, SAVED);
    let driver = Driver::open_at(&Fake::new().path).expect("opens");
    let bare = Engine::with(&driver, TOKENS, |current| {
        Executor::with_kernels(current, None)
    });
    assert_eq!(bare.executor.learn(Some(&folder), LIMIT), Ok(SAVED));
    let timed = |engine: &Engine| {
        let costs = costs(engine);
        CopyPath::ALL.map(|path| costs.store.nanoseconds(path, 4, 4096).is_some())
    };
    assert_eq!(timed(&same), [true; 4]);
    assert_eq!(timed(&bare), [true, true, false, false]);
    assert_eq!(fs::read_dir(&folder).expect("there").count(), 3);
}

#[test]
fn a_damaged_or_foreign_file_is_measured_anew() {
    let folder = folder("damaged");
    let fake = Fake::new();
    FAST.tell(&fake);
    assert_eq!(learn(&fake, Some(&folder)).1, SAVED);
    let path = only_file(&folder);
    let whole = fs::read(&path).expect("just written");
    let text = String::from_utf8(whole.clone()).expect("text");
    let identity = Identity {
        uuid: std::array::from_fn(|at| at as u8),
        driver: 13_000,
        kernels: true,
    };
    assert!(Costs::parse(&text, &identity).is_some());
    let others = [
        Identity {
            uuid: [0; 16],
            ..identity
        },
        Identity {
            driver: 13_010,
            ..identity
        },
        Identity {
            kernels: false,
            ..identity
        },
    ];
    for other in others {
        assert_eq!(Costs::parse(&text, &other), None, "{other:?}");
    }
    let random = &mut Random::new(3);
    for _ in 0..3_000 {
        let at = random.below(whole.len());
        assert_eq!(Costs::parse(&text[..at], &identity), None, "cut at {at}");
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << random.below(7);
        let flipped = String::from_utf8(flipped).expect("still ASCII");
        assert_eq!(
            Costs::parse(&flipped, &identity),
            None,
            "bit flipped at {at}"
        );
    }
    let damages: [Vec<u8>; 4] = [
        whole[..whole.len() / 2].to_vec(),
        vec![0xff; 4096],
        vec![b'\n'; 2 << 20],
        text.replacen("form 1", "form 0", 1).into_bytes(),
    ];
    for damage in damages {
        fs::write(&path, &damage).expect("writes");
        let again = Fake::new();
        FAST.tell(&again);
        let shown = String::from_utf8_lossy(&damage[..damage.len().min(80)]).into_owned();
        assert_eq!(learn(&again, Some(&folder)).1, SAVED, "{shown:?}");
        assert_eq!(fs::read(&path).expect("replaced").len(), whole.len());
    }
    // What is no file is left alone.
    fs::remove_file(&path).expect("ours");
    fs::create_dir(&path).expect("ours");
    let (_, learned) = learn(&Fake::new(), Some(&folder));
    assert!(
        matches!(learned, Learned::Measured { unsaved: Some(_) }),
        "{learned:?}"
    );
    assert_eq!(only_file(&folder), path);
    // Nor can it be kept where there can be no folder.
    fs::remove_dir(&path).expect("ours");
    fs::write(&path, "in the way").expect("ours");
    let (engine, learned) = learn(&Fake::new(), Some(&path.join("below")));
    assert!(
        matches!(learned, Learned::Measured { unsaved: Some(_) }),
        "{learned:?}"
    );
    assert!(engine.executor.costs().is_some());
}

#[test]
fn without_time_or_on_a_failure_the_rule_of_thumb_stays() {
    let folder = folder("failed");
    let fake = Fake::new();
    let engine = Engine::new(&fake, TOKENS);
    let live = fake.live();
    // No time at all, then less than it takes to time everything once.
    for limit in [Duration::ZERO, Duration::from_micros(300)] {
        let learned = engine.executor.learn(Some(&folder), limit);
        assert_eq!(learned, Ok(Learned::OutOfTime));
    }
    // What directions stage in stays.
    assert_eq!(fake.live(), live + 2);
    let calls = [
        ("cuDeviceGetUuid", 0),
        ("cuDriverGetVersion", 0),
        ("cuMemHostRegister", 0),
        ("cuMemHostRegister", 1),
        ("cuMemAlloc", 0),
        ("cuMemAlloc", 1),
        ("cuEventCreate", 1),
        ("cuEventRecord", 0),
        ("cuEventRecord", 31),
        ("cuMemcpyBatchAsync", 9),
        ("cuMemcpyAsync", 9),
        ("cuLaunchKernel", 9),
        ("cuStreamSynchronize", 9),
        ("cuEventElapsedTime", 9),
    ];
    for (call, after) in calls {
        fake.fail(call, after, 2);
        let fault = engine
            .executor
            .learn(Some(&folder), LIMIT)
            .expect_err("planted");
        assert!(fault.to_string().starts_with(call), "{fault}");
        assert_eq!(fake.live(), live + 2, "{call}");
    }
    assert!(engine.executor.costs().is_none() && !folder.exists());
    let direction = Direction::Gather;
    assert_eq!(
        engine.executor.choose(direction, 64, 64 * 256),
        CopyPath::Kernel
    );
    assert_eq!(
        engine.executor.choose(direction, 63, 63 * 256),
        CopyPath::Engine
    );
    // And once nothing fails it can still be learnt.
    assert_eq!(engine.executor.learn(Some(&folder), LIMIT), Ok(SAVED));
}

/// Where an earlier process staged and this one has no room to, the next cheapest way is taken, once that is known.
#[test]
fn without_room_to_stage_the_next_cheapest_way_is_taken() {
    let folder = folder("no-room");
    let fake = Fake::new();
    SLOW.tell(&fake);
    assert_eq!(learn(&fake, Some(&folder)).1, SAVED);
    let again = Fake::new();
    let (engine, learned) = learn(&again, Some(&folder));
    assert_eq!(learned, Learned::Remembered);
    let choose = || engine.executor.choose(Direction::Gather, 4096, 4096 * 1024);
    assert_eq!(choose(), CopyPath::Staged);
    again.fail("cuMemAlloc", 0, 2);
    let slots: Vec<i64> = (0..CHUNK as i64).collect();
    let chunks = engine.reserve(0, &[LAYERS * layer_bytes(&TOKENS, CHUNK)]);
    let parts = chunks.into_iter().map(|chunk| (chunk, at(&slots, 0)));
    let staged = |_, _| CopyPath::Staged;
    // SAFETY: nothing is copied.
    let job = unsafe { DeviceJob::begin(&engine.executor, &engine.cache, ENGINE, staged, parts) };
    assert_eq!(job.expect("begins").path(), CopyPath::Kernel);
    // At this price a kernel over the link takes 1.7 ms, the engines 2.1 in a batch and 8.3 alone.
    assert_eq!(choose(), CopyPath::Kernel);
    let long = engine.executor.choose(Direction::Gather, 256, 256 << 15);
    assert_eq!(long, CopyPath::Engine);
}
