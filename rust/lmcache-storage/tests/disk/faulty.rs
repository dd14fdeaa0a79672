//! The system's files, with each operation counted and, at the test's choice, failed, cut short, or the last.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use lmcache_storage::local_disk::files::{Files, Listed, Open, OpenFile, SystemFiles};

/// What happens at an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// It fails with this errno.
    Errno(i32),
    /// It reads or writes one page, or a byte where there is less.
    Short,
    /// The process is gone before it.
    KillBefore,
    /// The process is gone after it.
    KillAfter,
}

/// A step that changes what is on the disk, as the power may cut between it and the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Create(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    Sync(PathBuf),
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Operations so far.
    pub(crate) count: AtomicUsize,
    /// From which operation on the plan holds, and for how many.
    pub(crate) at: AtomicUsize,
    pub(crate) times: AtomicUsize,
    pub(crate) plan: Mutex<Option<Plan>>,
    pub(crate) boot: AtomicUsize,
    pub(crate) trace: Mutex<Option<Vec<Step>>>,
    pub(crate) hit: AtomicBool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FaultyFiles(pub(crate) Arc<Shared>);

impl FaultyFiles {
    pub(crate) fn new() -> Self {
        let files = Self::default();
        files.0.boot.store(1, Ordering::SeqCst);
        files
    }

    /// From the `at`th operation from now on, `times` of them meet the plan.
    pub(crate) fn plan(&self, at: usize, times: usize, plan: Plan) {
        let now = self.0.count.load(Ordering::SeqCst);
        self.0.hit.store(false, Ordering::SeqCst);
        self.0.at.store(now + at, Ordering::SeqCst);
        self.0.times.store(times, Ordering::SeqCst);
        *self.0.plan.lock().unwrap() = Some(plan);
    }

    pub(crate) fn heal(&self) {
        *self.0.plan.lock().unwrap() = None;
    }

    pub(crate) fn was_hit(&self) -> bool {
        self.0.hit.load(Ordering::SeqCst)
    }

    pub(crate) fn record(&self) {
        *self.0.trace.lock().unwrap() = Some(Vec::new());
    }

    pub(crate) fn recorded(&self) -> Vec<Step> {
        self.0.trace.lock().unwrap().take().unwrap_or_default()
    }
}

impl Shared {
    fn note(&self, step: impl FnOnce() -> Step) {
        if let Some(trace) = self.trace.lock().unwrap().as_mut() {
            trace.push(step());
        }
    }

    fn meet(&self) -> Option<Plan> {
        let now = self.count.fetch_add(1, Ordering::SeqCst);
        let plan = (*self.plan.lock().unwrap())?;
        let at = self.at.load(Ordering::SeqCst);
        let meets = now >= at && now < at.saturating_add(self.times.load(Ordering::SeqCst));
        meets.then(|| self.hit.store(true, Ordering::SeqCst));
        meets.then_some(plan)
    }

    fn around<T>(&self, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.meet() {
            Some(Plan::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Plan::KillBefore) => die(),
            Some(Plan::KillAfter) => {
                let _ = operation();
                die()
            }
            Some(Plan::Short) | None => operation(),
        }
    }
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

#[derive(Debug)]
struct File {
    file: Box<dyn OpenFile>,
    path: PathBuf,
    shared: Arc<Shared>,
}

fn cut(len: usize) -> usize {
    if len > 4096 { 4096 } else { len.min(1) }
}

impl OpenFile for File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        match self.shared.meet() {
            Some(Plan::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Plan::KillBefore | Plan::KillAfter) => die(),
            Some(Plan::Short) if into.len() > 4096 => self.file.read_at(&mut into[..4096], at),
            _ => self.file.read_at(into, at),
        }
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let plan = self.shared.meet();
        let bytes = match plan {
            Some(Plan::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Plan::KillBefore) => die(),
            Some(Plan::Short) if bytes.len() > 4096 => &bytes[..cut(bytes.len())],
            _ => bytes,
        };
        let count = self.file.write_at(bytes, at)?;
        self.shared
            .note(|| Step::Write(self.path.clone(), at, bytes[..count].to_vec()));
        if plan == Some(Plan::KillAfter) {
            die();
        }
        Ok(count)
    }

    fn bytes(&self) -> io::Result<u64> {
        self.shared.around(|| self.file.bytes())
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.around(|| self.file.sync())?;
        self.shared.note(|| Step::Sync(self.path.clone()));
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        self.shared.around(|| self.file.try_lock())
    }

    fn unlock(&self) -> io::Result<()> {
        // A lock that cannot be given back is no fault of any system we know.
        self.file.unlock()
    }
}

impl Files for FaultyFiles {
    fn open(&self, path: &Path, how: Open) -> io::Result<Box<dyn OpenFile>> {
        let is_new = how != Open::Read { direct: false }
            && how != (Open::Read { direct: true })
            && !path.exists();
        let file = self.0.around(|| SystemFiles.open(path, how))?;
        if is_new {
            self.0.note(|| Step::Create(path.into()));
        }
        let (path, shared) = (path.into(), Arc::clone(&self.0));
        Ok(Box::new(File { file, path, shared }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.around(|| SystemFiles.rename(from, to))?;
        self.0.note(|| Step::Rename(from.into(), to.into()));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.around(|| SystemFiles.remove(path))?;
        self.0.note(|| Step::Remove(path.into()));
        Ok(())
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.0.around(|| SystemFiles.make_folder(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.0.around(|| SystemFiles.remove_folder(path))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        self.0.around(|| SystemFiles.list(folder))
    }

    fn boot(&self) -> u64 {
        self.0.boot.load(Ordering::SeqCst) as u64
    }
}
