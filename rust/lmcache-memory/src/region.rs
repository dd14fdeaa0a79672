//! One mapped piece of host memory, in huge pages where the system has them to give: a disk then reads into few
//! pieces instead of many, and copies miss fewer translations.
//!
//! The pages are touched in parallel when the region is made, so that no page fault meets a copy and a
//! lack of memory shows at start-up, not in the middle of a request. A forked child gets no part of it: it
//! can neither write to the parent's pool nor keep it after the parent's end.
//!
//! A region may be made for other processes to read: a memfd, unlinked by construction, to which few systems give
//! huge pages. Its descriptor is kept, sealed against writes and against another size, and [`ForeignRegion`] is what
//! the process that it is given to makes of it.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::thread;

use crate::error::MemoryError;
use crate::object::Place;

/// Granularity of the region and of everything carved from it, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// What a thread touches is whole pieces of so many bytes: a huge page of most systems.
const HUGE_PAGE_BYTES: usize = 2 << 20;

const MAX_TOUCH_THREADS: usize = 8;

/// A mapped, touched piece of memory. Unmapped when dropped.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    /// The process that mapped it.
    pid: u32,
    /// There if others may read the region.
    descriptor: Option<OwnedFd>,
}

// SAFETY: the region is plain memory owned by this value. Who may touch which bytes is settled by
// `object.rs`, which hands every extent to one owner at a time.
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself reads and writes no byte after construction.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `asked` bytes, rounded down to whole pages, and touches them all.
    pub fn new(asked: u64) -> Result<Self, MemoryError> {
        Self::map(asked, false)
    }

    /// As [`Region::new`], for others to read: see [`Region::descriptor`].
    pub fn new_shared(asked: u64) -> Result<Self, MemoryError> {
        Self::map(asked, true)
    }

    fn map(asked: u64, is_shared: bool) -> Result<Self, MemoryError> {
        let len = (asked - asked % PAGE_BYTES as u64) as usize;
        if len == 0 {
            return Err(MemoryError::TooSmall { asked });
        }
        let available = available_bytes();
        if available.is_some_and(|available| asked > available) {
            return Err(MemoryError::NotEnough {
                asked,
                available: available.unwrap_or(0),
            });
        }
        let failed = |call| {
            move |source| MemoryError::System {
                call,
                asked,
                source,
            }
        };
        let descriptor = match is_shared {
            true => Some(create_memfd(len).map_err(failed("memfd_create"))?),
            false => None,
        };
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let file = descriptor.as_ref().map(AsFd::as_fd);
        let base = map(file, len, writable).map_err(failed("mmap"))?;
        let pid = process::id();
        let region = Self {
            base,
            len,
            pid,
            descriptor,
        };
        if let Some(fd) = &region.descriptor {
            // From here on nobody can map it to write, not even this process.
            seal(fd).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        }
        // SAFETY: the mapping just made; its bytes stay as they are. A system without huge pages says so, and goes
        // on with small ones.
        let _ = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        // SAFETY: the mapping just made; its bytes stay as they are.
        let outcome = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        if outcome != 0 {
            return Err(failed("madvise")(io::Error::last_os_error()));
        }
        region.touch().map_err(failed("madvise"))?;
        Ok(region)
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region holds no byte; it never does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// What another process makes a [`ForeignRegion`] of; `None` unless the region was made for that.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Where `len` bytes at `offset` lie, which are about to be read.
    pub(crate) fn read_ptr(&self, offset: u64, len: usize) -> *const u8 {
        self.write_ptr(offset, len)
    }

    /// Where `len` bytes at `offset` lie, which are about to be written.
    pub(crate) fn write_ptr(&self, offset: u64, len: usize) -> *mut u8 {
        debug_assert!(offset + len as u64 <= self.len as u64);
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    /// Makes the kernel provide every page, by several threads, each on a part of its own.
    fn touch(&self) -> io::Result<()> {
        let threads = thread::available_parallelism()
            .map_or(1, NonZeroUsize::get)
            .min(MAX_TOUCH_THREADS);
        let part = self.len.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
        let base = self.base.as_ptr() as usize;
        thread::scope(|scope| {
            let parts = (0..self.len).step_by(part);
            let touching: Vec<_> = parts
                .map(|at| scope.spawn(move || populate(base + at, part.min(self.len - at))))
                .collect();
            touching.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("a touching thread panicked")))
            })
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if process::id() != self.pid {
            // A forked child: nothing of ours is mapped here, and the address may be somebody else's.
            return;
        }
        // SAFETY: `base` and `len` are those of the mapping made in `new`. Every extent carved from it holds
        // the region through an `Arc`, so nobody can touch the bytes any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn create_memfd(len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated literal; no memory is shared with the call.
    let fd = unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        libc::memfd_create(c"lmcache_rs".as_ptr(), flags)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: a valid descriptor and a length; no memory is shared with the call.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// What a region that others read is sealed with. Without the one against shrinking, a read could end the
/// reader's process.
const SEALS: libc::c_int =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

fn seal(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: a valid descriptor and a number; no memory is shared with the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A region of another process, mapped to be read.
#[derive(Debug)]
pub struct ForeignRegion {
    base: NonNull<u8>,
    len: usize,
    /// The process that mapped it.
    pid: u32,
}

// SAFETY: nothing is ever written through it; what its owner may write meanwhile, see `ForeignChunk::bytes`.
unsafe impl Send for ForeignRegion {}
// SAFETY: as above.
unsafe impl Sync for ForeignRegion {}

impl ForeignRegion {
    /// Maps what [`Region::descriptor`] gave where the region is.
    pub fn map(descriptor: BorrowedFd<'_>) -> Result<Self, MemoryError> {
        let failed = |call, asked| {
            move |source| MemoryError::System {
                call,
                asked,
                source,
            }
        };
        // SAFETY: asks about a descriptor; no memory is shared with the call.
        let seals = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) };
        if seals & SEALS != SEALS || seals < 0 {
            return Err(MemoryError::NotAPool);
        }
        let file = fs::File::from(
            descriptor
                .try_clone_to_owned()
                .map_err(failed("fcntl(F_DUPFD)", 0))?,
        );
        let asked = file.metadata().map_err(failed("fstat", 0))?.len();
        let len = usize::try_from(asked).ok().filter(|&len| len > 0);
        let len = len.ok_or(MemoryError::NotAPool)?;
        let base = map(Some(file.as_fd()), len, libc::PROT_READ).map_err(failed("mmap", asked))?;
        let pid = process::id();
        let region = Self { base, len, pid };
        // SAFETY: the mapping just made; its bytes stay as they are.
        let outcome = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        if outcome != 0 {
            return Err(failed("madvise", asked)(io::Error::last_os_error()));
        }
        Ok(region)
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region holds no byte; it never does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What lies there; `None` if the region does not go so far.
    pub fn chunk(self: &Arc<Self>, place: Place) -> Option<ForeignChunk> {
        let end = place.offset.checked_add(place.len)?;
        let fits = usize::try_from(end).is_ok_and(|end| end <= self.len);
        fits.then(|| ForeignChunk {
            region: Arc::clone(self),
            place,
        })
    }
}

impl Drop for ForeignRegion {
    fn drop(&mut self) {
        if process::id() != self.pid {
            // As for `Region`.
            return;
        }
        // SAFETY: `base` and `len` are those of the mapping made in `map`, and every chunk of it holds the
        // region through an `Arc`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A chunk in a [`ForeignRegion`].
///
/// It holds the mapping, and not the chunk: that is what its owner was asked for, and only while the owner
/// holds it do the bytes stay as they are.
#[derive(Debug, Clone)]
pub struct ForeignChunk {
    region: Arc<ForeignRegion>,
    place: Place,
}

impl ForeignChunk {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let Place { offset, len } = self.place;
        let first = self.region.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: within the mapping, as `ForeignRegion::chunk` has seen to, which the `Arc` keeps and whose
        // file cannot shrink. Its owner writes none of these bytes while it holds the chunk. Should it lose
        // the hold, it may; any value is a byte, and what was read is thrown away when the hold is given back.
        unsafe { slice::from_raw_parts(first, len as usize) }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.place.len as usize
    }

    /// Whether the chunk holds no byte.
    pub fn is_empty(&self) -> bool {
        self.place.len == 0
    }
}

/// Maps a file for all who have it, or memory of this process alone.
fn map(file: Option<BorrowedFd<'_>>, len: usize, access: libc::c_int) -> io::Result<NonNull<u8>> {
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a fresh mapping at an address of the kernel's choice; nothing of ours lies there.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

fn populate(address: usize, len: usize) -> io::Result<()> {
    loop {
        // SAFETY: the range lies within the region's mapping, which `Region::touch` borrows for as long as
        // the threads run; populating changes no byte.
        let outcome = unsafe { libc::madvise(address as *mut _, len, libc::MADV_POPULATE_WRITE) };
        if outcome == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Kernels before 5.14: the first write to each page provides it.
            Some(libc::EINVAL) => break,
            _ => return Err(error),
        }
    }
    for page in (address..address + len).step_by(PAGE_BYTES) {
        // SAFETY: within the mapping as above, and not yet handed out, so nobody else touches the byte.
        unsafe { ptr::write_volatile(page as *mut u8, 0) };
    }
    Ok(())
}

/// What the system, and the control group this process is in, can still give. `None` if neither says.
pub fn available_bytes() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text
            .lines()
            .find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace()
            .nth(1)?
            .parse::<u64>()
            .ok()
            .map(|kib| kib * 1024)
    });
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_available_bytes(&own, Path::new("/sys/fs/cgroup"));
    system.into_iter().chain(group).min()
}

/// What the control groups named in `own` (the text of `/proc/self/cgroup`), and all above them, can give.
fn group_available_bytes(own: &str, mounted_at: &Path) -> Option<u64> {
    let groups = own.lines().filter_map(|line| {
        let (_, line) = line.split_once(':')?;
        let (controllers, path) = line.split_once(':')?;
        let v1 = controllers.split(',').any(|name| name == "memory");
        (v1 || controllers.is_empty()).then_some((v1, path))
    });
    // The root says it even where the path is one of the host's, unknown inside a container.
    let roots = [(false, "/"), (true, "/")];
    let of_group = |(v1, path): (bool, &str)| {
        let (root, limit, usage, cache) = match v1 {
            true => (
                mounted_at.join("memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
            false => (
                mounted_at.into(),
                "memory.max",
                "memory.current",
                "inactive_file",
            ),
        };
        let own = root.join(path.trim_start_matches('/'));
        let above = own.ancestors().take_while(|above| above.starts_with(&root));
        let available = above.filter_map(|group| {
            let read = |name| fs::read_to_string(group.join(name)).ok();
            let number = |name| read(name)?.trim().parse::<u64>().ok();
            let stat = read("memory.stat").unwrap_or_default();
            let cached = stat.lines().find_map(|line| {
                let (name, value) = line.split_once(' ')?;
                (name == cache).then(|| value.trim().parse::<u64>().ok())?
            });
            // File cache that nobody uses gives way before a group's limit is met.
            let used = number(usage)?.saturating_sub(cached.unwrap_or(0));
            Some(number(limit)?.saturating_sub(used))
        });
        available.min()
    };
    groups.chain(roots).filter_map(of_group).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_whole_pages_and_zeroed() {
        let region = Region::new(3 * PAGE_BYTES as u64 + 5).expect("three pages");
        assert_eq!(region.len(), 3 * PAGE_BYTES);
        // SAFETY: freshly mapped and touched; nobody else knows the region.
        let bytes = unsafe { std::slice::from_raw_parts(region.base().as_ptr(), region.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_forked_child_has_no_part_of_it() {
        let region = Region::new(PAGE_BYTES as u64).expect("one page");
        let is_mapped = || {
            let mut resident = 0u8;
            let (base, resident) = (region.base().as_ptr().cast(), &raw mut resident);
            // SAFETY: asks about one page and writes one byte of the answer.
            unsafe { libc::mincore(base, PAGE_BYTES, resident.cast()) == 0 }
        };
        assert!(is_mapped());
        // SAFETY: the child makes one system call and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(is_mapped())) };
        }
        let mut status = -1;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child sees the parent's memory");
    }

    #[test]
    fn what_a_shared_region_holds_is_read_through_its_descriptor_and_not_written() {
        assert!(
            Region::new(1 << 16)
                .expect("a region")
                .descriptor()
                .is_none()
        );
        let region = Region::new_shared(3 * PAGE_BYTES as u64).expect("a region");
        let descriptor = region.descriptor().expect("it was made for that");
        let foreign = Arc::new(ForeignRegion::map(descriptor).expect("a sealed pool"));
        assert_eq!((foreign.len(), foreign.is_empty()), (region.len(), false));
        let place = Place {
            offset: PAGE_BYTES as u64,
            len: 5,
        };
        let chunk = foreign.chunk(place).expect("it lies within");
        assert_eq!(chunk.bytes(), [0; 5]);
        // SAFETY: nobody else reads or writes the region now.
        unsafe { ptr::write_bytes(region.write_ptr(place.offset, 5), 7, 5) };
        assert_eq!(chunk.bytes(), [7; 5]);
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        assert!(map(Some(descriptor), region.len(), writable).is_err());
        // SAFETY: asks for another size, which is refused; no memory is shared with the call.
        assert_ne!(unsafe { libc::ftruncate(descriptor.as_raw_fd(), 0) }, 0);
        // It outlives the owner's mapping.
        drop(region);
        assert_eq!(chunk.bytes(), [7; 5]);
    }

    #[test]
    fn a_place_beyond_the_region_is_no_chunk() {
        let region = Region::new_shared(2 * PAGE_BYTES as u64).expect("a region");
        let foreign = ForeignRegion::map(region.descriptor().expect("shared")).expect("a pool");
        let foreign = Arc::new(foreign);
        let len = 2 * PAGE_BYTES as u64;
        for (offset, len) in [(0, len + 1), (len, 1), (u64::MAX, 2), (1, u64::MAX)] {
            assert!(
                foreign.chunk(Place { offset, len }).is_none(),
                "{offset} {len}"
            );
        }
        assert!(foreign.chunk(Place { offset: 0, len }).is_some());
    }

    #[test]
    fn what_is_no_sealed_memory_is_no_pool() {
        // It could shrink under its reader.
        let open = create_memfd(PAGE_BYTES).expect("a memfd");
        let file = fs::File::open("/dev/zero").expect("a device");
        for descriptor in [open.as_fd(), file.as_fd()] {
            let refused = ForeignRegion::map(descriptor);
            assert!(matches!(refused, Err(MemoryError::NotAPool)), "{refused:?}");
        }
    }

    #[test]
    fn the_tightest_group_counts_and_idle_file_cache_does_not() {
        let root = std::env::temp_dir().join(format!("lmcache-cgroup-{}", process::id()));
        let group = |path: &str, names: [&str; 3], max: &str, used: u64, cache: u64| {
            let group = root.join(path);
            fs::create_dir_all(&group).expect("a folder");
            fs::write(group.join(names[0]), format!("{max}\n")).expect("a file");
            fs::write(group.join(names[1]), format!("{used}\n")).expect("a file");
            let stat = format!("anon 5\n{} {cache}\n", names[2]);
            fs::write(group.join("memory.stat"), stat).expect("a file");
        };
        let v2 = ["memory.max", "memory.current", "inactive_file"];
        group("a/b", v2, "max", 900, 0);
        group("a", v2, "1000", 900, 300);
        assert_eq!(group_available_bytes("0::/a/b\n", &root), Some(400));
        assert_eq!(group_available_bytes("0::/unknown\n", &root), None);
        let names = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
        let v1 = [names[0], names[1], "total_inactive_file"];
        group("memory/c", v1, "500", 450, 20);
        let own = "5:cpu:/x\n4:rdma,memory:/c\n0::/a/b\n";
        assert_eq!(group_available_bytes(own, &root), Some(70));
        group("", v2, "60", 10, 0);
        assert_eq!(group_available_bytes("0::/unknown\n", &root), Some(50));
        fs::remove_dir_all(root).expect("it is ours");
    }

    #[test]
    fn too_small_and_too_large_are_errors_with_numbers() {
        assert!(matches!(
            Region::new(4095),
            Err(MemoryError::TooSmall { asked: 4095 })
        ));
        let asked = available_bytes().expect("Linux says") + (1 << 40);
        assert!(matches!(
            Region::new(asked),
            Err(MemoryError::NotEnough { .. })
        ));
    }
}
