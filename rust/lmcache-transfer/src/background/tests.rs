use std::sync::mpsc::{Receiver, Sender, channel};

use lmcache_memory::local_cpu::LocalCpu;

use super::*;
use crate::layerwise::tests::{Engine, LAYERS, assert_idle, chunks, hashes, pool};

const BLOCKS: [u32; 4] = [5, 2, 9, 3];

/// With its thread on any machine; the limit is too high to be felt.
fn queue() -> Queue {
    Queue::new(Some(1 << 50))
}

fn store(cpu: &LocalCpu, engine: &Engine) -> StoreJob {
    let hashes = hashes(2);
    StoreJob::begin(cpu, &engine.paged, &chunks(&hashes, &BLOCKS), 0).expect("begins")
}

fn load(cpu: &LocalCpu, engine: &Engine) -> LoadJob {
    let hashes = hashes(2);
    LoadJob::begin(cpu, &engine.paged, "r", &chunks(&hashes, &BLOCKS), 0).expect("begins")
}

fn stored(transfer: &Transfer) -> Stored {
    match transfer.outcome() {
        Some(Ok(Outcome::Stored(stored))) => stored,
        other => panic!("{other:?}"),
    }
}

fn loaded(transfer: &Transfer) -> Loaded {
    match transfer.outcome() {
        Some(Ok(Outcome::Loaded(loaded))) => loaded,
        other => panic!("{other:?}"),
    }
}

/// Says when it begins, and ends when it is told to.
struct Gate {
    is_awaited: bool,
    begun: Sender<&'static str>,
    go: Receiver<()>,
    name: &'static str,
}

impl Work for Gate {
    fn bytes(&self) -> usize {
        1
    }

    fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    fn carry_out(self: Box<Self>, _pay: Option<&dyn Fn(usize)>) -> Outcome {
        self.begun.send(self.name).expect("the test listens");
        assert!(self.go.recv().is_ok(), "the gate is broken");
        Outcome::Stored(Stored::default())
    }

    fn call_off(self: Box<Self>) -> Outcome {
        self.begun.send("called off").expect("the test listens");
        Outcome::Stored(Stored::default())
    }
}

fn gate(name: &'static str, is_awaited: bool, begun: &Sender<&'static str>) -> (Gate, Sender<()>) {
    let (open, go) = channel();
    let begun = begun.clone();
    let gate = Gate {
        is_awaited,
        begun,
        go,
        name,
    };
    (gate, open)
}

#[test]
fn what_is_handed_over_is_done_with_and_without_anybody_waiting() {
    for waits in [true, false] {
        let (source, target, cpu, queue) = (Engine::new(0), Engine::new(0xa5), pool(), queue());
        let transfer = queue.begin(store(&cpu, &source));
        while !(transfer.is_done() || waits && transfer.wait(None)) {
            thread::yield_now();
        }
        assert_eq!(
            (stored(&transfer).chunks, stored(&transfer).tokens),
            (2, 16)
        );
        assert_eq!(cpu.longest_prefix("ns", &hashes(2)), 2);
        let transfer = queue.begin(load(&cpu, &target));
        while !(transfer.is_done() || waits && transfer.wait(None)) {
            thread::yield_now();
        }
        assert_eq!((loaded(&transfer).end, loaded(&transfer).tokens), (16, 16));
        for layer in 0..LAYERS {
            for block in BLOCKS {
                let bytes = block as usize * 20..block as usize * 20 + 20;
                assert_eq!(
                    target.layer(layer)[bytes.clone()],
                    source.layer(layer)[bytes]
                );
            }
        }
        queue.close();
        assert_idle(&cpu);
    }
}

#[test]
fn a_chunk_is_seen_only_after_its_copy_and_never_when_cleared_meanwhile() {
    for clears in [false, true] {
        let (engine, cpu, queue) = (Engine::new(0), pool(), queue());
        let (begun, hears) = channel();
        let (blocker, open) = gate("blocker", false, &begun);
        let blocker = queue.begin(blocker);
        assert_eq!(hears.recv(), Ok("blocker"));
        let transfer = queue.begin(store(&cpu, &engine));
        assert!(cpu.audit().reserved_bytes > 0, "reserved by the caller");
        assert_eq!(cpu.longest_prefix("ns", &hashes(2)), 0);
        assert!(!transfer.is_done() && transfer.outcome().is_none());
        assert!(!transfer.wait(Some(Duration::from_millis(1))));
        if clears {
            cpu.clear();
        }
        open.send(()).expect("it waits");
        assert!(blocker.wait(None) && transfer.wait(Some(Duration::from_secs(60))));
        let chunks = if clears { 0 } else { 2 };
        assert_eq!(cpu.longest_prefix("ns", &hashes(2)), chunks);
        assert_eq!(stored(&transfer).chunks, chunks);
        drop(queue);
        assert_idle(&cpu);
    }
}

#[test]
fn a_dropped_handle_ends_nothing_and_leaks_nothing() {
    let (engine, cpu, queue) = (Engine::new(0), pool(), queue());
    for _ in 0..50 {
        drop(queue.begin(store(&cpu, &engine)));
        while cpu.longest_prefix("ns", &hashes(2)) < 2 {
            // Stores run where the processor is idle: this thread must leave it.
            thread::sleep(Duration::from_millis(1));
        }
        drop(queue.begin(load(&cpu, &engine)));
        cpu.clear();
        // What the load holds leaves with it.
        while cpu.audit().free_bytes < cpu.audit().capacity_bytes {
            thread::sleep(Duration::from_millis(1));
        }
    }
    drop(queue);
    assert_idle(&cpu);
    assert_eq!(cpu.audit().free_bytes, cpu.audit().capacity_bytes);
}

#[test]
fn loads_wait_for_no_store_and_each_kind_keeps_its_order() {
    let queue = queue();
    let (begun, hears) = channel();
    let mut gates = Vec::new();
    let mut hand_over = |name, is_awaited| {
        let (work, open) = gate(name, is_awaited, &begun);
        gates.push((queue.begin(work), open));
    };
    let hear = || hears.recv_timeout(Duration::from_secs(60));
    hand_over("store", false);
    assert_eq!(hear(), Ok("store"));
    hand_over("next store", false);
    hand_over("load", true);
    assert_eq!(hear(), Ok("load"), "behind a store that is under way");
    hand_over("next load", true);
    hand_over("last store", false);
    let open = |(transfer, open): &(Transfer, Sender<()>)| {
        open.send(()).expect("it waits");
        assert!(transfer.wait(Some(Duration::from_secs(60))));
    };
    open(&gates[2]);
    assert_eq!(hear(), Ok("next load"));
    open(&gates[0]);
    assert_eq!(hear(), Ok("next store"));
    open(&gates[1]);
    assert_eq!(hear(), Ok("last store"));
    [3, 4].iter().for_each(|at| open(&gates[*at]));
}

#[test]
fn who_waits_does_not_wait_for_another_transfer() {
    let (engine, cpu, queue) = (Engine::new(0), pool(), queue());
    let (begun, hears) = channel();
    let (blocker, open) = gate("blocker", true, &begun);
    let blocker = queue.begin(blocker);
    assert_eq!(hears.recv(), Ok("blocker"));
    let transfer = queue.begin(store(&cpu, &engine));
    assert!(transfer.wait(None));
    assert_eq!(stored(&transfer).chunks, 2);
    assert!(!blocker.is_done());
    open.send(()).expect("it waits");
    assert!(blocker.wait(None));
}

#[test]
fn a_panic_is_the_transfers_outcome_and_the_next_one_is_done() {
    let (engine, cpu, queue) = (Engine::new(0), pool(), queue());
    let (begun, hears) = channel();
    let (broken, open) = gate("broken", true, &begun);
    let broken = queue.begin(broken);
    let transfer = queue.begin(store(&cpu, &engine));
    assert_eq!(hears.recv(), Ok("broken"));
    drop(open);
    assert!(broken.wait(None));
    let outcome = broken.outcome().expect("it ended");
    assert!(outcome.is_err_and(|text| text.contains("the gate is broken")));
    assert!(transfer.wait(Some(Duration::from_secs(60))));
    assert_eq!(stored(&transfer).chunks, 2);
}

#[test]
fn a_close_waits_for_what_is_under_way_and_calls_off_the_rest() {
    let (engine, cpu, queue) = (Engine::new(0), pool(), queue());
    let (begun, hears) = channel();
    let (running, open) = gate("running", false, &begun);
    let running = queue.begin(running);
    assert_eq!(hears.recv(), Ok("running"));
    let (stolen, open_stolen) = gate("stolen", false, &begun);
    let stolen = queue.begin(stolen);
    let waiting = queue.begin(store(&cpu, &engine));
    thread::scope(|scope| {
        // Dropped in a panic, too, which nobody then waits behind.
        let (open, open_stolen) = (open, open_stolen);
        scope.spawn(|| stolen.wait(None));
        assert_eq!(hears.recv(), Ok("stolen"));
        let closing = scope.spawn(|| queue.close());
        assert!(waiting.wait(Some(Duration::from_secs(60))));
        assert_eq!(stored(&waiting), Stored::default());
        open.send(()).expect("it waits");
        assert!(running.wait(Some(Duration::from_secs(60))));
        thread::sleep(Duration::from_millis(5));
        assert!(!closing.is_finished(), "somebody copies still");
        open_stolen.send(()).expect("it waits");
    });
    assert!(stolen.is_done());
    assert_idle(&cpu);
    let late = queue.begin(store(&cpu, &engine));
    assert!(late.is_done());
    assert_eq!(stored(&late), Stored::default());
    queue.close();
    assert_idle(&cpu);
}

#[test]
fn what_moves_nothing_is_done_at_once_and_starts_no_thread() {
    let (engine, cpu) = (Engine::new(0), pool());
    crate::flow::store(&cpu, &engine.paged, &chunks(&hashes(2), &BLOCKS), 0).expect("stores");
    let queue = Queue::new(None);
    let transfer = queue.begin(store(&cpu, &engine));
    assert!(transfer.is_done());
    assert_eq!(stored(&transfer).chunks, 0);
    assert!(lock(&queue.shared.line).others.thread.is_none());
}
