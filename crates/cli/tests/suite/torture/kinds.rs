//! The kinds of writers: their write patterns, and the expected content after each answer.

use super::{Book, Stop, Writer};
use nacre_sys::mapping::SharedMapping;
use rustix::fs::{FallocateFlags, OFlags, copy_file_range, fallocate, sendfile};
use rustix::pipe::{SpliceFlags, pipe, splice};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// All kinds.
pub const KINDS: [&str; 16] = [
    "append-1",
    "append-100",
    "append-64k",
    "reopen",
    "sparse",
    "read-write",
    "o-sync",
    "o-direct",
    "holes",
    "copy",
    "mapped",
    "mapped-holes",
    "names",
    "links",
    "splice",
    "unlinked",
];

/// Kinds whose files can be compared after the daemon was killed during their work.
pub const KINDS_TO_KILL: [&str; 8] =
    ["append-1", "append-100", "append-64k", "reopen", "sparse", "read-write", "o-sync", "names"];

const PAGE: usize = 4096;

fn flags(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap()
}

impl Writer {
    /// Works until the stop file exists, or until the daemon is gone.
    pub fn work(&mut self) {
        while self.goes_on() {
            let ended = match self.kind.as_str() {
                "append-1" => self.append(|_| 1, OFlags::empty(), false),
                "append-100" => self.append(|_| 100, OFlags::empty(), false),
                "append-64k" => self.append(|_| 65_536, OFlags::empty(), false),
                "reopen" => self.append(|number| number as usize % 3000 + 1, OFlags::empty(), true),
                "o-sync" => self.append(|number| number as usize % 9000 + 1, OFlags::SYNC, false),
                "sparse" => self.anywhere(OFlags::empty(), 1, 20_000),
                "o-direct" => self.anywhere(OFlags::DIRECT, PAGE, 65_536),
                "read-write" => self.read_and_write(),
                "holes" => self.make_holes(),
                "copy" => self.copy(),
                "mapped" => self.map(true),
                "mapped-holes" => self.map(false),
                "names" => return self.names(),
                "links" => self.link(),
                "splice" => self.splice(),
                "unlinked" => self.write_unlinked(),
                other => panic!("no writer is called {other}"),
            };
            if matches!(ended, Err(Stop::Gone)) {
                return;
            }
            self.rest();
        }
    }

    fn create(&mut self, name: &str, options: &mut OpenOptions) -> Result<File, Stop> {
        let opened = options.create(true).open(self.place.join(name));
        self.told("open", opened)
    }

    /// Restarts a file: it is removed, or truncated as a log is after it was copied.
    fn begin_again(&mut self, name: &str, file: &File, book: &mut Book) -> Result<(), Stop> {
        if self.killed {
            self.leave(name, book);
            return Ok(());
        }
        self.settle(file, name, book)?;
        if self.random.once_in(2) {
            let emptied = file.set_len(0);
            self.must("truncate to 0", emptied)?;
        } else {
            let removed = fs::remove_file(self.place.join(name));
            self.must("unlink", removed)?;
        }
        Ok(())
    }

    /// Ends the work on a file. Everything written has to be there.
    fn end(&mut self, name: &str, file: &File, book: &mut Book) {
        if self.settle(file, name, book).is_ok() || self.killed {
            self.leave(name, book);
        }
    }

    /// Records the result of writing `data` at `at`; returns whether the write failed for want of
    /// space.
    fn book(
        &mut self,
        what: &str,
        book: &mut Book,
        at: usize,
        data: &[u8],
        written: io::Result<usize>,
    ) -> Result<bool, Stop> {
        let full = match self.told(what, written) {
            Ok(written) => {
                book.put(at, &data[..written]);
                // The kernel splits a write into requests: where the daemon was killed during a
                // later one, the call returns the bytes of the requests before it, and the bytes of
                // that one may be there.
                let (to, end) = (at + written, at + data.len());
                book.torn = (self.killed && to < end).then_some((to, end));
                false
            }
            Err(Stop::Full) => {
                book.torn = None;
                true
            }
            Err(Stop::Gone) => return Err(Stop::Gone),
        };
        book.doubtful = None;
        Ok(full)
    }

    /// Returns whether a file is to be restarted: it has become large, or the cage is full and some
    /// writer has to free space.
    fn is_enough(&mut self, book: &Book, full: bool) -> bool {
        book.content.len() >= self.most || full && self.random.once_in(8)
    }

    fn append(&mut self, length: impl Fn(u64) -> usize, more: OFlags, reopen: bool) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book { appended: true, ..Book::default() };
        let mut options = OpenOptions::new();
        options.append(true).custom_flags(flags(more));
        let mut file = self.create(&name, &mut options)?;
        let before = file.metadata();
        assert_eq!(self.must("fstat", before)?.len(), 0, "{}: begun again", self.kind);
        while self.goes_on() {
            if reopen {
                match self.create(&name, &mut options) {
                    Ok(opened) => file = opened,
                    Err(Stop::Full) => continue,
                    Err(Stop::Gone) => break,
                }
            }
            let data = {
                let number = self.random.next() >> 8;
                self.random.bytes(length(number))
            };
            let end = book.content.len();
            book.doubtful = Some((end, end + data.len()));
            let written = file.write(&data);
            let Ok(full) = self.book("append", &mut book, end, &data, written) else { break };
            if full {
                self.rest();
            } else if more.contains(OFlags::SYNC) {
                book.unsynced = None;
            }
            let synced = if self.random.once_in(500) { self.settle(&file, &name, &mut book) } else { Ok(()) };
            if synced.is_err() {
                break;
            }
            if self.is_enough(&book, full) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    fn anywhere(&mut self, more: OFlags, unit: usize, longest: usize) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let file = self.create(&name, OpenOptions::new().write(true).custom_flags(flags(more)))?;
        let mut memory = vec![0u8; longest + 2 * PAGE];
        let skip = memory.as_ptr().align_offset(PAGE);
        while self.goes_on() {
            let length = (self.random.below((longest / unit) as u64) as usize + 1) * unit;
            let at = self.random.below((self.most / unit) as u64) as usize * unit;
            let data = self.random.bytes(length);
            memory[skip..skip + length].copy_from_slice(&data);
            book.doubtful = Some((at, at + length));
            let written = file.write_at(&memory[skip..skip + length], at as u64);
            let Ok(full) = self.book("pwrite", &mut book, at, &data, written) else { break };
            if self.random.once_in(1000) || full && self.random.once_in(8) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    fn read_and_write(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let file = self.create(&name, OpenOptions::new().read(true).write(true))?;
        while self.goes_on() {
            let length = self.random.below(10_000) as usize + 1;
            let end = book.content.len();
            let at = if end > 0 && self.random.once_in(3) { self.random.below(end as u64) as usize } else { end };
            let data = self.random.bytes(length);
            book.doubtful = Some((at, at + length));
            let written = file.write_at(&data, at as u64);
            let Ok(full) = self.book("pwrite", &mut book, at, &data, written) else { break };
            let from = at.saturating_sub(self.random.below(20_000) as usize);
            let mut seen = vec![0; book.content.len() - from.min(book.content.len())];
            let read = file.read_exact_at(&mut seen, from as u64);
            if self.must("read", read).is_err() {
                break;
            }
            assert!(
                seen == book.content[from.min(book.content.len())..],
                "{}: what is read back at {from} is something else",
                self.kind
            );
            if self.is_enough(&book, full) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    fn make_holes(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let file = self.create(&name, OpenOptions::new().read(true).write(true))?;
        while self.goes_on() {
            let at = self.random.below(self.most as u64) as usize;
            let length = self.random.below(100_000) as usize + 1;
            let (from, bytes) = (at as u64, length as u64);
            let end = book.content.len();
            let full = match self.random.below(7) {
                0 | 1 => {
                    let data = self.random.bytes(length);
                    let written = file.write_at(&data, from);
                    self.told("pwrite", written).map(|written| book.put(at, &data[..written]))
                }
                2 => {
                    let done = fallocate(&file, FallocateFlags::empty(), from, bytes).map_err(io::Error::from);
                    self.told("fallocate", done).map(|()| book.content.resize(end.max(at + length), 0))
                }
                3 => {
                    let done = fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, bytes)
                        .map_err(io::Error::from);
                    self.told("punch", done).map(|()| book.zero(at, at + length))
                }
                4 => {
                    let done = fallocate(&file, FallocateFlags::ZERO_RANGE, from, bytes).map_err(io::Error::from);
                    self.told("zero range", done).map(|()| {
                        book.zero(at, at + length);
                        book.content.resize(end.max(at + length), 0);
                    })
                }
                5 => {
                    let done = file.set_len(from);
                    self.told("truncate", done).map(|()| book.content.resize(at, 0))
                }
                _ => {
                    let done = fallocate(&file, FallocateFlags::KEEP_SIZE, from, bytes).map_err(io::Error::from);
                    self.told("fallocate, size kept", done)
                }
            }
            .is_err();
            // A failed call may have zeroed nothing, allocated something, and changed no byte.
            if self.random.once_in(200) || full && self.random.once_in(8) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    fn copy(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let (origin, target) = (self.create("origin", &mut options)?, self.create(&name, &mut options)?);
        let mut content = self.random.bytes(300_000);
        let written = origin.write_at(&content, 0);
        let written = self.told("pwrite", written)?;
        content.truncate(written);
        while self.goes_on() {
            let length = self.random.below(200_000) as usize + 1;
            let from = self.random.below(content.len() as u64) as usize;
            let at =
                if self.random.once_in(3) { self.random.below(self.most as u64) as usize } else { book.content.len() };
            let (mut offset, mut place) = (from as u64, at as u64);
            let copied =
                copy_file_range(&origin, Some(&mut offset), &target, Some(&mut place), length).map_err(io::Error::from);
            let full = match self.told("copy_file_range", copied) {
                Ok(copied) => {
                    book.put(at, &content[from..from + copied]);
                    false
                }
                Err(Stop::Full) => true,
                Err(Stop::Gone) => break,
            };
            if self.random.once_in(300) || full && self.random.once_in(8) {
                self.begin_again(&name, &target, &mut book)?;
                let emptied = origin.set_len(0);
                return self.must("truncate", emptied);
            }
        }
        self.end(&name, &target, &mut book);
        Ok(())
    }

    /// Stores through a mapping: into allocated blocks, which must not fail, or into a hole, where
    /// msync reports the failure.
    fn map(&mut self, allocated: bool) -> Result<(), Stop> {
        let name = self.next_name();
        let length = self.most.min(1 << 20);
        let mut book = Book { content: vec![0; length], ..Book::default() };
        let file = self.create(&name, OpenOptions::new().read(true).write(true))?;
        if allocated {
            let done = fallocate(&file, FallocateFlags::empty(), 0, length as u64).map_err(io::Error::from);
            self.told("fallocate", done)?;
        } else {
            let done = file.set_len(length as u64);
            self.told("truncate", done)?;
        }
        let mapping = SharedMapping::new(&file, length, true);
        let mapping = self.must("mmap", mapping)?;
        while self.goes_on() {
            for _ in 0..self.random.below(20) {
                let data = {
                    let length = self.random.below(6000) as usize + 1;
                    self.random.bytes(length)
                };
                let at = self.random.below((length - data.len()) as u64) as usize;
                mapping.write(at, &data).expect("within the mapping");
                book.put(at, &data);
            }
            let synced = mapping.sync();
            if allocated {
                self.must("msync of allocated blocks", synced)?;
            } else if let Err(error) = synced {
                // The lost pages are unknown: the file's expected content is, too.
                assert!(matches!(error.raw_os_error(), Some(ENOSPC | EIO)), "{}: msync: {error}", self.kind);
                self.refused += 1;
                drop(mapping);
                let removed = fs::remove_file(self.place.join(&name));
                return self.must("unlink", removed);
            }
            self.accepted += 1;
            if self.random.once_in(20) {
                drop(mapping);
                self.settle(&file, &name, &mut book)?;
                let removed = fs::remove_file(self.place.join(&name));
                return self.must("unlink", removed);
            }
            self.rest();
        }
        drop(mapping);
        self.end(&name, &file, &mut book);
        Ok(())
    }

    /// Creates, renames and removes files as long as it runs; then checks the files that must be
    /// there.
    fn names(&mut self) {
        let mut files: BTreeMap<String, Book> = BTreeMap::new();
        let mut unsure: Option<[String; 2]> = None;
        for directory in 0..4 {
            while fs::create_dir(self.place.join(format!("d{directory}"))).is_err() {
                if !self.goes_on() || self.killed {
                    return;
                }
            }
        }
        while self.goes_on() {
            let mut name = || format!("d{}+f{}", self.random.below(4), self.random.below(40));
            let (from, to) = (name(), name());
            let path = |name: &str| name.replace('+', "/");
            let (source, target) = (self.place.join(path(&from)), self.place.join(path(&to)));
            unsure = Some([from.clone(), to.clone()]);
            let result = match self.random.below(5) {
                0 | 1 => {
                    let data = {
                        let length = self.random.below(30_000) as usize;
                        self.random.bytes(length)
                    };
                    let mut book = Book::default();
                    let made = File::create(&source);
                    self.told("create", made).and_then(|file| {
                        files.insert(from.clone(), book.clone());
                        let mut done = 0;
                        while done < data.len() {
                            let written = file.write_at(&data[done..], done as u64);
                            match self.told("pwrite", written) {
                                Ok(written) => book.put(done, &data[done..done + written]),
                                Err(stop) => {
                                    files.insert(from.clone(), book);
                                    return Err(stop);
                                }
                            }
                            done = book.content.len();
                        }
                        files.insert(from.clone(), book);
                        Ok(())
                    })
                }
                2 if files.contains_key(&from) => {
                    let renamed = fs::rename(&source, &target);
                    self.told("rename", renamed).map(|()| {
                        let book = files.remove(&from).expect("it is there");
                        files.insert(to.clone(), book);
                    })
                }
                3 if files.contains_key(&from) => {
                    let removed = fs::remove_file(&source);
                    self.must("unlink", removed).map(|()| drop(files.remove(&from)))
                }
                _ => {
                    let inner = self.place.join("d0/inner");
                    let made = fs::create_dir(&inner);
                    self.told("mkdir", made).and_then(|()| {
                        let removed = fs::remove_dir(&inner);
                        self.must("rmdir", removed)
                    })
                }
            };
            match result {
                Ok(()) => {}
                Err(Stop::Full) => {
                    for (name, _) in std::mem::take(&mut files) {
                        let removed = fs::remove_file(self.place.join(path(&name)));
                        if self.must("unlink", removed).is_err() {
                            return;
                        }
                    }
                }
                Err(Stop::Gone) => break,
            }
            unsure = None;
        }
        // The files of the interrupted call may or may not be there.
        files.retain(|name, _| unsure.as_ref().is_none_or(|names| !names.contains(name)));
        for (name, book) in &files {
            self.leave(name, book);
        }
    }

    /// Appends by two names of one file, each of which may be removed last.
    fn link(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book { appended: true, ..Book::default() };
        let mut options = OpenOptions::new();
        options.append(true);
        let file = self.create(&name, &mut options)?;
        let second = self.place.join("second");
        while self.goes_on() {
            let linked = fs::hard_link(self.place.join(&name), &second);
            if let Err(Stop::Full) = self.told("link", linked) {
                continue;
            }
            let mut full = false;
            for path in [&self.place.join(&name), &second, &second] {
                let data = {
                    let length = self.random.below(5000) as usize + 1;
                    self.random.bytes(length)
                };
                let opened = options.open(path);
                let mut other = self.must("open", opened)?;
                let written = other.write(&data);
                match self.told("append", written) {
                    Ok(written) => {
                        let end = book.content.len();
                        book.put(end, &data[..written]);
                    }
                    Err(_) => full = true,
                }
            }
            if self.random.once_in(2) {
                let removed = fs::remove_file(&second);
                self.must("unlink", removed)?;
            } else {
                // The first name goes; renaming one name of a file over another does nothing.
                let removed = fs::remove_file(self.place.join(&name));
                self.must("unlink", removed)?;
                let renamed = fs::rename(&second, self.place.join(&name));
                self.must("rename", renamed)?;
            }
            if self.is_enough(&book, full) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    /// Splices from a file on the host and out of a pipe, without a buffer.
    fn splice(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let file = self.create(&name, OpenOptions::new().write(true))?;
        let (content, origin) = (self.random.bytes(500_000), self.stop.with_file_name("origin"));
        fs::write(&origin, &content).unwrap();
        let origin = File::open(origin).unwrap();
        while self.goes_on() {
            let length = self.random.below(100_000) as usize + 1;
            let from = self.random.below((content.len() - length) as u64);
            let end = book.content.len();
            let full = if self.random.once_in(2) {
                let mut offset = from;
                rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(end as u64)).unwrap();
                let sent = sendfile(&file, &origin, Some(&mut offset), length).map_err(io::Error::from);
                self.told("sendfile", sent)
                    .map(|sent| book.put(end, &content[from as usize..from as usize + sent]))
                    .is_err()
            } else {
                let (out, into) = pipe().unwrap();
                let (mut offset, mut place) = (from, end as u64);
                let taken =
                    splice(&origin, Some(&mut offset), &into, None, length.min(60_000), SpliceFlags::empty()).unwrap();
                let given =
                    splice(&out, None, &file, Some(&mut place), taken, SpliceFlags::empty()).map_err(io::Error::from);
                self.told("splice", given)
                    .map(|given| book.put(end, &content[from as usize..from as usize + given]))
                    .is_err()
            };
            if self.is_enough(&book, full) {
                return self.begin_again(&name, &file, &mut book);
            }
        }
        self.end(&name, &file, &mut book);
        Ok(())
    }

    /// An unlinked file occupies space until it is closed.
    fn write_unlinked(&mut self) -> Result<(), Stop> {
        let name = self.next_name();
        let mut book = Book::default();
        let file = self.create(&name, OpenOptions::new().read(true).write(true))?;
        let removed = fs::remove_file(self.place.join(&name));
        self.must("unlink", removed)?;
        while self.goes_on() && book.content.len() < self.most {
            let data = {
                let length = self.random.below(100_000) as usize + 1;
                self.random.bytes(length)
            };
            let end = book.content.len();
            let written = file.write_at(&data, end as u64);
            let Ok(written) = self.told("pwrite", written) else { break };
            book.put(end, &data[..written]);
        }
        let mut seen = vec![0; book.content.len()];
        let read = file.read_exact_at(&mut seen, 0);
        self.must("read", read)?;
        assert!(seen == book.content, "{}: what is read back is something else", self.kind);
        Ok(())
    }
}

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
