//! The walk: directories of SOURCE and DEST are opened in pairs, their names read in chunks and queued, and their
//! metadata set when the last name in them is done.
//!
//! A [`Pair`] lives as long as a worker has work in it; the worker that ends the last work finishes it
//! ([`Worker::release`]). A worker that finds more subdirectories than fit into the queue descends itself, and
//! returns to where it was; so memory and the number of open directories are bounded by the depth of the tree.

use crate::{
    content::{BUFFER, Ways},
    figures::add,
    job::Job,
    links::Links,
    metadata::{self, DEFAULT_ACL, Given, Meta, MetadataTarget, Rooms},
    pair::{DIR, DIRECTORY, Names, Pair, REG, UNKNOWN, open_directory, path_of},
    queue::{List, Queue, Subdirectory, Work},
    trouble::{During, Side, Trouble},
};
use nacre_sys::{directory, inode};
use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags},
    io::Errno,
};
use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

/// Buffer for one read of a directory; its names are processed in the order of their inodes, which is their order
/// on most devices.
const READING: usize = 256 << 10;
/// Buffer for one read of a directory that is open below many others.
const READING_DEEP: usize = 8 << 10;
/// Number of open directories from which the smaller buffer is used.
const DEEP: usize = 8;
/// Number of names in a list.
const NAMES: usize = 128;

/// A directory that a worker is reading.
struct Reader {
    pair: Arc<Pair>,
    buffer: Vec<u8>,
    /// Names read and not processed yet, the last one first: inode, type, start and length in the buffer.
    unmet: Vec<(u64, u8, u32, u16)>,
    names: Names,
}

impl Reader {
    fn new(pair: Arc<Pair>, above: usize) -> Reader {
        let room = if above < DEEP { READING } else { READING_DEEP };
        Reader { pair, buffer: vec![0; room], unmet: Vec::new(), names: Names::default() }
    }

    /// Reads the next names; returns whether there were any.
    fn read(&mut self) -> Result<bool, Errno> {
        loop {
            let filled = directory::read(self.pair.source.as_fd(), &mut self.buffer)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            if filled == 0 {
                return Ok(false);
            }
            let mut at = 0;
            while let Some(record) = self.buffer.get(at..filled).and_then(directory::first) {
                if record.name != b"." && record.name != b".." {
                    let start = u32::try_from(at + NAME_AT).unwrap_or(u32::MAX);
                    self.unmet.push((
                        record.ino,
                        record.kind,
                        start,
                        u16::try_from(record.name.len()).unwrap_or(u16::MAX),
                    ));
                }
                at += record.length;
            }
            if !self.unmet.is_empty() {
                self.unmet.sort_unstable_by(|one, other| other.cmp(one));
                return Ok(true);
            }
        }
    }
}

/// Offset of the name in a record of `getdents64(2)`.
const NAME_AT: usize = 19;

/// One walk through both trees: the copy, or the verification.
pub(crate) struct Walk<'a> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) compare: bool,
    pub(crate) queue: Queue,
    pub(crate) links: Links,
}

/// A worker thread.
pub(crate) struct Worker<'a> {
    pub(crate) walk: &'a Walk<'a>,
    pub(crate) number: usize,
    pub(crate) buffer: Vec<u8>,
    /// Second buffer, for comparing.
    pub(crate) second: Vec<u8>,
    pub(crate) rooms: Rooms,
    pub(crate) ways: HashMap<(u64, u64), Ways>,
}

/// Guard that lets the other workers end when one panics.
struct Closing<'a>(&'a Queue);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}

impl<'a> Worker<'a> {
    /// Makes a worker; concurrent workers have different numbers.
    pub(crate) fn new(walk: &'a Walk<'a>, number: usize) -> Worker<'a> {
        let second = if walk.compare { vec![0; BUFFER] } else { Vec::new() };
        Worker { walk, number, buffer: vec![0; BUFFER], second, rooms: Rooms::default(), ways: HashMap::new() }
    }

    pub(crate) fn job(&self) -> &'a Job<'a> {
        self.walk.job
    }

    /// Works until there is no more work, or the copy is to stop.
    pub(crate) fn work(mut self, root: Option<Arc<Pair>>) {
        let _closing = Closing(&self.walk.queue);
        let mut open: Vec<Reader> = root.into_iter().map(|pair| Reader::new(pair, 0)).collect();
        while !self.job().is_stopped() {
            let Some(reader) = open.last_mut() else {
                match self.walk.queue.take(|| self.job().is_stopped()) {
                    None => break,
                    Some(Work::List(list)) => self.list(list),
                    Some(Work::Directory(directory)) => open.extend(self.enter(directory, 0)),
                }
                continue;
            };
            match self.advance(reader) {
                Some(directory) => {
                    let above = open.len();
                    open.extend(self.enter(directory, above));
                }
                None => {
                    if let Some(reader) = open.pop() {
                        self.release(reader.pair);
                    }
                }
            }
        }
    }

    /// Queues the entries of a directory; returns a subdirectory that does not fit into the queue, or `None` at the
    /// end.
    fn advance(&mut self, reader: &mut Reader) -> Option<Subdirectory> {
        loop {
            while let Some((_, kind, start, length)) = reader.unmet.pop() {
                let start = start as usize;
                let name = reader.buffer.get(start..start + usize::from(length)).unwrap_or_default();
                if self.job().is_ours(&reader.pair, name) {
                    continue;
                }
                let kind = match kind {
                    UNKNOWN => match Meta::of_entry(reader.pair.source.as_fd(), name).source("look at") {
                        Ok(meta) if meta.kind == FileType::Directory => DIR,
                        Ok(meta) if meta.kind == FileType::RegularFile => REG,
                        Ok(_) => UNKNOWN,
                        Err(trouble) => {
                            self.account(&reader.pair, name, Err(trouble));
                            continue;
                        }
                    },
                    known => known,
                };
                if kind == DIR {
                    let directory = Subdirectory { parent: Arc::clone(&reader.pair), name: name.into() };
                    if let Err(directory) = self.walk.queue.offer_directory(directory) {
                        return Some(directory);
                    }
                    continue;
                }
                reader.names.push(name, kind == REG);
                if reader.names.len() >= NAMES {
                    let names = std::mem::take(&mut reader.names);
                    self.hand_out(&reader.pair, names);
                    if self.job().is_stopped() {
                        return None;
                    }
                }
            }
            match reader.read().source("read the directory") {
                Ok(true) => {}
                Ok(false) => break,
                Err(trouble) => {
                    self.job().failed(&trouble, &reader.pair.path);
                    break;
                }
            }
        }
        let names = std::mem::take(&mut reader.names);
        if names.len() > 0 {
            self.hand_out(&reader.pair, names);
        }
        None
    }

    fn hand_out(&mut self, pair: &Arc<Pair>, names: Names) {
        if let Err(list) = self.walk.queue.offer_list(List { pair: Arc::clone(pair), names }) {
            self.list(list);
        }
    }

    fn list(&mut self, list: List) {
        for (name, regular) in list.names.iter() {
            if self.job().is_stopped() {
                break;
            }
            let result = if self.walk.compare {
                self.compare_entry(&list.pair, name)
            } else {
                self.copy_entry(&list.pair, name, regular)
            };
            self.account(&list.pair, name, result);
        }
        self.release(list.pair);
    }

    /// Reports the failure of an entry, if it failed.
    pub(crate) fn account(&self, pair: &Pair, name: &[u8], result: Result<(), Trouble>) {
        if let Err(trouble) = result {
            self.job().failed(&trouble, &path_of(pair, name));
        }
    }

    /// Opens a subdirectory on both sides; `None` when nothing is to be read in it.
    fn enter(&mut self, directory: Subdirectory, above: usize) -> Option<Reader> {
        let Subdirectory { parent, name } = directory;
        let opened = self.open_pair(&parent, &name);
        let reader = match opened {
            Ok(Some((pair, true))) => Some(Reader::new(Arc::new(pair), above)),
            Ok(Some((pair, false))) => {
                self.release(Arc::new(pair));
                None
            }
            Ok(None) => None,
            Err(trouble) => {
                self.account(&parent, &name, Err(trouble));
                None
            }
        };
        self.release(parent);
        reader
    }

    /// Opens both directories of a name; returns them, and whether their content is copied; `None` for DEST itself.
    fn open_pair(&self, parent: &Pair, name: &[u8]) -> Result<Option<(Pair, bool)>, Trouble> {
        let job = self.job();
        let source = open_directory(&parent.source, name).source("open the directory")?;
        let meta = Meta::of_file(source.as_fd()).source("look at")?;
        let path = path_of(parent, name);
        if meta.identity() == job.dest_identity {
            job.notice(format!("{} is the destination itself: it is not copied into itself", path.display()));
            return Ok(None);
        }
        let enter = !job.options.one_file_system || meta.device == job.source_device;
        if !enter {
            add(&job.figures.not_entered, 1);
        }
        if self.walk.compare {
            let dest = open_directory(&parent.dest, name).destination("open the directory")?;
            return Ok(Some((Pair { path, source, dest, meta, device: 0, fresh: false }, enter)));
        }
        let (dest, fresh) = match fs::mkdirat(&parent.dest, name, Mode::RWXU) {
            Ok(()) => (open_directory(&parent.dest, name).destination("open the directory")?, true),
            Err(Errno::EXIST) if !parent.fresh => (open_existing(&parent.dest, name)?, false),
            made => return made.destination("create the directory").map(|()| None),
        };
        add(&job.figures.directories, 1);
        add(&job.figures.present_directories, u64::from(!fresh));
        let there = Meta::of_file(dest.as_fd()).destination("look at")?;
        let pair = Pair { path, source, dest, meta, device: there.device, fresh };
        self.prepare(&pair, &there)?;
        Ok(Some((pair, enter)))
    }

    /// Makes sure that a directory of DEST can be filled.
    pub(crate) fn prepare(&self, pair: &Pair, there: &Meta) -> Result<(), Trouble> {
        let job = self.job();
        job.writes_to(there.device, pair.dest.as_fd()).destination("open")?;
        if pair.fresh && !pair.is_root() {
            return Ok(());
        }
        if there.mode & 0o700 != 0o700 {
            // Where this is not allowed, creating entries below will fail.
            let _ = fs::fchmod(&pair.dest, Mode::from_raw_mode(there.mode | 0o700));
        }
        // Entries made here get the ACLs of SOURCE, not inherited ones.
        MetadataTarget::Open(pair.dest.as_fd())
            .remove(DEFAULT_ACL)
            .destination("remove the default access control list of")?;
        if job.resumed {
            self.sweep(pair)?;
        }
        Ok(())
    }

    /// Removes temporary files of an interrupted copy from a directory.
    fn sweep(&self, pair: &Pair) -> Result<(), Trouble> {
        let prefix = self.job().temporary_prefix();
        let mut buffer = vec![0; READING_DEEP];
        let mut left = Vec::new();
        loop {
            let filled = directory::read(pair.dest.as_fd(), &mut buffer).destination("read the directory")?;
            let mut rest = buffer.get(..filled).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            while let Some(record) = directory::first(rest) {
                if record.name.starts_with(prefix.as_bytes()) {
                    left.push(record.name.to_vec());
                }
                rest = rest.get(record.length..).unwrap_or_default();
            }
        }
        for name in left {
            fs::unlinkat(&pair.dest, name.as_slice(), AtFlags::empty())
                .destination("remove what an earlier copy left in")?;
        }
        Ok(())
    }

    /// Releases a reference to a directory; the last one sets its metadata.
    pub(crate) fn release(&mut self, pair: Arc<Pair>) {
        let Some(pair) = Arc::into_inner(pair) else { return };
        // An incomplete directory keeps a mode in which it can be filled.
        if self.job().is_stopped() {
            return;
        }
        let result = if self.walk.compare { self.compare_directory(&pair) } else { self.finish(&pair) };
        if let Err(trouble) = result {
            self.job().failed(&trouble, &pair.path);
        }
    }

    /// Sets the metadata of a directory whose content is complete.
    pub(crate) fn finish(&mut self, pair: &Pair) -> Result<(), Trouble> {
        let from = MetadataTarget::Open(pair.source.as_fd());
        let given = Given { file: pair.dest.as_fd(), handle: false, existing: !pair.fresh || pair.is_root(), from };
        metadata::give(self.job(), &mut self.rooms, &pair.meta, given)?;
        if pair.meta.flags != 0 {
            metadata::give_flags(self.job(), &pair.meta, pair.dest.as_fd())?;
        }
        Ok(())
    }
}

/// Opens an existing directory of DEST; one that its owner may not read is made readable for him.
fn open_existing(parent: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Trouble> {
    match fs::openat(parent, name, DIRECTORY, Mode::empty()) {
        Ok(opened) => return Ok(opened),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Err(Trouble::Fact(Side::Destination, "is no directory: it is not replaced by one".to_owned()));
        }
        Err(Errno::ACCESS) => {}
        Err(error) => return Err(error).destination("open the directory"),
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = fs::openat(parent, name, flags, Mode::empty()).destination("open the directory")?;
    let meta = Meta::of_file(handle.as_fd()).destination("look at")?;
    inode::change_mode(handle.as_fd(), meta.mode | 0o700).destination("open the directory")?;
    fs::openat(parent, name, DIRECTORY, Mode::empty()).destination("open the directory")
}
