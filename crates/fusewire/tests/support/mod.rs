//! A file system in memory whose handlers can be made to wait, and its mount.
//!
//! Names with a meaning: GETATTR of `gated...` and FLUSH of `closed...` wait at the gate; LOOKUP of
//! `panic` panics. SETLKW waits for the eventfd `unlock` inside `blocking`. Files are served by
//! direct I/O, so that every read and write is a request.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, Once, OnceLock};
use std::time::Duration;

use fusewire::abi::{Attr, AttrOut, EntryOut, FileLock, Kstatfs, OpenOut, ROOT_ID, fattr, fopen, init};
use fusewire::*;

/// How long the kernel may keep names and attributes, seconds.
const VALID: u64 = 3600;

#[derive(Clone, Default)]
pub struct Node {
    pub attr: Attr,
    pub data: Vec<u8>,
    pub children: BTreeMap<Vec<u8>, u64>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

pub struct TestFs {
    pub nodes: Mutex<BTreeMap<u64, Node>>,
    pub gate: (Mutex<bool>, Condvar),
    /// Handlers that wait at the gate or for a lock.
    pub waiting: AtomicU64,
    pub unlock: OwnedFd,
    pub backing: OnceLock<(Backing, OwnedFd)>,
    pub session: OnceLock<Observer>,
    pub forgotten: AtomicU64,
    pub destroyed: AtomicU64,
    pub workers: AtomicU64,
    pub own_requests: AtomicU64,
    /// How many requests each thread has handled.
    pub handled: Mutex<HashMap<i32, u64>>,
    pub settings: Settings,
}

impl TestFs {
    pub fn new(settings: Settings) -> Arc<TestFs> {
        let root =
            Node { attr: Attr { ino: ROOT_ID, mode: 0o040_777, nlink: 2, ..Attr::default() }, ..Node::default() };
        Arc::new(TestFs {
            nodes: Mutex::new(BTreeMap::from([(ROOT_ID, root)])),
            gate: (Mutex::new(false), Condvar::new()),
            waiting: AtomicU64::new(0),
            unlock: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap(),
            backing: OnceLock::new(),
            session: OnceLock::new(),
            forgotten: AtomicU64::new(0),
            destroyed: AtomicU64::new(0),
            workers: AtomicU64::new(0),
            own_requests: AtomicU64::new(0),
            handled: Mutex::default(),
            settings,
        })
    }

    pub fn open_gate(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }

    /// Waits until that many handlers are waiting.
    pub fn await_waiting(&self, count: u64) {
        while self.waiting.load(SeqCst) < count {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn entry(nodes: &BTreeMap<u64, Node>, nodeid: u64) -> Result<EntryOut, Errno> {
        let attr = nodes.get(&nodeid).ok_or(Errno::ENOENT)?.attr;
        Ok(EntryOut { nodeid, entry_valid: VALID, attr_valid: VALID, attr, ..EntryOut::default() })
    }

    fn create(&self, parent: u64, name: &[u8], mode: u32, data: &[u8]) -> Result<EntryOut, Errno> {
        let mut nodes = self.nodes.lock().unwrap();
        let id = nodes.keys().next_back().unwrap() + 1;
        let attr = Attr { ino: id, mode, nlink: 1, size: data.len() as u64, blksize: 4096, ..Attr::default() };
        nodes.insert(id, Node { attr, data: data.to_vec(), ..Node::default() });
        nodes.get_mut(&parent).ok_or(Errno::ENOENT)?.children.insert(name.to_vec(), id);
        TestFs::entry(&nodes, id)
    }

    /// Waits until the gate is open, if the file has such a name.
    fn pass_gate(&self, nodeid: u64, gated: &[u8]) {
        let is_gated = {
            let nodes = self.nodes.lock().unwrap();
            nodes[&ROOT_ID].children.iter().any(|(name, id)| *id == nodeid && name.starts_with(gated))
        };
        if is_gated {
            self.waiting.fetch_add(1, SeqCst);
            let open = self.gate.0.lock().unwrap();
            drop(self.gate.1.wait_while(open, |open| !*open).unwrap());
        }
    }

    fn open(&self) -> OpenOut {
        match self.backing.get() {
            Some((backing, file)) => {
                let id = backing.open(file.as_fd()).unwrap();
                OpenOut { fh: id as u64, open_flags: fopen::PASSTHROUGH, backing_id: id }
            }
            None => OpenOut { fh: 0, open_flags: fopen::DIRECT_IO, backing_id: 0 },
        }
    }
}

impl Handler for TestFs {
    fn init(&self, _: &Offer) -> Settings {
        self.settings
    }

    fn worker_started(&self) {
        self.workers.fetch_add(1, SeqCst);
    }

    fn destroy(&self) {
        self.destroyed.fetch_add(1, SeqCst);
    }

    fn forget(&self, _: u64, lookups: u64) {
        self.forgotten.fetch_add(lookups, SeqCst);
    }

    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let node = request.header.nodeid;
        *self.handled.lock().unwrap().entry(rustix::thread::gettid().as_raw_pid()).or_default() += 1;
        if self.session.get().is_some_and(|session| session.is_own_thread(request.header.pid)) {
            self.own_requests.fetch_add(1, SeqCst);
            return Err(Errno(libc::EDEADLK));
        }
        match request.op {
            Op::Lookup { name: b"panic" } => panic!("as asked for"),
            Op::Lookup { name: b"self" } => {
                // A request of the server to its own mount: refused at once.
                let path = PathBuf::from(String::from_utf8(self.nodes.lock().unwrap()[&ROOT_ID].data.clone()).unwrap());
                let error = std::fs::metadata(path.join("other")).unwrap_err();
                Err(Errno(error.raw_os_error().unwrap()))
            }
            Op::Lookup { name } => {
                let nodes = self.nodes.lock().unwrap();
                match nodes.get(&node).ok_or(Errno::ENOENT)?.children.get(name) {
                    Some(id) => reply.entry(&TestFs::entry(&nodes, *id)?),
                    None => reply.no_entry(VALID, 0),
                }
            }
            Op::Getattr { .. } => {
                self.pass_gate(node, b"gated");
                let attr = self.nodes.lock().unwrap().get(&node).ok_or(Errno::ENOENT)?.attr;
                reply.attr(&AttrOut { attr_valid: VALID, attr, ..AttrOut::default() })
            }
            Op::Setattr(change) => {
                let mut nodes = self.nodes.lock().unwrap();
                let node = nodes.get_mut(&node).ok_or(Errno::ENOENT)?;
                if change.valid & fattr::MODE != 0 {
                    node.attr.mode = change.mode;
                }
                if change.valid & fattr::SIZE != 0 {
                    node.data.resize(change.size as usize, 0);
                    node.attr.size = change.size;
                }
                reply.attr(&AttrOut { attr_valid: VALID, attr: node.attr, ..AttrOut::default() })
            }
            Op::Symlink { name, target } => reply.entry(&self.create(node, name, 0o120_777, target)?),
            Op::Mkdir { name, mode, .. } => reply.entry(&self.create(node, name, 0o040_000 | mode, b"")?),
            Op::Readlink => {
                let nodes = self.nodes.lock().unwrap();
                reply.bytes(&nodes.get(&node).ok_or(Errno::ENOENT)?.data)
            }
            Op::Create { name, mode, .. } => {
                let entry = self.create(node, name, mode, b"")?;
                reply.created(&entry, &self.open())
            }
            Op::Unlink { name } => {
                let mut nodes = self.nodes.lock().unwrap();
                nodes.get_mut(&node).ok_or(Errno::ENOENT)?.children.remove(name).map(drop).ok_or(Errno::ENOENT)
            }
            Op::Rename { name, new_dir, new_name, .. } => {
                let mut nodes = self.nodes.lock().unwrap();
                let id = nodes.get_mut(&node).and_then(|node| node.children.remove(name)).ok_or(Errno::ENOENT)?;
                nodes.get_mut(&new_dir).ok_or(Errno::ENOENT)?.children.insert(new_name.to_vec(), id);
                Ok(())
            }
            Op::Open { .. } => reply.open(&self.open()),
            Op::Opendir { .. } => reply.open(&OpenOut::default()),
            Op::Read { offset, size, .. } => {
                let nodes = self.nodes.lock().unwrap();
                let data = &nodes.get(&node).ok_or(Errno::ENOENT)?.data;
                let start = (offset as usize).min(data.len());
                let end = (start + size as usize).min(data.len());
                reply.buffer(size as usize)[..end - start].copy_from_slice(&data[start..end]);
                reply.filled(end - start)
            }
            Op::Write { offset, data, .. } => {
                let mut nodes = self.nodes.lock().unwrap();
                let node = nodes.get_mut(&node).ok_or(Errno::ENOENT)?;
                let end = offset as usize + data.len();
                if node.data.len() < end {
                    node.data.resize(end, 0);
                    node.attr.size = end as u64;
                }
                node.data[offset as usize..end].copy_from_slice(data);
                reply.written(data.len() as u32)
            }
            Op::Readdir { offset, size, .. } => {
                let nodes = self.nodes.lock().unwrap();
                let mut list = reply.directory(size);
                for (index, (name, id)) in
                    nodes.get(&node).ok_or(Errno::ENOENT)?.children.iter().enumerate().skip(offset as usize)
                {
                    if !list.add(*id, index as u64 + 1, (nodes[id].attr.mode >> 12) as u8, name) {
                        break;
                    }
                }
                Ok(())
            }
            Op::Readdirplus { offset, size, .. } => {
                let nodes = self.nodes.lock().unwrap();
                let mut list = reply.directory(size);
                for (index, (name, id)) in
                    nodes.get(&node).ok_or(Errno::ENOENT)?.children.iter().enumerate().skip(offset as usize)
                {
                    if !list.add_plus(
                        &TestFs::entry(&nodes, *id)?,
                        *id,
                        index as u64 + 1,
                        (nodes[id].attr.mode >> 12) as u8,
                        name,
                    ) {
                        break;
                    }
                }
                Ok(())
            }
            Op::Setxattr { name, value, .. } => {
                let mut nodes = self.nodes.lock().unwrap();
                nodes.get_mut(&node).ok_or(Errno::ENOENT)?.xattrs.insert(name.to_vec(), value.to_vec());
                Ok(())
            }
            Op::Getxattr { name, size } => {
                let nodes = self.nodes.lock().unwrap();
                let value = nodes.get(&node).and_then(|node| node.xattrs.get(name)).ok_or(Errno(libc::ENODATA))?;
                match size as usize {
                    0 => reply.xattr_size(value.len() as u32),
                    size if size < value.len() => Err(Errno::ERANGE),
                    _ => reply.bytes(value),
                }
            }
            Op::Statfs => reply.statfs(&Kstatfs { bsize: 4096, frsize: 4096, namelen: 255, ..Kstatfs::default() }),
            Op::Getlk { lock, .. } => reply.lock(&FileLock { r#type: libc::F_UNLCK as u32, ..lock }),
            Op::Setlk { wait: false, .. } => Ok(()),
            Op::Setlk { wait: true, .. } => {
                let mut value = [0_u8; 8];
                let read = blocking(|| {
                    self.waiting.fetch_add(1, SeqCst);
                    rustix::io::read(self.unlock.as_fd(), &mut value)
                })?;
                read.map(drop).map_err(Errno::from)
            }
            Op::Release { fh, .. } => {
                if let Some((backing, _)) = self.backing.get() {
                    backing.close(fh as i32).unwrap();
                }
                Ok(())
            }
            Op::Flush { .. } => {
                self.pass_gate(node, b"closed");
                Ok(())
            }
            Op::Releasedir { .. } | Op::Fsync { .. } => Ok(()),
            _ => Err(Errno::ENOSYS),
        }
    }
}

pub fn settings() -> Settings {
    Settings {
        flags: Settings::default().flags | init::POSIX_LOCKS | init::ABORT_ERROR,
        max_io: 256 << 10,
        ..Settings::default()
    }
}

/// A mount for one test.
pub struct Mount {
    pub fs: Arc<TestFs>,
    pub session: Session,
    pub dir: tempfile::TempDir,
}

impl Mount {
    pub fn new(transport: TransportChoice) -> Mount {
        Mount::with(transport, settings(), &MountOptions::default())
    }

    pub fn with(transport: TransportChoice, settings: Settings, options: &MountOptions) -> Mount {
        Mount::with_session(SessionOptions { transport, ..SessionOptions::default() }, settings, options)
    }

    pub fn with_session(session: SessionOptions, settings: Settings, options: &MountOptions) -> Mount {
        let dir = tempfile::tempdir().unwrap();
        let fs = TestFs::new(settings);
        let device = mount(dir.path(), options).unwrap();
        MOUNTPOINTS.lock().unwrap().push(dir.path().to_owned());
        let session = Session::start(device, Arc::clone(&fs) as Arc<dyn Handler>, session).unwrap();
        fs.session.set(session.observer()).ok().unwrap();
        Mount { fs, session, dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sends one GETATTR request, whatever is cached.
    pub fn getattr(&self, name: &str) -> rustix::io::Result<rustix::fs::Statx> {
        getattr(&self.path(name))
    }
}

pub fn getattr(path: &Path) -> rustix::io::Result<rustix::fs::Statx> {
    rustix::fs::statx(rustix::fs::CWD, path, rustix::fs::AtFlags::STATX_FORCE_SYNC, rustix::fs::StatxFlags::BASIC_STATS)
}

/// The transports that work here; prints why one does not.
pub fn transports() -> Vec<TransportChoice> {
    watchdog();
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        eprintln!("skipped: /dev/fuse cannot be used: {error}");
        return Vec::new();
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounting needs root here");
        return Vec::new();
    }
    let uring = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring").unwrap_or_default();
    if uring.trim() == "Y" {
        vec![TransportChoice::Device, TransportChoice::Uring]
    } else {
        eprintln!("skipped for io_uring: the kernel does not offer it (/sys/module/fuse/parameters/enable_uring)");
        vec![TransportChoice::Device]
    }
}

/// The mount points of this process.
static MOUNTPOINTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Aborts a hanging test: it must not hang the machine. As the process is its own client, it could not even
/// exit while one of its threads waits for another, so all connections are aborted first.
fn watchdog() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(180));
            eprintln!("a test hangs; giving up");
            for path in MOUNTPOINTS.lock().unwrap().iter() {
                let _ = rustix::mount::unmount(
                    path,
                    rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH,
                );
            }
            std::process::exit(1);
        });
    });
}

/// Keeps the calling thread on CPU 0, so that all its requests go to one queue.
pub fn pin() {
    let mut set = rustix::thread::CpuSet::new();
    set.set(0);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
